"""`bench packed`: layouts x schedules x distributions of document lengths, planned and run.

Planning: work and tokens max/mean over ranks; KV tokens moved (and, apart from them, queries and partial
outputs) in percent of what ring moves; steps; CPU milliseconds to lay out a sequence, to make its hops and
to lower one rank's programs.
Running: forward and backward of one SFT sequence on real ranks, their kernels on shared cores and on
emulated devices; and what gathering rows of KV costs beside the kernels. Every plan is proved, and every
method that is timed is first compared with the reference.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ...kernels.reference import oracle
from ...kernels.resolve import resolve
from ...lowering.lower import lower
from ...planner import plan
from ...planning.check import check
from ...planning.plan import Plan
from ...runtime.launch import launch
from ...schedules import KV
from ...sequence.documents import Documents
from ...sequence.layouts import Layout
from ..emulation.device import CORE_TFLOPS, Device
from .accuracy import Inputs, Reference, as_dict, run_rank, verify
from .document_lengths import row_lengths

DISTRIBUTIONS = ("pretraining", "sft", "code", "giant")
SEEDS = tuple(range(1000, 1005))
PLANNED = (("balanced", "sap"), ("zigzag", "sap"), ("contiguous", "sap"))
MOST_MOVING = 16  # ranks of a contiguous layout, which moves queries: more take seconds to plan
RUN = (("balanced", "sap"), ("zigzag", "ring"), ("zigzag", "tasp"), ("per_document", "all_gather"))


def packed(
    say: Callable[[str], None], *, tokens: int = 1 << 20, ranks: tuple[int, ...] = (8, 16, 64)
) -> dict[str, Any]:
    """Run the benchmark; `say` shows each line as it is known."""
    run, devices = timed(16384, 4), timed(16384, 4, tflops=CORE_TFLOPS)
    say(f"{_run_lines(run)}\n{_run_lines(devices)}")
    rows = []
    say(
        f"{'distribution':<12} {'P':>3}  {'layout x schedule':<18} {'work':>6} {'tokens':>6} "
        f"{'KV %':>8} {'q %':>5} {'steps':>5} {'place':>6} {'compile ms':>10}"
    )
    for name in DISTRIBUTIONS:
        for n in ranks:
            for layout, schedule in PLANNED:
                if layout == "contiguous" and n > MOST_MOVING:
                    continue
                r = planned(name, tokens, n, layout, schedule)
                rows.append(r)
                say(
                    f"{name:<12} {n:>3}  {layout + ' ' + schedule:<18} {r['work_max_mean']:>6.3f} "
                    f"{r['tokens_max_mean']:>6.3f} {r['moved_percent']:>8.3f} "
                    f"{r['queries_percent']:>5.2f} {r['steps']:>5.1f} "
                    f"{r['place_ms']:>6.1f} {r['compile_ms']:>10.1f}"
                )
    config = {"tokens": tokens, "seeds": list(SEEDS)}
    gathered = gathering()
    say(
        f"gathering rows of KV takes {gathered['share']:.1%} of the kernels' time, 4,096 tokens per rank"
    )
    return {
        "right": run["right"] and devices["right"],
        "config": config,
        "planned": rows,
        "run": run,
        "devices": devices,
        "gathering": gathered,
    }


def _run_lines(run: dict[str, Any]) -> str:
    if not run["right"]:
        return "WRONG: a method is not within its error limit"
    over = ", ".join(f"{name} {x:.2f} x" for name, x in run["speed_up_over"].items())
    c = run["config"]
    if c["tflops"]:
        return f"with a device of {c['tflops'] * 1e3:.0f} GFLOP/s per rank: {over}"
    return (
        f"SFT sequence of {c['tokens']} tokens, {c['documents']} documents, {c['ranks']} ranks, forward "
        f"and backward: of the time of balanced sap, {over};\n"
        f"its CPU time in all is {run['cpu_over_plain']:.2f} x the plain kernel's, document by document"
    )


def planned(name: str, tokens: int, ranks: int, layout: str, schedule: str) -> dict[str, Any]:
    """One distribution, number of ranks, layout and schedule: means, and worst values, over SEEDS."""
    rows = []
    for seed in SEEDS:
        docs = Documents.of(row_lengths(name, tokens, seed))

        def make(docs: Documents) -> Plan:
            return plan(docs, ranks, schedule=schedule, layout=layout)

        def lower_one(p: Plan) -> None:
            for backward in (False, True):
                lower(p, ranks // 2, backward=backward)

        p = make(docs)
        report = check(p)
        counts = p.layout.counts
        fresh = Documents.of([1, *docs.lengths[1:], docs.lengths[0] - 1])  # in no cache yet
        place_ms = _cpu_ms(lambda: Layout(layout, fresh, ranks).shard(0), 1)  # noqa: B023
        hops, tokens_moved = p.hops(), p.tokens_moved(p.hops())
        kv_percent, other_percent = (
            100.0 * float(tokens_moved[of_kind].sum()) / ((ranks - 1) * tokens)
            for of_kind in (hops.kind == KV, hops.kind != KV)
        )
        rows.append(
            {
                "work_max_mean": report.balance,
                "tokens_max_mean": float(counts.max() / counts.mean()),
                "moved_percent": kv_percent,
                "queries_percent": other_percent,
                "steps": p.schedule.num_steps(),
                "place_ms": place_ms,
                "hops_ms": _cpu_ms(lambda: make(fresh).hops(backward=True), 1),  # noqa: B023
                "again_ms": _cpu_ms(lambda: make(docs)),  # noqa: B023
                "compile_ms": _cpu_ms(partial(lower_one, p)),
                "peak_travelling_kv": report.peak_shards,
            }
        )
    means = {key: float(np.mean([r[key] for r in rows])) for key in rows[0]}
    worst = {f"worst_{k}": max(r[k] for r in rows) for k in ("work_max_mean", "tokens_max_mean")}
    return {
        "distribution": name,
        "ranks": ranks,
        "layout": layout,
        "schedule": schedule,
        **means,
        **worst,
    }


def _cpu_ms(make: Callable[[], Any], repeats: int = 3) -> float:
    """Median CPU milliseconds of a call."""
    samples = []
    for _ in range(repeats):
        start = time.process_time()
        make()
        samples.append((time.process_time() - start) * 1e3)
    return float(np.median(samples))


def timed(tokens: int, ranks: int, repeats: int = 5, tflops: float = 0.0) -> dict[str, Any]:
    """Forward and backward of one SFT sequence on real ranks, methods in turn; errors first.

    Args:
        tflops: of each rank's emulated device; 0: kernels share this machine's cores.
    """
    docs = Documents.of(row_lengths("sft", tokens, SEEDS[0]))
    inputs = Inputs.random(tokens, 8, 2, 64)
    reference = Reference(inputs, docs)
    plans = [plan(docs, ranks, schedule=s, layout=lay) for lay, s in RUN]
    errors = [verify(p, inputs, reference=reference)[0] for p in plans]
    config = {
        "tokens": tokens,
        "ranks": ranks,
        "heads": 8,
        "kv_heads": 2,
        "head_dim": 64,
        "documents": len(docs.lengths),
        "tflops": tflops,
    }
    if not all(e.ok for e in errors):
        return {"right": False, "config": config, "errors": [as_dict(e) for e in errors]}
    by_rank = launch(_timed, ranks, plans, inputs, repeats, tflops, timeout_s=600.0)
    rows: list[dict[str, Any]] = []
    for i, (layout, schedule) in enumerate(RUN):
        wall = [max(r[i][n][0] for r in by_rank) for n in range(repeats)]
        cpu = [sum(r[i][n][1] for r in by_rank) for n in range(repeats)]
        rows.append(
            {
                "layout": layout,
                "schedule": schedule,
                "errors": as_dict(errors[i]),
                "wall_s": wall,
                "cpu_s": cpu,
            }
        )
    plain_s = [s[1] for s in by_rank[0][-1]]
    first = float(np.median(rows[0]["wall_s"]))
    return {
        "right": True,
        "config": config,
        "methods": rows,
        "plain_cpu_s": plain_s,
        "speed_up_over": {
            f"{r['layout']} {r['schedule']}": float(np.median(r["wall_s"])) / first
            for r in rows[1:]
        },
        "cpu_over_plain": float(np.median(rows[0]["cpu_s"]) / np.median(plain_s)),
    }


def _timed(
    rank: int, group: Any, plans: list[Plan], inputs: Inputs, repeats: int, tflops: float
) -> list[list[tuple[float, float]]]:
    """(wall, CPU) seconds, forward and backward, of each plan in turn; last of the plain kernel."""
    used = Device(tflops) if tflops else "auto"
    samples: list[list[tuple[float, float]]] = [[] for _ in range(len(plans) + 1)]
    q, k, v, dout = inputs.tensors()
    kernel = resolve("auto", q.device.type, q.dtype)
    for _ in range(repeats + 1):
        for i, p in enumerate(plans):
            start = time.process_time()
            _, wall = run_rank(rank, group, p, inputs, used)
            samples[i].append((wall, time.process_time() - start))
        dist.barrier(group=group)
        start, wall = time.process_time(), time.perf_counter()
        if rank == 0:
            oracle(q, k, v, plans[0].docs, dout=dout, kernel=kernel)
        samples[-1].append((time.perf_counter() - wall, time.process_time() - start))
    return [s[1:] for s in samples]


def gathering(tokens: int = 32768, ranks: int = 8) -> dict[str, Any]:
    """CPU seconds of each rank's gathers of KV rows and of its kernel calls, forward; their ratio."""
    docs = Documents.of(row_lengths("pretraining", tokens, SEEDS[0]))
    p = plan(docs, ranks, schedule="sap", layout="balanced")
    gathers, kernels = [], []
    for rank in range(ranks):
        program = lower(p, rank)
        q = torch.randn(program.tokens, 8, 64)
        kv = torch.randn(program.tokens + program.kv_buffer_rows, 2, 128)
        kernel, spent = resolve("auto", "cpu", q.dtype), [0.0, 0.0]
        for compute in (s.compute for s in program.steps if s.compute):
            rows = kv[compute.low : compute.low + compute.count]
            start = time.process_time()
            if compute.gather is not None:
                rows = rows.index_select(0, torch.from_numpy(compute.gather))
            spent[0] += time.process_time() - start
            start = time.process_time()
            for call in compute.calls:
                kernel.forward(q, rows[..., :64], rows[..., 64:], call, 0.125)
            spent[1] += time.process_time() - start
        gathers.append(spent[0])
        kernels.append(spent[1])
    share = float(np.median(gathers) / np.median(kernels))
    return {
        "tokens": tokens,
        "ranks": ranks,
        "gathers_s": gathers,
        "kernels_s": kernels,
        "share": share,
    }
