"""Work: what simulation takes a rank to compute in each step is what its lowered program computes."""

import numpy as np
import pytest

from tasp_core import Documents, lower, plan
from tasp_core.planning.work import work_of

ROWS = {
    "one": Documents.of([257]),
    "packed": Documents.of([90, 3, 3, 41, 0, 64, 7, 200, 12, 5]),
    "full": Documents.of([50, 75, 20], causal=False),
    "window": Documents.of([120, 31, 7], window=19),
}


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize(
    ("schedule", "layout", "machine"),
    [
        ("ring", "zigzag", "mesh4"),
        ("tasp", "zigzag", "mesh4"),
        ("wave", "contiguous", "mesh2x2"),
        ("helper", "contiguous", "mesh5"),
        ("token_ring", "contiguous", "mesh4"),
        ("mesh", "contiguous", "mesh2x2"),
        ("sap", "contiguous", "mesh4"),
        ("sap", "balanced", "mesh3"),
    ],
)
def test_pairs_and_calls_are_those_of_the_lowered_programs(row, schedule, layout, machine):
    options = {"rows": 2} if schedule == "mesh" else None
    made = plan(
        ROWS[row],
        int(machine[4:].replace("2x2", "4")),
        schedule=schedule,
        layout=layout,
        machine=machine,
        schedule_options=options,
    )
    ranks, steps = range(made.ranks), made.schedule.num_steps() + 1
    found = work_of(made, made.hops(), ranks, steps)
    pairs, calls = np.zeros((2, made.ranks, steps), dtype=np.int64)
    for rank in ranks:
        for t, step in enumerate(lower(made, rank).steps):
            for call in step.compute.calls if step.compute else ():
                pairs[rank, t] += call.pairs
                calls[rank, t] += 1
    assert found.pairs.tolist() == pairs.tolist()
    assert ((found.pairs > 0) == (found.rows > 0)).all()
    assert ((found.calls > 0) == (calls > 0)).all()
    # queries cut into shares meet some own keys whole, which lowering joins to its one causal call
    assert abs(found.calls - calls).max() <= 1
    if schedule in ("helper", "mesh", "token_ring") and row == "one":
        assert len(made.schedule.offloaded.step)
