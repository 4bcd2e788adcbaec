"""The schedules, by name. To add one, put a file with a `Schedule` subclass into this package.

All modules of the package are imported here, and each class registers itself (schedule.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pkgutil import walk_packages
from typing import Any

from ..errors import PlanError
from ..machines.machine import Machine
from ..sequence.layouts import Layout
from .hops import DKV, DQ, EXCHANGES, KINDS, KV, OUT, Hops, OffloadedPairs, Q
from .schedule import SCHEDULES, DeclaredLimits, Schedule, Table

__all__ = [
    "DKV",
    "DQ",
    "EXCHANGES",
    "KINDS",
    "KV",
    "OUT",
    "SCHEDULES",
    "DeclaredLimits",
    "Hops",
    "OffloadedPairs",
    "Q",
    "Schedule",
    "Table",
    "build",
    "schedules",
]

for _module in walk_packages(__path__, f"{__name__}."):
    import_module(_module.name)


def schedules() -> dict[str, str]:
    """Names of the schedules with one line each.

    >>> "ring" in schedules(), len(schedules()["ring"]) > 0
    (True, True)
    """
    return {name: str(cls.__doc__) for name, cls in SCHEDULES.items()}


def build(
    name: str,
    machine: Machine,
    options: Mapping[str, Any] | None = None,
    layout: Layout | None = None,
) -> Schedule:
    """The named schedule on a machine, its options resolved; `layout` for those compiled for one.

    Raises:
        PlanError: an unknown name or option, or a machine the schedule cannot serve.

    >>> from tasp_core import machine
    >>> build("wave", machine("mesh8x2")).options
    {'blocks': 15, 'twins': 14}
    """
    if name not in SCHEDULES:
        raise PlanError(f"no schedule {name!r}; known are {', '.join(SCHEDULES)}")
    cls = SCHEDULES[name]
    if missing := sorted(getattr(cls, "__abstractmethods__", ())):
        raise PlanError(
            f"schedule {name!r}: class {cls.__qualname__} does not define {', '.join(missing)}"
        )
    return cls.on(machine, options, layout)
