"""Learners' functions on real ranks: a deadlock makes an answer wrong, it does not hang the check.

`require_message_size` and `only_blocking` replace functions of torch: call them in a forked rank only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor

import tasp_core as tasp

from .verdict import WrongError, expect

LIMIT_S = 6.0
DOES = {"send": "sends", "recv": "receives into", "recv_anysource": "receives into"}


def on_ranks(fn: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """`tasp.launch` with a short time limit; ranks that wait for each other make the answer wrong.

    Raises:
        WrongError: ranks hang, or an `expect` on one of them failed.
        RankError: a rank raised any other error.
    """
    try:
        return tasp.launch(fn, ranks, *args, timeout_s=LIMIT_S)
    except tasp.RankError as error:
        for text in error.errors.values():  # not only the first: other ranks fail because of it
            _, wrong, hint = text.strip().splitlines()[-1].partition(f"{WrongError.__name__}: ")
            expect(not wrong, f"{ranks} ranks: {hint}")
        text = error.errors[error.first]
        # a rank that times out closes its connections, which ends the wait of its peer
        hung = any(x in text for x in ("hung", "Timed out", "Connection closed by peer"))
        expect(
            not hung,
            f"{ranks} ranks: rank {error.first} waits for ever; which rank should send to it or receive "
            "from it, and when?",
        )
        raise


def _size(x: Tensor) -> str:
    """The content of a message with this tensor, "4 float32 numbers"."""
    kind = str(x.dtype).removeprefix("torch.")
    return f"{x.numel()} {kind} number{'' if x.numel() == 1 else 's'}"


def _same_size_only(call: Callable[..., Any], does: str, like: Tensor) -> Callable[..., Any]:
    """A method of process groups, which fails for tensors of another size than this one."""

    @wraps(call)
    def checked(group: Any, tensors: list[Tensor], *more: Any) -> Any:
        for x in tensors:
            hint = f"each message here has {_size(like)}, as torch.empty({like.numel()}) has"
            expect(_size(x) == _size(like), f"rank {dist.get_rank()} {does} {_size(x)}; {hint}")
        return call(group, tensors, *more)

    return checked


def require_message_size(like: Tensor) -> None:
    """On this rank, a message of another size or dtype than the tensor's makes the answer wrong.

    Without it gloo ends the process of a rank whose buffer is too small, and fills only a part of one
    that is too large. All functions that send or receive call these methods of the process group.
    """
    for name, does in DOES.items():
        setattr(
            dist.ProcessGroup, name, _same_size_only(getattr(dist.ProcessGroup, name), does, like)
        )


def _refused(name: str) -> Callable[..., NoReturn]:
    """What replaces a function that the exercise does not ask for."""

    def refused(*unused: Any, **more: Any) -> NoReturn:
        raise WrongError(
            f"{name} does not wait until its message is through; use send and recv alone, in an order "
            "that does not hang"
        )

    return refused


def only_blocking() -> None:
    """On this rank, calls of `isend`, `irecv` and batches of them make the answer wrong."""
    for name in ("isend", "irecv", "P2POp"):
        setattr(dist, name, _refused(name))
