"""What a training step consumes: rows of text as this rank's tokens, labels, positions and plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from ..data import Corpus, Cursor, Row, packed_rows
from ..documents import Documents
from ..plan import Plan

IGNORE = -100


class Local(NamedTuple):
    """A rank's tokens of a row: ids, labels and positions int64 [t]; and the row's plan."""

    ids: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    plan: Plan


class Batch(NamedTuple):
    """A step: the rank's share of its rows, and what is true of all rows of the step on every rank."""

    rows: tuple[Local, ...]
    targets: int  # labelled tokens of the step
    tokens: int
    documents: int
    pairs: int  # visible (query, key) pairs
    cursor: Cursor


def labels_of(row: Row, *, sft: bool) -> np.ndarray:
    """Each token's successor in its document, int64 [T]; -100 at ends, and with sft before prompt tokens.

    >>> row = Row(np.uint8([5, 6, 7, 8]), np.bool_([1, 1, 0, 0]), Documents.of([3, 1]), Cursor())
    >>> labels_of(row, sft=True).tolist()
    [-100, 7, -100, -100]
    """
    target = row.ids.astype(np.int64)
    if sft:
        target[row.prompt] = IGNORE
    labels = np.append(target[1:], IGNORE)
    labels[row.docs.cu_seqlens[1:] - 1] = IGNORE
    return labels


def batches(
    corpus: Corpus, tokens: int, rows: int, make: Callable[[Documents], Plan], *, rank: int = 0,
    part: int = 0, parts: int = 1, sft: bool = False, seed: int = 0, cursor: Cursor | None = None,
) -> Iterator[Batch]:  # fmt: skip
    """Steps of `rows` rows each, without end; the rows do not depend on how they are spread.

    Args:
        make: a row's documents -> its plan. rank: this one among those of a row.
        part, parts: this data-parallel part takes every parts-th row; parts divides rows.
    """
    stream = packed_rows(corpus, tokens, seed=seed, cursor=cursor)
    while True:
        step = [next(stream) for _ in range(rows)]
        labels = [labels_of(row, sft=sft) for row in step]
        mine = []
        for row, target in list(zip(step, labels, strict=True))[part::parts]:
            plan = make(row.docs)
            own = plan.tokens(rank)
            mine.append(
                Local(row.ids[own].astype(np.int64), target[own], plan.positions(rank), plan)
            )
        yield Batch(
            tuple(mine), sum(int((x != IGNORE).sum()) for x in labels), tokens * rows,
            sum(len(row.docs.lengths) for row in step), sum(row.docs.num_pairs for row in step),
            step[-1].cursor,
        )  # fmt: skip
