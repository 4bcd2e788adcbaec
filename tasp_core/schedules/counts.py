"""What steps carry and what ranks hold: each is counted here, and nowhere else.

    load_table((steps, n, n), hops.step, hops.src, hops.dst)       shares per step and link
    load_rows((hops.step, hops.src, hops.dst), nbytes)             the same as rows, without the zeros
    live_table(ranks, rank, first, last)                           shares that each rank holds per step

The proof (planning/check.py), the limits that searched schedules declare, the predictions (costs/) and the
figures count with these functions. What an item weighs (a share, tokens, bytes) is the caller's choice.
"""

from __future__ import annotations

import math

import numpy as np


def load_table(
    shape: tuple[int, ...], *index: np.ndarray, amount: np.ndarray | None = None
) -> np.ndarray:
    """The sum of what is carried, for each step and resource (link, NIC, rank), as a table.

    Args:
        shape: of the table, for example (steps, ranks, ranks) for links and (steps, ranks) for NICs.
        index: int64 [items], one array per dimension: where in the table each item counts.
        amount: what each item weighs, [items]; default: 1 each.

    Returns:
        int64 where amounts are integers, else float64; of the given shape.

    >>> step, src, dst = np.array([[0, 0, 0, 1], [0, 0, 1, 0], [1, 1, 2, 2]])
    >>> load_table((2, 3), step, src).tolist()           # rank 0 sends two in step 0 and one in step 1
    [[2, 1, 0], [1, 0, 0]]
    """
    place = np.ravel_multi_index(index, shape)
    table = np.bincount(place, amount, minlength=math.prod(shape)).reshape(shape)
    exact = amount is None or np.issubdtype(amount.dtype, np.integer)
    return table.astype(np.int64, copy=False) if exact else table


def load_rows(
    index: tuple[np.ndarray, ...], *amounts: np.ndarray
) -> tuple[tuple[np.ndarray, ...], list[np.ndarray]]:
    """The sums of what is carried as rows: what `load_table` would hold where it is not empty.

    Args:
        index: int64 [items] each, for example (step, src, dst): items with equal numbers are added up.
        amounts: what each item weighs, [items] each.

    Returns:
        The index of each row, sorted, and the sums of each of the amounts.

    >>> step, src, dst = np.array([[0, 0, 0, 1], [0, 0, 1, 0], [1, 1, 2, 2]])
    >>> (steps, senders), [shares] = load_rows((step, src), np.ones(4, dtype=int))
    >>> steps.tolist(), senders.tolist(), shares.tolist()
    ([0, 0, 1], [0, 1, 0], [2, 1, 1])
    """
    if not len(index[0]):
        return index, list(amounts)
    key = np.ravel_multi_index(index, [int(column.max()) + 1 for column in index])
    if (np.diff(key) < 0).any():  # hop tables are sorted already
        order = np.argsort(key, kind="stable")
        key, index = key[order], tuple(column[order] for column in index)
        amounts = tuple(amount[order] for amount in amounts)
    first = np.flatnonzero(np.diff(key, prepend=-1))
    return tuple(column[first] for column in index), [np.add.reduceat(x, first) for x in amounts]


def most_load(step: np.ndarray, resource: np.ndarray) -> int:
    """The most items that one resource carries in one step; 0 where there are none.

    Args:
        step, resource: int64 [items] each; resources by any number, for example src * ranks + dst.

    >>> most_load(np.array([0, 0, 0, 1]), np.array([0, 0, 1, 0]))
    2
    """
    _, [count] = load_rows((step, resource), np.ones(len(step), dtype=np.int64))
    return int(count.max(initial=0))


def last_uses(least: np.ndarray, *uses: tuple[np.ndarray, ...]) -> np.ndarray:
    """The last step in which each item is used.

    Args:
        least: the step up to which each item stays anyway, int64 of any shape, for example
            [ranks, owners, shares]: the step after it arrives, in which it is computed.
        uses: (*index, step) of computations and sends that need the item of that index.

    >>> sends = np.array([0, 2]), np.array([4, 1])
    >>> last_uses(np.array([1, 1, 3]), sends).tolist()
    [4, 1, 3]
    """
    last = least.copy()
    for *item, step in uses:
        np.maximum.at(last, tuple(item), step)
    return last


def live_table(
    ranks: int,
    rank: np.ndarray,
    first: np.ndarray,
    last: np.ndarray,
    amount: np.ndarray | None = None,
) -> np.ndarray:
    """What each rank holds in each step, int64 [ranks, steps], of items that come and go.

    Args:
        rank: where each item lies, int64 [items].
        first, last: the steps from the first to the last, inclusive, in which it lies there.
        amount: what it weighs, int64 [items]; default: 1 each.

    >>> zero = np.zeros(3, dtype=int)
    >>> live_table(1, zero, np.array([0, 1, 2]), np.array([1, 2, 2])).tolist()
    [[1, 2, 2]]
    """
    shape = (ranks, int(last.max(initial=-1)) + 2)
    change = load_table(shape, rank, first, amount=amount)
    change -= load_table(shape, rank, last + 1, amount=amount)
    return change.cumsum(axis=1)[:, :-1]
