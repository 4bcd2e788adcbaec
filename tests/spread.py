"""Which of many cases `make test` runs; `make test-full` runs the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest


def spread(values: Iterable[Any], keep: int) -> list[Any]:
    """Cases for `pytest.mark.parametrize`, all but `keep` of them marked `full`.

    A tuple holds the values of several arguments.

    Each kept case shares as few values as it can with those that are kept already. Of a product of two
    lists, every value of both is kept if `keep` is at least the longer list's length. Where cases share
    equally many, the one farthest from all that are kept is next: a list is kept in even distances.

    >>> [case.values for case in spread("abcde", 3) if not case.marks]
    [('a',), ('c',), ('e',)]
    """
    rows = [value if isinstance(value, tuple) else (value,) for value in values]
    assert 0 < keep < len(rows), f"{keep} of {len(rows)} cases"
    kept: list[int] = []
    uses: Counter[tuple[int, str]] = Counter()

    def cost(index: int) -> tuple[int, int]:
        shared = sum(uses[item] for item in enumerate(map(repr, rows[index])))
        return shared, -min((abs(index - other) for other in kept), default=0)

    for _ in range(keep):
        best = min((i for i in range(len(rows)) if i not in kept), key=cost)
        kept.append(best)
        uses.update(enumerate(map(repr, rows[best])))
    return [
        pytest.param(*row, marks=[] if index in kept else pytest.mark.full)
        for index, row in enumerate(rows)
    ]
