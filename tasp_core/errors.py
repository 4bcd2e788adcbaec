"""Errors that a user can cause; each says what was asked, what was found, what to do.

All are `ValueError`s except `TransportError`, which reports a message that did not arrive.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class PlanError(ValueError):
    """A plan that cannot be built, is wrong, or does not fit the tensors or the process group."""


class LayoutError(ValueError):
    """A layout that is unknown, or tensors that do not match it."""


class TopologyError(ValueError):
    """A machine or a ring decomposition that cannot exist."""


class FabricError(TopologyError):
    """An emulated network that cannot be built on this system."""


class TransportError(RuntimeError):
    """A message that did not arrive; names rank, step, peer and share.

    Attributes:
        peers: global ranks that were waited for; () where that is not known.
    """

    def __init__(self, *args: object, peers: Iterable[int] = ()) -> None:
        super().__init__(*args)
        self.peers = tuple(int(peer) for peer in peers)


def check_int(value: Any, what: str, least: int, error: type[ValueError]) -> int:
    """`value` as an int, if it is a whole number of at least `least`; else the error says so.

    >>> check_int(4.0, "ranks", 1, PlanError)
    4
    """
    try:
        number = int(value)
        if number == value and number >= least and not isinstance(value, bool | str):
            return number
    except (TypeError, ValueError, OverflowError):
        pass
    raise error(f"{what} must be a whole number >= {least}, got {value!r}")
