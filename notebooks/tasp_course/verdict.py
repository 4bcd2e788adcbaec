"""Verdicts: what a check says about a learner's answer. A check never raises.

    @exercise
    def check_next(answer):             # a judge: it returns where the answer is right
        expect(answer(2, 4) == 3, "rank 2 of 4 sends to rank 3")

    check_next(lambda rank, n: ...)     # still to do
    check_next(lambda rank, n: rank)    # not yet: rank 2 of 4 sends to rank 3
    check_recap = recap((20, "count ordered pairs"), ("ring", "which one leaves links unused?"))

A stub is `...`, None, or a function, list, tuple or dict that gives or holds one of them. Judges see
functions that stop the check as "still to do" when they return a stub, on forked ranks, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from html import escape
from math import isclose
from traceback import format_exception
from typing import Any, Literal

from tasp_core import RankError

COLOURS = {"to do": "#777777", "wrong": "#D55E00", "right": "#009E73"}
NEAR = 0.02  # how far off a recap's answer may be where the key is a float


class WrongError(Exception):
    """Said by `expect`: the answer is wrong, and how to find out why."""


class UnfinishedError(Exception):
    """The answer is still a stub."""


@dataclass(frozen=True)
class Verdict:
    """What a check found.

    >>> Verdict("wrong", "rank 3 has no receiver"), Verdict("right")
    (not yet: rank 3 has no receiver, right)
    """

    state: Literal["to do", "wrong", "right"]
    hint: str = ""

    def __repr__(self) -> str:
        words = {"to do": "still to do", "wrong": "not yet", "right": "right"}[self.state]
        return f"{words}: {self.hint}" if self.hint else words

    def _repr_html_(self) -> str:
        look = f"border-left: 6px solid {COLOURS[self.state]}; padding: 4px 10px; margin: 2px"
        return (
            f'<div role="status" style="{look}; white-space: pre-wrap">{escape(repr(self))}</div>'
        )


def expect(ok: Any, hint: str) -> None:
    """Go on where `ok` holds.

    Raises:
        WrongError: with the hint, where it does not.
    """
    if not ok:
        raise WrongError(hint)


def is_stub(answer: Any) -> bool:
    """Whether an answer is, or holds, a stub.

    >>> is_stub([1, ...]), is_stub({"a": None}), is_stub([0, False])
    (True, True, False)
    """
    if isinstance(answer, dict):
        answer = list(answer.values())
    if isinstance(answer, list | tuple):
        return any(x is None or x is ... for x in answer)
    return answer is None or answer is ...


def _lacking(found: Any) -> str:
    """What to say of an unfinished result: nothing where there is a `...` to be replaced."""
    if found is None:
        return "your function returns nothing yet"
    parts = found.values() if isinstance(found, dict) else [found] if found is ... else found
    return "" if any(x is ... for x in parts) else "a part of what your function returns is None"


def _guarded(answer: Any) -> Any:
    """A function that raises where the learner's returns a stub; other answers as they are."""
    if not callable(answer):
        return answer

    @wraps(answer)
    def call(*args: Any, **kwargs: Any) -> Any:
        found = answer(*args, **kwargs)
        if is_stub(found):
            raise UnfinishedError(_lacking(found))
        return found

    return call


def raised(error: BaseException) -> str:
    """What an answer raised, on which rank, and in which line of the learner's cell.

    A rank's error brings the rank's own traceback, and what the rank raised.
    """
    told, cause, where = "".join(format_exception(error)), error, ""
    if isinstance(error, RankError):
        told, where = error.errors[error.first], f" on rank {error.first}"
        if error.cause is None:  # it died or hung
            return f"your answer failed{where}: {told.strip().splitlines()[-1]}"
        cause = error.cause
    if in_cell := re.findall(r'File "[^"]*ipykernel[^"]*", line (\d+)', told):
        where += f" in line {in_cell[-1]} of its cell"
    return f"your answer raised {type(cause).__name__}{where}: {cause}"


def exercise(judge: Callable[[Any], None]) -> Callable[[Any], Verdict]:
    """Make a judge, which returns for a right answer and raises otherwise, a check."""

    @wraps(judge)
    def check(answer: Any) -> Verdict:
        try:
            if is_stub(answer):
                raise UnfinishedError
            judge(_guarded(answer))
        except WrongError as wrong:
            return Verdict("wrong", str(wrong))
        except (Exception, SystemExit) as error:
            cause = getattr(error, "cause", None) or error  # of a rank's error, what it raised
            if isinstance(cause, UnfinishedError):
                return Verdict("to do", str(cause))
            return Verdict("wrong", raised(error))
        return Verdict("right")

    return check


def _same(given: Any, key: Any) -> bool:
    if callable(key):
        return bool(key(given))
    if isinstance(key, float):
        return isclose(given, key, rel_tol=NEAR)
    if isinstance(key, str):
        return str(given).strip().casefold() == key.casefold()
    return bool(given == key)


def recap(*keys: tuple[Any, str]) -> Callable[[Sequence[Any]], Verdict]:
    """A check of a list of answers, in the order of the questions.

    Args:
        keys: (key, hint) of each question; a key is a value, a float that may be missed by 2 %, a word
            in either case, or a function that says whether an answer is right.
    """

    def check(answers: Sequence[Any]) -> Verdict:
        given = list(answers) if isinstance(answers, list | tuple) else [answers]
        if len(given) != len(keys):
            return Verdict("wrong", f"{len(keys)} answers are asked for, got {len(given)}")
        right = 0
        for number, (answer, (key, hint)) in enumerate(zip(given, keys, strict=True), 1):
            if is_stub(answer):
                continue
            try:
                fits = _same(answer, key)
            except Exception:  # an answer of another type than asked for
                fits = False
            if not fits:
                return Verdict("wrong", f"question {number}: {hint}")
            right += 1
        if right < len(keys):
            so_far = ", right so far" if right else ""
            return Verdict("to do", f"{right} of {len(keys)} answered{so_far}")
        return Verdict("right", f"all {len(keys)}")

    return check
