"""Learners' functions on real ranks, where a deadlock is an answer, too.

`hold_messages_to` and `only_blocking` change what a rank calls: use them in its forked process alone.
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
    """`tasp.launch`, where ranks that wait for each other make the answer wrong.

    Raises:
        WrongError: they hang, or an `expect` on one of them did not hold.
        RankError: one raised something of its own.
    """
    try:
        return tasp.launch(fn, ranks, *args, timeout_s=LIMIT_S)
    except tasp.RankError as error:
        for words in error.errors.values():  # it need not be the first: others stop because it did
            _, wrong, hint = words.strip().splitlines()[-1].partition(f"{WrongError.__name__}: ")
            expect(not wrong, f"{ranks} ranks: {hint}")
        words = error.errors[error.first]
        # a rank whose wait is over closes its connections, and its peer's wait ends by that
        hung = any(x in words for x in ("hung", "Timed out", "Connection closed by peer"))
        expect(
            not hung,
            f"{ranks} ranks: rank {error.first} waits for ever; who is to answer it, and when?",
        )
        raise


def _size(x: Tensor) -> str:
    """What a message of this tensor has, "4 float32 numbers"."""
    kind = str(x.dtype).removeprefix("torch.")
    return f"{x.numel()} {kind} number{'' if x.numel() == 1 else 's'}"


def _measured(call: Callable[..., Any], does: str, like: Tensor) -> Callable[..., Any]:
    """A method of process groups that posts tensors of one size only."""

    @wraps(call)
    def measured(group: Any, tensors: list[Tensor], *more: Any) -> Any:
        for x in tensors:
            hint = f"each message here has {_size(like)}, as torch.empty({like.numel()}) has"
            expect(_size(x) == _size(like), f"rank {dist.get_rank()} {does} {_size(x)}; {hint}")
        return call(group, tensors, *more)

    return measured


def hold_messages_to(like: Tensor) -> None:
    """On this rank, a message of another size or type than the tensor's makes the answer wrong.

    Without it gloo ends the process of a rank whose buffer is too small, and fills one that is too
    large in part. Every way to send and to receive comes through the process group's methods.
    """
    for name, does in DOES.items():
        setattr(dist.ProcessGroup, name, _measured(getattr(dist.ProcessGroup, name), does, like))


def _refused(name: str) -> Callable[..., NoReturn]:
    """What stands for a call that is not asked for."""

    def refused(*unused: Any, **more: Any) -> NoReturn:
        raise WrongError(
            f"{name} does not wait until its message is through; here send and recv alone are asked "
            "for, in an order that does not hang"
        )

    return refused


def only_blocking() -> None:
    """On this rank, `isend`, `irecv` and batches of them make the answer wrong."""
    for name in ("isend", "irecv", "P2POp"):
        setattr(dist, name, _refused(name))
