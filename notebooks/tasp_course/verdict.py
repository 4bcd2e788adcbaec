"""Verdicts: what a check says about a learner's answer. A check never raises.

    @exercise
    def check_next(answer):             # returns if the answer is right, else raises
        expect(answer(2, 4) == 3, "rank 2 of 4 sends to rank 3")

    check_next(lambda rank, n: ...)     # still to do
    check_next(lambda rank, n: rank)    # not yet: rank 2 of 4 sends to rank 3
    check_recap = recap((20, "count ordered pairs"), ("ring", "which one leaves links unused?"))

A stub is `...`, None, a list, tuple or dict that contains one of them, or a function that returns one of
these. A check wraps the learner's function: if it returns a stub, the check stops with "still to do", on
forked ranks, too.
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
NEAR = 0.02  # allowed relative error of a recap's answer where the key is a float


class WrongError(Exception):
    """Raised by `expect`: the answer is wrong; the text is a hint."""


class UnfinishedError(Exception):
    """The answer is still a stub."""


@dataclass(frozen=True)
class Verdict:
    """The result of a check.

    >>> Verdict("wrong", "rank 3 has no receiver"), Verdict("right")
    (not yet: rank 3 has no receiver, right)
    """

    state: Literal["to do", "wrong", "right"]
    hint: str = ""

    def __repr__(self) -> str:
        text = {"to do": "still to do", "wrong": "not yet", "right": "right"}[self.state]
        return f"{text}: {self.hint}" if self.hint else text

    def _repr_html_(self) -> str:
        look = f"border-left: 6px solid {COLOURS[self.state]}; padding: 4px 10px; margin: 2px"
        return (
            f'<div role="status" style="{look}; white-space: pre-wrap">{escape(repr(self))}</div>'
        )


def expect(ok: Any, hint: str) -> None:
    """Return if `ok` is true.

    Raises:
        WrongError: with the hint, if it is not.
    """
    if not ok:
        raise WrongError(hint)


def is_stub(answer: Any) -> bool:
    """Whether an answer is, or contains, a stub.

    >>> is_stub([1, ...]), is_stub({"a": None}), is_stub([0, False])
    (True, True, False)
    """
    if isinstance(answer, dict):
        answer = list(answer.values())
    if isinstance(answer, list | tuple):
        return any(x is None or x is ... for x in answer)
    return answer is None or answer is ...


def _missing(result: Any) -> str:
    """The hint for a function's unfinished result, "" where it contains a `...` to be replaced."""
    if result is None:
        return "your function returns nothing yet"
    parts = result.values() if isinstance(result, dict) else [result] if result is ... else result
    return "" if any(x is ... for x in parts) else "a part of what your function returns is None"


def _guarded(answer: Any) -> Any:
    """A function that raises where the learner's function returns a stub; other answers unchanged."""
    if not callable(answer):
        return answer

    @wraps(answer)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = answer(*args, **kwargs)
        if is_stub(result):
            raise UnfinishedError(_missing(result))
        return result

    return call


def raised(error: BaseException) -> str:
    """What an answer raised, on which rank, and in which line of the learner's cell.

    The error of a rank has the rank's own traceback, and its cause is what the rank raised.
    """
    trace, cause, where = "".join(format_exception(error)), error, ""
    if isinstance(error, RankError):
        trace, where = error.errors[error.first], f" on rank {error.first}"
        if error.cause is None:  # it died or hung
            return f"your answer failed{where}: {trace.strip().splitlines()[-1]}"
        cause = error.cause
    if in_cell := re.findall(r'File "[^"]*ipykernel[^"]*", line (\d+)', trace):
        where += f" in line {in_cell[-1]} of its cell"
    return f"your answer raised {type(cause).__name__}{where}: {cause}"


def exercise(assertion: Callable[[Any], None]) -> Callable[[Any], Verdict]:
    """Decorator: a check made of a function that returns for a right answer and raises otherwise."""

    @wraps(assertion)
    def check(answer: Any) -> Verdict:
        try:
            if is_stub(answer):
                raise UnfinishedError
            assertion(_guarded(answer))
        except WrongError as wrong:
            return Verdict("wrong", str(wrong))
        except (Exception, SystemExit) as error:
            cause = getattr(error, "cause", None) or error  # of a rank's error, what it raised
            if isinstance(cause, UnfinishedError):
                return Verdict("to do", str(cause))
            return Verdict("wrong", raised(error))
        return Verdict("right")

    return check


def _same(answer: Any, key: Any) -> bool:
    if callable(key):
        return bool(key(answer))
    if isinstance(key, float):
        return isclose(answer, key, rel_tol=NEAR)
    if isinstance(key, str):
        return str(answer).strip().casefold() == key.casefold()
    return bool(answer == key)


def recap(*keys: tuple[Any, str]) -> Callable[[Sequence[Any]], Verdict]:
    """A check of a list of answers, in the order of the questions.

    Args:
        keys: (key, hint) of each question. A key is a value, a float (an answer may be 2 % off), a
            string (upper and lower case are the same), or a function that is true for a right answer.
    """

    def check(answers: Sequence[Any]) -> Verdict:
        got = list(answers) if isinstance(answers, list | tuple) else [answers]
        if len(got) != len(keys):
            return Verdict("wrong", f"{len(keys)} answers are asked for, got {len(got)}")
        right = 0
        for number, (answer, (key, hint)) in enumerate(zip(got, keys, strict=True), 1):
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
