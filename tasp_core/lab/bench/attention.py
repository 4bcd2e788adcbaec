"""`bench attention`: time against length on real ranks, under torchrun or on forked local ones.

For every length the methods run in turn, after they were compared with the reference. Guards fail the run:
an error above its limit, an output that does not change when remote values do, a rate above the machine's
peak. Beside every figure stand CCR (computation over the first method's communication, each measured alone)
and, where the machine is known, the cut bound and the simulator's prediction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ...machines.machine import Machine
from ...planner import plan
from ...planning.plan import Plan
from ...runtime.launch import on_ranks
from ...sequence.documents import Documents
from .accuracy import Errors, Inputs, Reference, as_dict
from .figures import Result, ccr, predictions, total
from .passes import DIRECTIONS, Pass, Samples, in_turn, method_errors, slowest

COMPARED = 8192  # tokens up to which the output is compared as a whole
QUERIES = 32  # of each rank that are compared in a longer sequence


HEADER = (
    f"{'tokens':>8} {'method':<20} {'comm s':>9} {'compute s':>9} {'whole s':>9} {'predicted':>9} "
    f"{'CCR':>6} {'x':>6} {'TFLOP/s per rank':>16}"
)


def attention_bench(
    say: Callable[[str], None], config: Config, on: Machine | None = None
) -> Result | None:
    """Run the benchmark; its result, or None on a launcher's ranks other than the first.

    Args:
        say: shows each line as it is known. on: the machine, for bounds, predictions and the peak.
    """
    say(HEADER)
    rows = on_ranks(_all_lengths, config.ranks, config, on, say)
    if rows is None:
        return None
    return {
        "right": not any(row["wrong"] for row in rows),
        "config": asdict(config),
        "machine": asdict(on) if on else None,
        "rows": rows,
    }


@dataclass(frozen=True)
class Config:
    """What is measured; a method is "SCHEDULE" or "SCHEDULE:LAYOUT", as in "tasp:striped"."""

    lengths: tuple[int, ...]
    methods: tuple[str, ...]
    ranks: int
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    dtype: str = "float32"
    causal: bool = True
    backward: bool = True
    repeats: int = 5
    peak_tflops: float = 0.0

    def plans(self, tokens: int, on: Machine | None) -> list[Plan]:
        """Each method's plan of one document of `tokens` tokens."""
        docs, plans = Documents.of([tokens], causal=self.causal), []
        for method in self.methods:
            schedule, _, layout = method.partition(":")
            layout = layout or ("zigzag" if self.causal else "contiguous")
            plans.append(plan(docs, self.ranks, schedule=schedule, layout=layout, machine=on))
        return plans

    def inputs(self, tokens: int, device: torch.device) -> Inputs:
        """The document's tensors, the same on every rank."""
        dtype = getattr(torch, self.dtype)
        sizes = (tokens, self.heads, self.kv_heads, self.head_dim)
        return Inputs.random(*sizes, dtype=dtype).to(device)

    def tflops(self, tokens: int, seconds: float, direction: str) -> float:
        """TFLOP/s per rank when all ranks do one direction of a pass in `seconds`."""
        pairs = Documents.of([tokens], causal=self.causal).num_pairs
        flops = (4 if direction == "forward" else 10) * pairs * self.heads * self.head_dim
        return flops / seconds / self.ranks / 1e12


def _all_lengths(
    rank: int,
    group: Any,
    device: torch.device,
    config: Config,
    on: Machine | None,
    say: Callable[[str], None],
) -> list[Result]:
    rows: list[Result] = []
    for tokens in config.lengths:
        measured = _one_length(rank, group, device, config, on, tokens)
        plans = config.plans(tokens, on)
        new = [_row(config, on, tokens, p, *x) for p, x in zip(plans, measured, strict=True)]
        for row in new:
            row["ccr"] = ccr(row, new[0])
            if rank == 0:
                say(_line(row, new[0]))
        rows += new
        if any(row["wrong"] for row in new):
            break
    return rows


def _one_length(
    rank: int, group: Any, device: torch.device, config: Config, on: Machine | None, tokens: int
) -> list[tuple[Errors, str, Samples]]:
    """By method: errors, what the guards say (the same on all ranks), samples of the slowest rank."""

    def passes(count: int) -> list[Pass]:
        inputs = config.inputs(count, device)
        barrier = dist.barrier
        return [
            Pass(p, rank, group, inputs, lambda: barrier(group=group))
            for p in config.plans(count, on)
        ]

    full, short = passes(tokens), min(tokens, COMPARED)
    compared = full if short == tokens else passes(short)
    reference = Reference(compared[0].inputs, compared[0].plan.docs, backward=config.backward)
    errors = method_errors(compared, reference)
    verdicts = []
    for one, error in zip(full, errors, strict=True):
        wrong = "" if error.ok else "an error is above its limit"
        if not wrong and short < tokens and sampled_gap(one) > 2 * error.limit["out"]:
            wrong = "sampled rows of the output are wrong"
        verdicts.append(wrong or remote_unused(one))
    by_rank = _gathered(verdicts, group)
    verdicts = [next(filter(None, of_ranks), "") for of_ranks in zip(*by_rank, strict=True)]
    samples: list[Samples] = [{} for _ in full]
    if not any(verdicts):
        own = in_turn(full, backward=config.backward, repeats=config.repeats)
        samples = [slowest(of_ranks) for of_ranks in zip(*_gathered(own, group), strict=True)]
    return list(zip(errors, verdicts, samples, strict=True))


def sampled_gap(one: Pass) -> float:
    """Largest error of a few of this rank's queries, against attention in float64 over all visible KV."""
    tokens, out = one.plan.tokens(one.rank), one.attend("whole", False)[1]
    rows = np.linspace(0, len(tokens) - 1, min(QUERIES, len(tokens))).astype(int)
    at = torch.as_tensor(tokens[rows], device=out.device)
    q, k, v = one.inputs.tensors()[:3]
    grouped = q[at].double().unflatten(1, (k.shape[1], -1))
    scores = torch.einsum("qkgd,skd->kgqs", grouped, k.double()) * q.shape[-1] ** -0.5
    if one.plan.docs.causal:
        hidden = torch.arange(len(k), device=at.device)[None, :] > at[:, None]
        scores.masked_fill_(hidden, -torch.inf)
    exact = torch.einsum("kgqs,ske->qkge", scores.softmax(-1), v.double()).flatten(1, 2)
    return float((out[torch.as_tensor(rows, device=at.device)].double() - exact).abs().max())


def remote_unused(one: Pass) -> str:
    """What is wrong if the last token's output does not depend on other ranks' values, or ""."""
    owner = int(one.plan.locate(np.array([one.plan.docs.total - 1]))[0][0])
    before, values = one.attend("whole", False)[1], one.tensors[2]
    if one.rank != owner:
        one.tensors[2] = values + 1.0
    after = one.attend("whole", False)[1]
    one.tensors[2] = values
    if one.plan.ranks > 1 and one.rank == owner and torch.equal(before, after):
        return f"rank {one.rank}: its output is the same whatever values the other ranks hold"
    return ""


def _gathered(value: Any, group: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _row(
    config: Config,
    on: Machine | None,
    tokens: int,
    p: Plan,
    errors: Errors,
    wrong: str,
    samples: Samples,
) -> Result:
    """One method's figures at one length, without CCR."""
    row: Result = {
        "tokens": tokens,
        "label": f"{p.schedule.name} {p.layout.name}",
        "errors": as_dict(errors),
        "fingerprint": p.fingerprint(),
        "samples": samples,
        "predicted": {},
        "tflops": {},
    }
    sizes = {"heads": config.heads, "kv_heads": config.kv_heads, "head_dim": config.head_dim}
    for direction in DIRECTIONS[: 1 + config.backward] if samples else ():
        rate = config.tflops(tokens, min(samples[f"whole {direction}"]), direction)
        row["tflops"][direction] = rate
        wrong = wrong or too_fast(rate, config.peak_tflops or (on.tflops if on else 0.0))
        if on:
            row["predicted"] |= predictions(p, on, direction, **sizes, dtype=config.dtype)
    return row | {"wrong": wrong}


def too_fast(tflops: float, peak_tflops: float) -> str:
    """What is wrong with a rank's rate, or ""; without a known peak nothing is."""
    if peak_tflops and tflops > peak_tflops:
        return f"{tflops:.4g} TFLOP/s per rank, above the peak of {peak_tflops:.4g}"
    return ""


def _line(row: Result, baseline: Result) -> str:
    head = f"{row['tokens']:>8} {row['label']:<20}"
    if row["wrong"]:
        return f"{head} WRONG: {row['wrong']}"
    cells = [f"{total(row, m):>9.4f}" for m in ("communication", "computation", "whole")]
    predicted_s = sum(v for k, v in row["predicted"].items() if k.startswith("whole"))
    rates = "/".join(f"{x:.3g}" for x in row["tflops"].values())
    return (
        f"{head} {' '.join(cells)} {f'{predicted_s:.4f}' if predicted_s else '-':>9} "
        f"{row['ccr']:>6.2f} {total(baseline, 'whole') / total(row, 'whole'):>6.2f} {rates:>16}"
    )
