"""`bench steps`: what a pass of SAP takes by simulation, against its buffers and its number of steps.

A pass goes step by step, and ranks wait for each other where a step is not even. So for each packed
sequence the table has the simulated time over what no plan can beat: the larger of computing alone, of the
busiest rank, and communication alone. Every plan is proved before it is simulated.

    buffers    travelling KV of 1, 2, 4 and 8 times a rank's own KV; 2 is the default
    steps      as few communication steps as the buffers allow, and 1, 2, 4, 8 more than those

Nothing is measured here; the times are those of machine presets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...costs.simulate import simulate
from ...machines.presets import machine
from ...planner import plan
from ...planning.check import check
from ...planning.plan import Plan
from ...planning.work import work_of
from ...sequence.documents import Documents
from .document_lengths import NAMES, row_lengths

MACHINES = ("mi300x", "h100x2")
TOKENS, LONG, MANY_RANKS = 1 << 18, 1 << 20, "h100x8"
SHARDS = (1, 2, 4, 8)
MORE_STEPS = (0, 1, 2, 4, 8)
SEED = 0
SIZES: dict[str, Any] = {"heads": 32, "kv_heads": 8, "head_dim": 128}


def steps(say: Callable[[str], None]) -> dict[str, Any]:
    """Run the benchmark; `say` shows each line as it is known.

    Returns:
        Rows by what is varied: buffers of the balanced layout, those of the contiguous one, long packed
        sequences, the number of steps.
    """
    say(f"{'':<56} {'forward ms':>11} {'/bound':>7} {'backward ms':>11} {'/bound':>7} {'steps':>5}")
    tables: dict[str, list[dict[str, Any]]] = {}
    for layout in ("balanced", "contiguous"):
        tables[f"buffers, {layout}"] = [
            _said(say, _row(name, on, TOKENS, layout, f"{n} shards", _buffers(on, n)))
            for on in MACHINES
            for name in NAMES
            for n in SHARDS
        ]
    tables["long"] = [
        _said(say, _row(name, on, LONG, "balanced", "2 shards", {}))
        for on in (*MACHINES, MANY_RANKS)
        for name in NAMES
    ]
    tables["steps"] = [
        _said(say, _row(name, on, TOKENS, "balanced", f"{n} steps", {"steps": n}))
        for on in MACHINES
        for name in ("code", "giant")
        for n in _numbers_of_steps(name, on)
    ]
    config = {"seed": SEED, **SIZES, "dtype": "bfloat16"}
    return {"right": True, "config": config, "tables": tables}


def _buffers(on: str, shards: int) -> dict[str, int]:
    """Options for travelling KV of `shards` times a rank's own: a step's arrivals and the next one's."""
    return {"buffer_tokens": shards * TOKENS // machine(on).ranks // 2}


def _numbers_of_steps(name: str, on: str) -> list[int]:
    fewest = _plan(name, on, TOKENS, "balanced", {"steps": 0}).schedule.num_steps()
    return [fewest + more for more in MORE_STEPS]


def _said(say: Callable[[str], None], row: dict[str, Any]) -> dict[str, Any]:
    label = "{distribution} {tokens}, {machine}, {layout}, {varied}".format(**row)
    cells = [
        f"{row[d]['total_s'] * 1e3:>11.3f} {row[d]['over_bound']:>7.3f}"
        for d in ("forward", "backward")
    ]
    say(f"{label:<56} {' '.join(cells)} {row['steps']:>5}")
    return row


def _plan(name: str, on: str, tokens: int, layout: str, options: dict[str, int]) -> Plan:
    docs = Documents.of(row_lengths(name, tokens, SEED))
    ranks = machine(on).ranks
    return plan(
        docs, ranks, schedule="sap", layout=layout, machine=on, schedule_options=options or None
    )


def _row(
    name: str, on: str, tokens: int, layout: str, varied: str, options: dict[str, int]
) -> dict[str, Any]:
    """One plan's figures; the plan is proved first.

    Raises:
        PlanError: the plan is wrong.
    """
    made = _plan(name, on, tokens, layout, options)
    passes = {d: _pass(made, on, backward=d == "backward") for d in ("forward", "backward")}
    return {
        "distribution": name,
        "machine": on,
        "tokens": tokens,
        "layout": layout,
        "varied": varied,
        "options": made.schedule.options,
        "steps": made.schedule.num_steps(),
        "peak_travelling_kv": check(made).peak_shards,
        "total_s": sum(times["total_s"] for times in passes.values()),
        **passes,
    }


def _pass(made: Plan, on: str, *, backward: bool) -> dict[str, Any]:
    times = simulate(made, on, backward=backward, **SIZES)
    calls = work_of(made, made.hops(backward=backward), backward=backward).calls
    return {
        "total_s": times.total_s,
        "communication_s": times.comm_s,
        "computation_s": times.compute_s,
        "over_bound": times.total_s / max(times.comm_s, times.compute_s),
        "kernel_calls": int(np.max(calls.sum(axis=1))),
    }
