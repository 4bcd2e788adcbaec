"""What a plan costs each rank, counted from the instructions of its programs.

    print(tasp.explain(plan, heads=8, kv_heads=2, head_dim=64, dtype="bfloat16"))

It counts tokens, work, bytes, steps, kernel calls and buffers of what will run. Nothing is modelled: for
seconds see `simulate`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..errors import PlanError
from ..lowering.lower import lower
from ..lowering.program import Attend, Program
from ..planning.check import check
from ..planning.heads import split_heads
from ..planning.plan import Plan
from .bytes import BYTES, RowBytes, ulysses_bytes, wire_bytes


@dataclass(frozen=True)
class RankCost:
    """One rank's costs; bytes are for all heads it handles, forward then backward."""

    rank: int
    tokens: int
    work: int  # visible (query, key) pairs that it computes, of one head
    bytes_in: tuple[int, int]
    bytes_out: tuple[int, int]
    bytes_heads: tuple[int, int]  # sent by the all-to-alls inside its Ulysses group
    steps: tuple[int, int]
    calls: tuple[int, int]  # kernel calls
    gathered: int  # KV rows copied because they do not lie in document order, forward
    buffer_bytes: tuple[int, int]  # for received KV, remote queries and their results, gradients


@dataclass(frozen=True)
class Explanation:
    """Costs of every rank; prints as one table, `as_dict` is JSON-ready."""

    summary: str
    ranks: tuple[RankCost, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"summary": self.summary, "ranks": [asdict(r) for r in self.ranks]}

    def __str__(self) -> str:
        heads = (
            "rank",
            "tokens",
            "work",
            "MB in",
            "MB out",
            "steps",
            "calls",
            "gathered",
            "buffer MB",
        )
        rows: list[tuple[str, ...]] = [heads]
        for r in self.ranks:
            into, out, buffers = (
                "/".join(f"{x / 1e6:.2f}" for x in pair)
                for pair in (r.bytes_in, _plus(r.bytes_out, r.bytes_heads), r.buffer_bytes)
            )
            steps, calls = ("/".join(map(str, pair)) for pair in (r.steps, r.calls))
            row = (r.rank, r.tokens, r.work, into, out, steps, calls, r.gathered, buffers)
            rows.append(tuple(map(str, row)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(x.rjust(w) for x, w in zip(row, widths, strict=True)) for row in rows)
        return "\n".join((self.summary, *lines, "a/b: forward/backward"))


def _plus(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    return a[0] + b[0], a[1] + b[1]


def explain(
    plan: Plan,
    *,
    heads: int = 8,
    kv_heads: int | None = None,
    head_dim: int = 128,
    dtype: str = "bfloat16",
) -> Explanation:
    """Each rank's tokens, work, bytes in and out, steps, kernel calls and buffers.

    Args:
        heads, kv_heads: query and key/value heads (default: as many). head_dim: of q, k and v.
        dtype: of the tensors: float16, bfloat16, float32 or float64.

    Raises:
        PlanError: an unknown dtype, or heads that intra does not divide.

    >>> from tasp_core import plan
    >>> cost = explain(plan([64], ranks=4, schedule="ring"), heads=1, head_dim=8, dtype="float32")
    >>> cost.ranks[0].bytes_out, cost.ranks[0].calls        # 3 hops of 16 tokens of 64 bytes
    ((3072, 6144), (5, 5))
    """
    name = str(dtype).removeprefix("torch.")
    if name not in BYTES:
        raise PlanError(f"dtype must be one of {', '.join(BYTES)}, got {dtype!r}")
    kv_heads = heads if kv_heads is None else kv_heads
    parts = split_heads(heads, kv_heads, plan.intra)
    work = check(plan).work.sum(axis=1)
    costs = []
    for group in range(plan.context_plan.ranks):
        passes = [lower(plan.context_plan, group, backward=b) for b in (False, True)]
        members = np.diff(plan.member_tokens(group)).tolist()
        for member, (tokens, own) in enumerate(zip(members, parts, strict=True)):
            row = RowBytes.of(heads // plan.intra, own.kv_high - own.kv_low, head_dim, BYTES[name])
            inside = ulysses_bytes(tokens, sum(members) - tokens, own, parts, head_dim, BYTES[name])
            buffers = [row.buffers(p, p.backward) for p in passes]
            attends = (i for i in passes[0].instructions if isinstance(i, Attend))
            gathered = sum(len(i.gather) for i in attends if i.gather is not None)
            costs.append(
                RankCost(
                    group * plan.intra + member,
                    tokens,
                    int(work[group]),
                    _wire(passes, row, False),
                    _wire(passes, row, True),
                    inside,
                    _pair(p.num_steps for p in passes),
                    _pair(p.num_calls for p in passes),
                    gathered,
                    _pair(buffers),
                )
            )
    return Explanation(plan.summary(), tuple(costs))


def _wire(passes: list[Program], row: RowBytes, sent: bool) -> tuple[int, int]:
    return _pair(wire_bytes(p, row, sent=sent, backward=p.backward) for p in passes)


def _pair(values: Any) -> tuple[int, int]:
    forward, backward = values
    return int(forward), int(backward)
