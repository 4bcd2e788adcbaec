"""Traffic: bytes and messages per step and pair of ranks, and how long a machine's resources take for them.

Also seconds and bytes of collectives: the all-gather of a schedule, the all-to-alls of Ulysses groups.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ..errors import PlanError, check_int
from ..machines.machine import Machine
from ..planning.heads import Heads, split_heads
from ..planning.plan import Plan
from ..schedules import KINDS, Hops
from ..schedules.counts import load_rows, load_table
from .bytes import BYTES, RowBytes


class Sizes(NamedTuple):
    """Heads, dims and bytes of the tensors of one call; `parts` are the heads of each group member."""

    parts: list[Heads]
    head_dim: int
    batch: int
    item: int

    @classmethod
    def of(
        cls, plan: Plan, heads: int, kv_heads: int | None, head_dim: int, dtype: str, batch: int
    ) -> Sizes:
        """Sizes, once they make sense.

        Raises:
            PlanError: an unknown dtype, numbers below 1, or heads that intra does not divide.
        """
        name = str(dtype).removeprefix("torch.")
        if name not in BYTES:
            raise PlanError(f"dtype must be one of {', '.join(BYTES)}, got {dtype!r}")
        heads = check_int(heads, "heads", 1, PlanError)
        kv_heads = heads if kv_heads is None else check_int(kv_heads, "kv_heads", 1, PlanError)
        if heads % kv_heads:
            raise PlanError(f"{heads} query heads are not a multiple of {kv_heads} key/value heads")
        parts = split_heads(heads, kv_heads, plan.intra)
        head_dim = check_int(head_dim, "head_dim", 1, PlanError)
        return cls(parts, head_dim, check_int(batch, "batch", 1, PlanError), BYTES[name])

    @property
    def accumulator_bytes(self) -> int:
        """Bytes of one element of an accumulator."""
        return max(4, self.item)

    def q(self, part: Heads) -> int:
        """Query elements of one token that one member has, in the whole batch."""
        return (part.q_high - part.q_low) * self.head_dim * self.batch

    def kv(self, part: Heads) -> int:
        """Key and value elements of one token that one member has, in the whole batch."""
        return 2 * (part.kv_high - part.kv_low) * self.head_dim * self.batch

    def row_bytes(self, part: Heads, backward: bool) -> list[int]:
        """Bytes of one token in a message, by kind of message (kv, dkv, q, out, dq)."""
        heads, kv_heads = part.q_high - part.q_low, part.kv_high - part.kv_low
        row = RowBytes.of(heads, kv_heads, self.head_dim, self.item)
        return [row.of_kind(kind, backward) * self.batch for kind in range(len(KINDS))]


class Traffic(NamedTuple):
    """Bytes and messages that src sends dst in each step; one row for each such triple, sorted by step."""

    step: np.ndarray
    src: np.ndarray
    dst: np.ndarray
    nbytes: np.ndarray
    messages: np.ndarray

    @property
    def steps(self) -> int:
        """Communication steps."""
        return int(self.step.max()) + 1 if len(self.step) else 0


def traffic_of(plan: Plan, hops: Hops, sizes: Sizes, backward: bool) -> Traffic:
    """Bytes and messages of hops; of hops between Ulysses groups those between all their members."""
    subchunks, degree = plan.context_plan.subchunks, plan.intra
    tokens = np.zeros(len(hops.step), dtype=np.int64)
    messages = np.zeros_like(tokens)
    for part in range(subchunks.parts):
        count = subchunks.count[plan.context_plan.subchunk_of(hops, part)]
        tokens += count
        messages += count > 0
    filled = messages > 0
    hops, tokens, messages = hops.where(filled), tokens[filled], messages[filled]
    row_bytes = (np.array(sizes.row_bytes(heads, backward)) for heads in sizes.parts)
    (step, src, dst), [messages, *member_bytes] = load_rows(
        (hops.step, hops.src, hops.dst), messages, *(tokens * row[hops.kind] for row in row_bytes)
    )
    member = np.tile(np.arange(degree), len(step))
    step, src, dst, messages = (np.repeat(c, degree) for c in (step, src, dst, messages))
    nbytes = np.stack(member_bytes, axis=1).ravel().astype(float)
    return Traffic(step, src * degree + member, dst * degree + member, nbytes, messages)


@lru_cache(maxsize=16)
def _known(machine: Machine) -> dict[int, tuple[str, ...]]:
    """Routes of the pairs src * ranks + dst that have been asked for."""
    return {}


class Charge(NamedTuple):
    """Seconds for which each row of a Traffic occupies its busiest resource; bytes of each resource."""

    seconds: np.ndarray
    link_bytes: dict[str, float]


def _less_saved(busy: np.ndarray, most: np.ndarray) -> np.ndarray:
    """Seconds by step and resource, less what token buckets have saved up while others took longer.

    Args:
        busy: seconds without buckets, [steps, resources].
        most: seconds that each bucket can save, [resources].
    """
    saved, left = np.zeros(busy.shape[1]), np.empty_like(busy)
    for t, need in enumerate(busy):
        left[t] = np.maximum(0, need - saved)
        saved = np.minimum(most, saved - need + left[t].max(initial=0))
    return left


def charge(machine: Machine, traffic: Traffic) -> Charge:
    """Seconds of each row, that is, of its busiest resource: rows of a step share resources fairly.

    Raises:
        TopologyError: a pair of ranks without a route.
    """
    n = machine.ranks
    pairs, at = np.unique(traffic.src * n + traffic.dst, return_inverse=True)
    numbers: dict[str, int] = {}
    known = _known(machine)
    for p in pairs.tolist():
        if p not in known:
            known[p] = machine.resources(*divmod(p, n))
    routes = [[numbers.setdefault(name, len(numbers)) for name in known[p]] for p in pairs.tolist()]
    width, spare = max(map(len, routes), default=0), len(numbers)
    table = np.array([r + [spare] * (width - len(r)) for r in routes]).reshape(len(routes), width)
    capacity = np.array([*map(machine.capacity_gbps, numbers), np.inf]) * 1e9
    used = table[at]
    shape, seconds = (traffic.steps, spare + 1), np.zeros(len(at))
    loads = np.zeros(shape)
    for k in range(width):
        loads += load_table(shape, traffic.step, used[:, k], amount=traffic.nbytes)
    busy = loads / capacity
    if machine.burst_bytes:
        busy = _less_saved(busy, machine.burst_bytes / capacity)
    for k in range(width):
        np.maximum(seconds, busy[traffic.step, used[:, k]], out=seconds)
    total = loads.sum(axis=0)
    return Charge(seconds, dict(zip(numbers, total.tolist(), strict=False)))


def gathered(plan: Plan, machine: Machine, sizes: Sizes) -> tuple[Traffic, float]:
    """What the schedule's all-gather moves, as one step, and the seconds that it costs besides its bytes.

    Over all ranks it is the library's: a ring in rank order takes n - 1 turns, direct messages take one
    turn per node. Between groups of ranks it is an all-to-all.
    """
    degree, n = plan.intra, plan.context_plan.ranks
    rows = int(plan.context_plan.layout.counts.max())
    if degree > 1 or not plan.schedule.collective:
        ends = np.argwhere(~np.eye(n if plan.schedule.collective else 0, dtype=bool)).T
        (src, dst), times, turns = ends, np.ones_like(ends[0]), 1
    elif machine.all_gather == "ring":
        src, turns = np.arange(n), n - 1
        dst, times = (src + 1) % n, np.full_like(src, n - 1)
    else:  # each rank's rows once to every node, and from there to the node's ranks
        hops = plan.schedule.collective_hops(plan.machine.node_size)
        pair, times = np.unique(hops.src * n + hops.dst, return_counts=True)
        src, dst, turns = pair // n, pair % n, machine.num_nodes
    member = np.tile(np.arange(degree), len(src))
    per = [sizes.kv(p) * sizes.item for p in sizes.parts]
    nbytes = np.outer(times * rows, per).ravel().astype(float)
    src, dst = (np.repeat(end, degree) * degree + member for end in (src, dst))
    zero = np.zeros(len(member), dtype=np.int64)
    return Traffic(zero, src, dst, nbytes, zero), turns * (machine.latency_s + machine.message_s)


def ulysses(
    plan: Plan, machine: Machine, sizes: Sizes, backward: bool
) -> tuple[tuple[float, float], dict[str, float]]:
    """Seconds of the all-to-alls before and after the context-parallel plan, and bytes by resource."""
    degree = plan.intra
    if degree == 1:
        return (0.0, 0.0), {}
    tokens = np.array([plan.num_tokens(r) for r in range(plan.ranks)])
    ends = [
        (g * degree + i, g * degree + j)
        for g in range(plan.context_plan.ranks)
        for i in range(degree)
        for j in range(degree)
    ]
    src, dst = np.array([e for e in ends if e[0] != e[1]]).T
    q = np.array([sizes.q(p) * sizes.item for p in sizes.parts])
    kv = np.array([sizes.kv(p) * sizes.item for p in sizes.parts])
    lse = np.array([sizes.q(p) // sizes.head_dim * sizes.accumulator_bytes for p in sizes.parts])
    # before: own tokens, heads of the receiver; after: tokens of the receiver, own heads
    if backward:  # dout, then dq, dk, dv
        phases = (tokens[src] * q[dst % degree], 1), (tokens[dst] * (q + kv)[src % degree], 3)
    else:  # q, k, v, then out and lse
        phases = (
            (tokens[src] * (q + kv)[dst % degree], 3),
            (tokens[dst] * (q + lse)[src % degree], 2),
        )
    seconds, zero = [], np.zeros_like(src)
    totals: dict[str, float] = {}
    for nbytes, times in phases:
        charged = charge(machine, Traffic(zero, src, dst, nbytes.astype(float), zero))
        each = machine.latency_s + (degree - 1) * machine.message_s
        seconds.append(float(charged.seconds.max()) + times * each)
        totals = sum_bytes(totals, charged.link_bytes)
    return (seconds[0], seconds[1]), totals


def sum_bytes(*tables: dict[str, float]) -> dict[str, float]:
    """Bytes by resource, of several tables together."""
    total: dict[str, float] = {}
    for table in tables:
        for name, value in table.items():
            total[name] = total.get(name, 0.0) + value
    return total
