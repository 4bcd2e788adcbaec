"""What a plan costs, by formula: bytes of all ranks together, and a rank's buffers.

    T tokens of the row, n ranks (groups, with Ulysses inside), t the largest rank's tokens,
    kv, dkv, q, found: bytes of one token on the wire (`RowBytes`)

    schedule                               all ranks, forward    backward            buffers of a rank
    ring, double_ring, tasp, tasp_paths,
    tasp_rails, wave, paced                (n-1) T kv            (n-1) T (kv + dkv)  limits x t kv [1]
    all_gather                             n (n-1) t kv          n (n-1) t kv + (n-1) T dkv    n t kv
    token_ring, full mask                  (n-1) T (q + found)   the same            remote x t (q + found)
    mesh, full mask, r rows x c columns    T ((r-1) kv + (c-1) (q + found)) ... and (r-1) T dkv
    sap                                    counted: it depends on the documents

[1] and rows by which shares of uneven ranks differ; double_ring and paced up to a fifth more.
Ulysses inside adds `ulysses_bytes`. tests/test_formulas.py holds all of it against lowered programs.
"""

from __future__ import annotations

from typing import NamedTuple

from ..lowering.program import Program
from ..planning.heads import Heads
from ..planning.plan import Plan
from ..schedules import DKV, KV, Q
from ..schedules.query_moving import Mesh, RankPairs, TokenRing

BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
FORWARD, BACKWARD = 4, 10  # operations a pass for each visible pair, query head and dim


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
        remote_query = 3 * q * item + heads * lse  # q, dout, out, and lse
        return cls(kv * item, kv * wide, (q * item, remote_query), ((q + heads) * wide, q * wide))

    def of_kind(self, kind: int, backward: bool) -> int:
        """Bytes of a row of this kind of message."""
        if kind in (KV, DKV):
            return self.kv if kind == KV else self.dkv
        return (self.q if kind == Q else self.found)[backward]

    def buffers(self, program: Program, backward: bool) -> int:
        """Bytes of the buffers in which other ranks' rows lie."""
        return (
            program.kv_buffer_rows * self.kv
            + (program.remote_grad_rows + program.grad_receive_rows) * self.dkv
            + program.remote_query_rows * (self.q[backward] + self.found[backward])
            + program.received_partial_rows * self.found[backward]
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


class Formula(NamedTuple):
    """Bytes all groups send, (forward, backward), and what a rank's buffers for keys take at most."""

    sent: tuple[int, int]
    buffers: float


def formula(plan: Plan, row: RowBytes) -> Formula | None:
    """The closed form for a plan's inner schedule, or None where bytes depend on documents or mask.

    >>> from tasp_core import plan
    >>> formula(plan([64], ranks=4, schedule="ring"), RowBytes.of(1, 1, 8, 4)).sent
    (12288, 24576)
    """
    plan = plan.context_plan
    schedule, docs = plan.schedule, plan.docs
    n, total, most = plan.ranks, docs.total, int(plan.layout.counts.max())
    if schedule.collective:
        gathered = n * (n - 1) * most * row.kv
        return Formula((gathered, gathered + (n - 1) * total * row.dkv), n * most * row.kv)
    if isinstance(schedule, RankPairs):
        dense = docs.prefixes and not docs.causal and len(docs.lengths) == 1
        if not dense or not isinstance(schedule, TokenRing | Mesh) or plan.layout.counts.min() == 0:
            return None
        r, c = (1, n) if isinstance(schedule, TokenRing) else (schedule.rows, schedule.columns)
        keys, queries = (r - 1) * total, (c - 1) * total
        trips = [keys * row.kv + queries * (row.q[b] + row.found[b]) for b in (False, True)]
        remote_queries = schedule.limits.remote_queries * most * (row.q[0] + row.found[0])
        return Formula(
            (trips[0], trips[1] + keys * row.dkv),
            schedule.limits.buffer * most * row.kv + remote_queries,
        )
    if schedule.variable_size:
        return None
    trip = (n - 1) * total
    rounding = 2 * schedule.num_shares * plan.subchunks.parts  # blocks that shares do not divide
    loose = 1.2 if schedule.name in ("double_ring", "paced") else 1.0  # slots of unlike sizes
    return Formula(
        (trip * row.kv, trip * (row.kv + row.dkv)),
        (loose * schedule.limits.buffer * most + rounding) * row.kv,
    )


def ulysses_bytes(
    tokens: int, others: int, own: Heads, parts: list[Heads], head_dim: int, item: int
) -> tuple[int, int]:
    """Bytes a member sends inside its group, (forward, backward): q, k, v out, out home; and back.

    Args:
        tokens, others: this member's tokens and those of its peers. parts: every member's heads.
    """
    q = (own.q_high - own.q_low) * head_dim * item
    size = {h: 2 * (h.kv_high - h.kv_low) * head_dim * item for h in parts}
    away = sum(tokens * (q + size[h]) for h in parts if h != own)
    peers = len(parts) - 1
    return away + others * q, tokens * q * peers + others * (q + size[own])
