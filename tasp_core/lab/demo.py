"""The command `demo`: eight ranks, every schedule, forward and backward on real text, then training.

Documents are packed into one sequence, and a tiny Llama's first block turns it into q, k, v. Each method
runs on real ranks and is compared with the float64 reference before anything is printed about it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console

from ..planner import plan
from ..planning.check import Report, check
from ..planning.plan import Plan
from ..result_file import write
from ..runtime.launch import launch
from ..sequence.documents import Documents
from .bench.accuracy import Inputs, Reference, as_dict, sent_bytes, verify
from .training.data import manual_sequence
from .training.llama import Block
from .training.minimal import train

METHODS = (  # label, schedule, layout, ranks per node (0: all)
    ("Ring", "ring", "contiguous", 0),
    ("Zigzag-Ring", "ring", "zigzag", 0),
    ("Striped", "ring", "striped", 0),
    ("all_gather", "all_gather", "zigzag", 0),
    ("TASP", "tasp", "contiguous", 0),
    ("Zigzag-TASP", "tasp", "zigzag", 0),
    ("wave 1x8", "wave", "zigzag", 0),
    ("wave 2x4", "wave", "zigzag", 4),
    ("TASP per-doc", "tasp", "per_document", 0),
    ("SAP balanced", "sap", "balanced", 0),
)


def demo(
    out: Path, console: Console, *, tokens: int = 4096, ranks: int = 8, steps: int = 30
) -> bool:
    """Run the demo, print it and write its result file; whether everything was right."""
    start = time.perf_counter()

    def say(text: str) -> None:
        console.print(f"{time.perf_counter() - start:5.1f} s  {text}", highlight=False)

    inputs, docs = real_inputs(tokens)
    say(
        f"packed {tokens} bytes of Python's manual: {len(docs.lengths)} documents, {docs.num_pairs} pairs"
    )
    small, large = (plan(docs, n, schedule="tasp", layout="zigzag") for n in (3, ranks))
    console.print(f"\n{small}\n", highlight=False, soft_wrap=True)
    console.print(f"{large.summary()}\n{check(large)}\n", highlight=False, soft_wrap=True)
    rows = attend_all(inputs, docs, ranks, say)
    console.print(f"\n{error_table(rows)}", highlight=False, soft_wrap=True)
    console.print(
        "/plain: worst error over the plain kernel's own; MB: the most any rank sends;\n"
        "links busy: mean fraction of links in use per step; KV: keys and values of one rank\n"
    )
    losses = {}
    for count in (1, 4):
        say(f"training a tiny Llama for {steps} steps on {count} rank{'s' * (count > 1)}")
        options = {"steps": steps, "tokens": 1024}
        losses[count] = launch(_train, count, count, options, timeout_s=120.0)[0]
    gap = max(abs(a - b) for a, b in zip(losses[1], losses[4], strict=True))
    say(
        f"loss {losses[1][0]:.4f} -> {losses[1][-1]:.4f} on 1 rank, {losses[4][-1]:.4f} on 4; "
        f"largest difference in {steps} steps {gap:.1e}"
    )
    right = all(r.errors.ok for r in rows) and gap < 1e-3 and losses[4][-1] < losses[4][0]
    write(
        out,
        "demo",
        config={
            "tokens": tokens,
            "ranks": ranks,
            "steps": steps,
            "dtype": "float32",
            "heads": inputs.q.shape[1],
            "kv_heads": inputs.k.shape[1],
            "head_dim": inputs.q.shape[2],
        },
        attention=[_row(r) for r in rows],
        training={"losses": losses, "largest_difference": gap},
        seconds=time.perf_counter() - start,
    )
    say(f"{'all right' if right else 'WRONG'}; results in {out}")
    return right


class MethodResult(NamedTuple):
    """One method's results."""

    label: str
    plan: Plan
    report: Report
    errors: Any
    sent: dict[str, list[int]]
    seconds: float


def real_inputs(tokens: int) -> tuple[Inputs, Documents]:
    """q, k, v of packed real text, from a tiny Llama's first block, and the documents."""
    torch.manual_seed(0)
    ids, docs = manual_sequence(tokens)
    embed, block = torch.nn.Embedding(256, 128), Block(128, heads=8, kv_heads=4)
    with torch.no_grad():
        q, k, v = block.heads(embed(torch.from_numpy(ids)), torch.from_numpy(docs.positions()))
    return Inputs(q, k, v, torch.randn_like(q)), docs


def attend_all(
    inputs: Inputs, docs: Documents, ranks: int, say: Callable[[str], None]
) -> list[MethodResult]:
    """Every method on real ranks, each compared with the reference."""
    reference, rows = Reference(inputs, docs), []
    for i, (label, schedule, layout, node) in enumerate(METHODS):
        say(f"[{i + 1}/{len(METHODS)}] {label}: {schedule} x {layout} on {ranks} ranks")
        machine = f"mesh{node}x{ranks // node}" if node else None
        p = plan(docs, ranks, schedule=schedule, layout=layout, machine=machine)
        errors, seconds = verify(p, inputs, reference=reference)
        heads, head_dim = inputs.q.shape[1:]
        sent = sent_bytes(p, heads, inputs.k.shape[1], head_dim, inputs.q.dtype)
        rows.append(MethodResult(label, p, check(p), errors, sent, max(seconds)))
    return rows


def error_table(rows: list[MethodResult]) -> str:
    """The demo's table of methods, 80 columns wide."""
    lines = [
        "forward and backward on real ranks, against the float64 reference",
        f"{'method':<12} {'out':>7} {'grads':>7} {'/plain':>6}   {'MB sent':>5}  bwd  "
        f"{'links':>6} {'busiest link':>12}   work",
        f"{'':<12} {'error':>7} {'error':>7} {'':>6}   {'fwd':>5} {'':>5} {'busy':>7} {'':>12} max/mean",
    ]
    for row in rows:
        e, r = row.errors, row.report
        grads = max(e.ours[n] for n in ("dq", "dk", "dv"))
        forward, backward = (max(row.sent[k]) / 1e6 for k in ("forward", "backward"))
        lines.append(
            f"{row.label:<12} {e.ours['out']:>7.1e} {grads:>7.1e} {e.ratio:>5.2f}x   "
            f"{forward:>5.2f} {backward:>5.2f}  {r.busy:>6.1%} {_busiest(row):>12} {r.balance:>8.3f}"
        )
    return "\n".join(lines)


def _busiest(row: MethodResult) -> str:
    """The link inside a node that carries most in all, and how much; "all" where all carry as much."""
    hops, n = row.plan.hops(), row.plan.ranks
    moved, kv_of_rank = row.plan.amounts(hops)
    inside = hops.src // row.plan.machine.node_size == hops.dst // row.plan.machine.node_size
    total = np.bincount((hops.src * n + hops.dst)[inside], moved[inside], minlength=n * n)
    top = int(total.argmax())
    name = "all" if row.report.min_load == row.report.max_load else f"{top // n}>{top % n}"
    return f"{name} {total[top] / kv_of_rank:.3g} KV"


def _train(rank: int, group: Any, ranks: int, options: dict[str, Any]) -> list[float]:
    return train(rank, group, ranks, **options)


def _row(row: MethodResult) -> dict[str, Any]:
    import json

    r = row.report
    return {
        "label": row.label,
        "plan": json.loads(row.plan.to_json()),
        "errors": as_dict(row.errors),
        "bytes_sent": row.sent,
        "seconds": row.seconds,
        "links_busy": r.busy,
        "busiest": list(r.busiest),
        "max_load": r.max_load,
        "min_load": r.min_load,
        "work_max_mean": r.balance,
        "work_max_mean_worst_step": r.step_balance,
        "peak_travelling_kv": r.peak_shards,
    }
