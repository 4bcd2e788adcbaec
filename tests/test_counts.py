"""The counters of schedules/counts.py against counting item by item."""

from collections import Counter

import numpy as np
import pytest

from tasp_core import plan
from tasp_core.schedules.counts import last_uses, live_table, load_rows, load_table, most_load


def items(seed, most=40):
    """Random (step, src, dst) and amounts, some links several times."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(0, most))
    columns = rng.integers(0, [[5], [3], [4]], (3, count))
    return tuple(columns), rng.integers(1, 100, count)


@pytest.mark.parametrize("seed", range(20))
def test_loads_are_sums_item_by_item(seed):
    columns, amount = items(seed)
    expected, number = Counter(), Counter()
    for *key, x in zip(*(c.tolist() for c in (*columns, amount)), strict=True):
        expected[tuple(key)] += x
        number[tuple(key)] += 1
    table = load_table((5, 3, 4), *columns, amount=amount)
    assert {tuple(at): table[tuple(at)] for at in np.argwhere(table).tolist()} == expected
    assert table.dtype == load_table((5, 3, 4), *columns).dtype == np.int64
    assert load_table((5, 3, 4), *columns, amount=amount / 2).sum() == amount.sum() / 2
    rows, sums = load_rows(columns, amount, np.ones_like(amount))
    keys = list(zip(*(c.tolist() for c in rows), strict=True))
    assert keys == sorted(expected)
    assert sums[0].tolist() == [expected[key] for key in keys]
    assert sums[1].tolist() == [number[key] for key in keys]
    assert most_load(columns[0], columns[1] * 4 + columns[2]) == max(number.values(), default=0)


@pytest.mark.parametrize("seed", range(20))
def test_what_ranks_hold_is_the_sum_over_items_alive(seed):
    (first, rank, length), amount = items(seed)
    last = first + length
    live = live_table(3, rank, first, last, amount)
    assert live.shape == (3, int(last.max(initial=-1)) + 1)
    for r, t in np.ndindex(*live.shape):
        alive = (rank == r) & (first <= t) & (t <= last)
        assert live[r, t] == amount[alive].sum()


def test_the_last_use_is_the_latest_and_never_before_the_least():
    least = np.array([[1, 5], [2, 2]])
    uses = (np.array([0, 0, 1]), np.array([0, 1, 1]), np.array([3, 4, 6]))
    assert last_uses(least, uses, (*uses[:2], np.array([2, 9, 0]))).tolist() == [[3, 9], [2, 6]]
    assert least.tolist() == [[1, 5], [2, 2]]  # the argument is left as it was


def test_amounts_outside_the_table_are_refused():
    with pytest.raises(ValueError, match="invalid entry"):
        load_table((2, 2), np.array([2]), np.array([0]))


def test_rows_of_a_hop_table_are_its_links_per_step():
    hops = plan([64], 5, schedule="tasp").hops()
    (step, src, dst), [count] = load_rows((hops.step, hops.src, hops.dst), np.ones_like(hops.step))
    assert count.sum() == len(hops.step) == 4 * 5 * 4
    assert len({*zip(step.tolist(), src.tolist(), dst.tolist(), strict=True)}) == len(step)
