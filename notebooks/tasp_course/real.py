"""Learners' functions on real ranks, where a deadlock is an answer, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tasp_core as tasp

from .verdict import expect

LIMIT_S = 6.0


def on_ranks(fn: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """`tasp.launch`, where ranks that wait for each other make the answer wrong.

    Raises:
        WrongError: they hang.
        RankError: one raised something of its own.
    """
    try:
        return tasp.launch(fn, ranks, *args, timeout_s=LIMIT_S)
    except tasp.RankError as error:
        words = error.errors[error.first]
        hung = "hung" in words or "Timed out" in words
        expect(
            not hung,
            f"{ranks} ranks: rank {error.first} waits for ever; who is to answer it, and when?",
        )
        raise
