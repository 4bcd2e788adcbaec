"""What a plan costs each rank, read off its lowered programs: tokens, work, bytes, steps, calls, buffers.

    print(tasp.explain(plan, heads=8, kv_heads=2, head_dim=64, dtype="bfloat16"))

Every figure is counted from what will run, none is modelled; seconds are `simulate`'s business.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from .check import check
from .errors import PlanError
from .heads import split_heads
from .lower import lower
from .plan import Plan
from .program import Program
from .schedules import DKV, KV, Q

BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class RankCost:
    """One rank's costs; bytes are for all heads it handles, forward then backward."""

    rank: int
    tokens: int
    work: int  # visible pairs it computes, of all its heads' one head
    bytes_in: tuple[int, int]
    bytes_out: tuple[int, int]
    bytes_heads: tuple[int, int]  # sent by the all-to-alls inside its group (intra > 1)
    steps: tuple[int, int]
    calls: tuple[int, int]  # kernel calls
    gathered: int  # key rows copied because they do not lie in document order, forward
    buffer_bytes: tuple[int, int]  # travelling keys, values and gradients, guest queries


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
            into, out, held = (
                "/".join(f"{x / 1e6:.2f}" for x in pair)
                for pair in (r.bytes_in, _plus(r.bytes_out, r.bytes_heads), r.buffer_bytes)
            )
            steps, calls = ("/".join(map(str, pair)) for pair in (r.steps, r.calls))
            row = (r.rank, r.tokens, r.work, into, out, steps, calls, r.gathered, held)
            rows.append(tuple(map(str, row)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(x.rjust(w) for x, w in zip(row, widths, strict=True)) for row in rows)
        return "\n".join((self.summary, *lines, "a/b: forward/backward"))


def _plus(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    return a[0] + b[0], a[1] + b[1]


class RowBytes(NamedTuple):
    """Bytes of one token on the wire, or in a buffer, by what travels."""

    kv: int
    dkv: int
    q: tuple[int, int]  # forward, backward
    found: tuple[int, int]

    @classmethod
    def of(cls, heads: int, kv_heads: int, head_dim: int, item: int) -> RowBytes:
        """Of q, k and v with equal head dims and elements of `item` bytes."""
        wide, lse = max(4, item), max(4, item)
        q, kv = heads * head_dim, 2 * kv_heads * head_dim
        guest = 3 * q * item + heads * lse  # q, dout, out, and lse
        return cls(kv * item, kv * wide, (q * item, guest), ((q + heads) * wide, q * wide))

    def of_kind(self, kind: int, backward: bool) -> int:
        """Bytes of a row of this kind of message."""
        if kind in (KV, DKV):
            return self.kv if kind == KV else self.dkv
        return (self.q if kind == Q else self.found)[backward]

    def buffers(self, program: Program, backward: bool) -> int:
        """Bytes of the buffers in which other ranks' rows lie."""
        return (
            program.arena_rows * self.kv
            + (program.acc_rows + program.landing_rows) * self.dkv
            + program.guest_rows * (self.q[backward] + self.found[backward])
            + program.answer_rows * self.found[backward]
        )


def wire_bytes(program: Program, row: RowBytes, *, sent: bool, backward: bool) -> int:
    """Bytes a program sends or receives."""
    total = sum(
        m.count * row.of_kind(m.kind, backward)
        for step in program.steps
        for m in (step.sends if sent else step.recvs)
    )
    if program.collective:  # every rank's padded rows go to every other rank
        total += program.gathered_rows * (program.ranks - 1) * row.kv
    return total


def explain(
    plan: Plan, *, heads: int = 8, kv_heads: int | None = None, head_dim: int = 128,
    dtype: str = "bfloat16",
) -> Explanation:  # fmt: skip
    """Each rank's tokens, work, bytes in and out, steps, kernel calls and buffers.

    Args:
        heads, kv_heads: query and key/value heads (default: as many). head_dim: of q, k and v.
        dtype: of the tensors: float16, bfloat16, float32 or float64.

    Raises:
        PlanError: an unknown dtype, or heads that intra does not divide.

    >>> from .plan import plan
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
    for group in range(plan.inner.ranks):
        passes = [lower(plan.inner, group, backward=b) for b in (False, True)]
        members = np.diff(plan.member_tokens(group)).tolist()
        for member, (tokens, own) in enumerate(zip(members, parts, strict=True)):
            row = RowBytes.of(heads // plan.intra, own.kv_high - own.kv_low, head_dim, BYTES[name])
            q = (heads // plan.intra) * head_dim * BYTES[name]
            kv_sizes = {h: 2 * (h.kv_high - h.kv_low) * head_dim * BYTES[name] for h in parts}
            others = (
                sum(members) - tokens
            )  # q, k, v go out and out comes home; then dout and dq, dk, dv
            away = sum(tokens * (q + size) for h, size in kv_sizes.items() if h != own)
            inside = (
                away + others * q,
                tokens * q * (plan.intra - 1) + others * (q + kv_sizes[own]),
            )
            held = [row.buffers(p, bool(b)) for b, p in enumerate(passes)]
            forward = passes[0]
            copies = (s.compute.gather for s in forward.steps if s.compute)
            costs.append(RankCost(
                group * plan.intra + member, tokens, int(work[group]),
                _wire(passes, row, False), _wire(passes, row, True), inside,
                _pair(len(p.steps) for p in passes),
                _pair(p.num_calls for p in passes),
                sum(len(g) for g in copies if g is not None), _pair(held),
            ))  # fmt: skip
    return Explanation(plan.summary(), tuple(costs))


def _wire(passes: list[Program], row: RowBytes, sent: bool) -> tuple[int, int]:
    return _pair(wire_bytes(p, row, sent=sent, backward=bool(b)) for b, p in enumerate(passes))


def _pair(values: Any) -> tuple[int, int]:
    forward, backward = values
    return int(forward), int(backward)
