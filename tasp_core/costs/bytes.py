"""What a plan costs, by formula: bytes that all ranks together send, and bytes of one rank's buffers.

A schedule counts tokens (`Schedule.token_counts`); this file multiplies them by bytes per token. With

    T tokens of the packed sequence, t of the largest rank, n ranks (groups, with Ulysses inside)
    kv, dkv, q, partial: bytes of one token's message (`RowBytes`)

    schedule                            all ranks, forward     backward              buffers of one rank
    most: every share to every rank     (n-1) T kv             (n-1) T (kv + dkv)    limits x t kv [1]
    all_gather                          n (n-1) t kv           the same + (n-1) T dkv            n t kv
    token_ring, full mask               (n-1) T (q + partial)  the same       limits x t (q + partial)
    mesh, full mask, r rows, c columns  T ((r-1) kv + (c-1) (q + partial)) ... + (r-1) T dkv
    sap, helper, other masks            no formula: it depends on the documents

[1] and the tokens by which shares differ in size; double_ring and paced up to a fifth more.
Ulysses inside adds `ulysses_bytes`. tests/test_formulas.py compares all of it with lowered programs.
"""

from __future__ import annotations

from typing import NamedTuple

from ..lowering.program import Program, Recv, Send
from ..planning.heads import Heads
from ..planning.plan import Plan
from ..schedules import DKV, KV, Q

BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
FORWARD, BACKWARD = 4, 10  # operations for each visible pair, query head and dim, in a pass


class RowBytes(NamedTuple):
    """Bytes of one token in a message or a buffer, by what is sent.

    Attributes:
        kv: keys and values. dkv: their gradients.
        q: queries, (forward, backward); backward with out, lse and the gradient of out.
        partial: what returns to the queries' owner, (forward, backward): partial out and lse, and dq.
    """

    kv: int
    dkv: int
    q: tuple[int, int]
    partial: tuple[int, int]

    @classmethod
    def of(cls, heads: int, kv_heads: int, head_dim: int, item: int) -> RowBytes:
        """Of q, k and v with equal head dims and elements of `item` bytes."""
        accumulator = max(4, item)  # of sums and of lse
        q, kv = heads * head_dim, 2 * kv_heads * head_dim
        remote_query = 3 * q * item + heads * accumulator  # q, dout, out, and lse
        partial = (q + heads) * accumulator, q * accumulator
        return cls(kv * item, kv * accumulator, (q * item, remote_query), partial)

    def of_kind(self, kind: int, backward: bool) -> int:
        """Bytes of one token in a message of this kind."""
        if kind in (KV, DKV):
            return self.kv if kind == KV else self.dkv
        return (self.q if kind == Q else self.partial)[backward]

    def buffers(self, program: Program, backward: bool) -> int:
        """Bytes of a program's buffers for what other ranks send."""
        return (
            program.kv_buffer_rows * self.kv
            + (program.remote_grad_rows + program.grad_receive_rows) * self.dkv
            + program.remote_query_rows * (self.q[backward] + self.partial[backward])
            + program.received_partial_rows * self.partial[backward]
        )


def wire_bytes(program: Program, row: RowBytes, *, sent: bool, backward: bool) -> int:
    """Bytes a program sends or receives."""
    op = Send if sent else Recv
    messages = (i.message for i in program.instructions if isinstance(i, op))
    total = sum(m.count * row.of_kind(m.kind, backward) for m in messages)
    if program.collective:  # every rank sends its padded KV to every other rank
        total += program.gathered_rows * (program.ranks - 1) * row.kv
    return total


class Formula(NamedTuple):
    """Bytes that all groups together send, (forward, backward), and the most bytes of one rank's buffers.

    Buffers are those of the forward pass, for KV and queries of other ranks.
    """

    sent: tuple[int, int]
    buffers: float


def formula(plan: Plan, row: RowBytes) -> Formula | None:
    """The closed form for a plan's schedule, or None where bytes depend on the documents or the mask.

    With Ulysses inside it is that of the context-parallel plan, between groups.

    >>> from tasp_core import plan
    >>> formula(plan([64], ranks=4, schedule="ring"), RowBytes.of(1, 1, 8, 4)).sent
    (12288, 24576)
    """
    plan = plan.context_plan
    counts = plan.schedule.token_counts(plan.layout)
    if counts is None:
        return None
    forward, backward = (
        counts.kv * row.kv + counts.queries * (row.q[b] + row.partial[b]) for b in (False, True)
    )
    queries = counts.buffer_queries * (row.q[0] + row.partial[0])
    return Formula((forward, backward + counts.dkv * row.dkv), counts.buffer_kv * row.kv + queries)


def ulysses_bytes(
    tokens: int, others: int, own: Heads, parts: list[Heads], head_dim: int, item: int
) -> tuple[int, int]:
    """Bytes that a member sends inside its Ulysses group, (forward, backward).

    Forward it sends q, k, v by heads and returns out by tokens; backward dout, and dq, dk, dv.

    Args:
        tokens, others: this member's tokens, and those of all its peers together.
        own, parts: its heads, and every member's. item: bytes of an element.
    """
    q = (own.q_high - own.q_low) * head_dim * item
    size = {h: 2 * (h.kv_high - h.kv_low) * head_dim * item for h in parts}
    by_heads = sum(tokens * (q + size[h]) for h in parts if h != own)
    peers = len(parts) - 1
    return by_heads + others * q, tokens * q * peers + others * (q + size[own])
