"""`bench attention`: time against length on real ranks, under torchrun or on forked local ones.

For every length the methods run in turn, oracle first. Guards fail the run: an error above its
limit, an output that does not change when remote values do, a rate above the machine's peak. Beside
every figure stand CCR (computation alone over the first method's communication alone) and, where the
machine is known, the cut bound and the simulator's prediction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ...costs.simulate import simulate
from ...machines.machine import Machine
from ...planner import plan
from ...planning.plan import Plan
from ...runtime.launch import on_ranks
from ...sequence.documents import Documents
from .accuracy import Errors, Inputs, Reference, as_dict
from .emulated_cases import total
from .passes import DIRECTIONS, Pass, Samples, in_turn, method_errors, slowest

JUDGED = 8192  # rows up to this length are compared whole; of longer ones a few queries
QUERIES = 32


@dataclass(frozen=True)
class Config:
    """What is measured; `methods` are "schedule" or "schedule:layout" words."""

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
        """The plans of one length."""
        docs, found = Documents.of([tokens], causal=self.causal), []
        for word in self.methods:
            schedule, _, layout = word.partition(":")
            layout = layout or ("zigzag" if self.causal else "contiguous")
            found.append(plan(docs, self.ranks, schedule=schedule, layout=layout, machine=on))
        return found

    def inputs(self, tokens: int, device: torch.device) -> Inputs:
        """The row's tensors; every rank makes the same."""
        kind = getattr(torch, self.dtype)
        sizes = (tokens, self.heads, self.kv_heads, self.head_dim)
        return Inputs.random(*sizes, dtype=kind).to(device)

    def tflops(self, tokens: int, seconds: float, direction: str) -> float:
        """A rank's rate when all ranks do a pass in so many seconds."""
        pairs = Documents.of([tokens], causal=self.causal).num_pairs
        flops = (4 if direction == "forward" else 10) * pairs * self.heads * self.head_dim
        return flops / seconds / self.ranks / 1e12


def sampled_gap(one: Pass) -> float:
    """Largest error of a few of this rank's output rows, against float64 over all keys they see."""
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
    """What is wrong if the rank of the last token, which sees all, does not notice others' values."""
    owner = int(one.plan.locate(np.array([one.plan.docs.total - 1]))[0][0])
    before, honest = one.attend("whole", False)[1], one.tensors[2]
    if one.rank != owner:
        one.tensors[2] = honest + 1.0
    after = one.attend("whole", False)[1]
    one.tensors[2] = honest
    if one.plan.ranks > 1 and one.rank == owner and torch.equal(before, after):
        return f"rank {one.rank}: its output is the same whatever values the other ranks hold"
    return ""


def too_fast(tflops: float, peak_tflops: float) -> str:
    """What is wrong with a rank's rate, or ""; without a known peak nothing is."""
    if peak_tflops and tflops > peak_tflops:
        return f"{tflops:.4g} TFLOP/s a rank, above the peak of {peak_tflops:.4g}"
    return ""


def _one_length(
    rank: int, group: Any, device: torch.device, config: Config, on: Machine | None, tokens: int
) -> list[tuple[Errors, str, Samples]]:
    """By method: errors, what the guards say (the same on all ranks), samples of the slowest rank."""

    def passes(count: int) -> list[Pass]:
        inputs = config.inputs(count, device)
        meet = dist.barrier
        return [
            Pass(p, rank, group, inputs, lambda: meet(group=group)) for p in config.plans(count, on)
        ]

    full, short = passes(tokens), min(tokens, JUDGED)
    few = full if short == tokens else passes(short)
    judge = Reference(few[0].inputs, few[0].plan.docs, backward=config.backward)
    errors = method_errors(few, judge)
    said = []
    for one, error in zip(full, errors, strict=True):
        wrong = "" if error.ok else "an error is above its limit"
        if not wrong and short < tokens and sampled_gap(one) > 2 * error.limit["out"]:
            wrong = "sampled rows of the output are wrong"
        said.append(wrong or remote_unused(one))
    samples: list[Samples] = [{} for _ in full]
    everyone = _gathered(said, group)
    said = [next(filter(None, words), "") for words in zip(*everyone, strict=True)]
    if not any(said):
        mine = in_turn(full, backward=config.backward, repeats=config.repeats)
        samples = [slowest(by_rank) for by_rank in zip(*_gathered(mine, group), strict=True)]
    return list(zip(errors, said, samples, strict=True))


def _gathered(mine: Any, group: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def _row(config: Config, on: Machine | None, tokens: int, p: Plan, found: Any) -> dict[str, Any]:
    """One method's figures at one length, but for CCR."""
    errors, wrong, samples = found
    row = {
        "tokens": tokens,
        "label": f"{p.schedule.name} {p.layout.name}",
        "errors": as_dict(errors),
        "fingerprint": p.fingerprint(),
        "samples": samples,
        "predicted": {},
        "tflops": {},
    }
    for direction in DIRECTIONS[: 1 + config.backward] if samples else ():
        rate = config.tflops(tokens, min(samples[f"whole {direction}"]), direction)
        row["tflops"][direction] = rate
        wrong = wrong or too_fast(rate, config.peak_tflops or (on.tflops if on else 0.0))
        if on:
            t = simulate(
                p,
                on,
                heads=config.heads,
                kv_heads=config.kv_heads,
                head_dim=config.head_dim,
                dtype=config.dtype,
                backward=direction == "backward",
            )
            row["predicted"] |= {
                f"communication {direction}": t.comm_s,
                f"bound {direction}": t.bound_s,
                f"computation {direction}": t.compute_s,
                f"whole {direction}": t.total_s,
            }
    return row | {"wrong": wrong}


def _all(
    rank: int,
    group: Any,
    device: torch.device,
    config: Config,
    on: Machine | None,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for tokens in config.lengths:
        found = _one_length(rank, group, device, config, on, tokens)
        plans = config.plans(tokens, on)
        new = [_row(config, on, tokens, p, f) for p, f in zip(plans, found, strict=True)]
        for row in new:
            row["ccr"] = total(row, "computation") / total(new[0], "communication")
            if rank == 0:
                say(_line(row, new[0]))
        rows += new
        if any(row["wrong"] for row in new):
            break
    return rows


def _line(row: dict[str, Any], base: dict[str, Any]) -> str:
    head = f"{row['tokens']:>8} {row['label']:<20}"
    if row["wrong"]:
        return f"{head} WRONG: {row['wrong']}"
    cells = [f"{total(row, m):>9.4f}" for m in ("communication", "computation", "whole")]
    guess = sum(v for k, v in row["predicted"].items() if k.startswith("whole"))
    rates = "/".join(f"{x:.3g}" for x in row["tflops"].values())
    return (
        f"{head} {' '.join(cells)} {f'{guess:.4f}' if guess else '-':>9} {row['ccr']:>6.2f} "
        f"{total(base, 'whole') / total(row, 'whole'):>6.2f} {rates:>15}"
    )


HEADER = (
    f"{'tokens':>8} {'method':<20} {'comm s':>9} {'compute s':>9} {'whole s':>9} {'predicted':>9} "
    f"{'CCR':>6} {'x':>6} {'TFLOP/s a rank':>15}"
)


def attention_bench(
    say: Callable[[str], None], config: Config, on: Machine | None = None
) -> dict[str, Any] | None:
    """The whole benchmark; None on all ranks of a launcher but the first.

    Args:
        on: the machine, for bounds, predictions and the peak; None: unknown.
    """
    say(HEADER)
    rows = on_ranks(_all, config.ranks, config, on, say)
    if rows is None:
        return None
    return {
        "right": not any(row["wrong"] for row in rows),
        "config": asdict(config),
        "machine": asdict(on) if on else None,
        "rows": rows,
    }
