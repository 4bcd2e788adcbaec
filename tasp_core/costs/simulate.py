"""simulate(plan, machine) -> Timeline: predicted seconds, bytes of every resource, each rank's steps.

The model is what runtime/execute.py does. In each step every rank posts its messages and computes on
what arrived in the step before. It begins the next step when both are done, and waits for nothing else.

    message      begins when both its ranks have reached the step. It takes latency_s, plus message_s per
                 message that its busier end posts, plus the time in which its busiest resource carries all
                 bytes of the step (a token bucket takes its saved bytes off). Each end's processor also
                 spends message_cpu_s + bytes / copy_gbps on it.
    computation  4 (backward 10) x visible pairs x head dim x heads / kernel rate, plus kernel_s per kernel
                 call, plus rows read, merged and written / memory_gbps, plus the processor time of the
                 step's messages. Where ranks share cores, a rank gets the time that others leave unused.
    Ulysses      all-to-alls in the groups before and after the context-parallel plan, not overlapped.
    all_gather   one ring in rank order, or direct messages over all links, as the machine says.

Where all ranks do the same and there are very many hops, rank 0 is simulated and stands for all.
Not covered: copies into and out of buffers, packing of all-to-alls, processor time of collectives.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import PlanError
from ..lowering.program import SMALL_BYTES
from ..lowering.streams import EXECUTORS
from ..machines.bounds import cut_bound, needed_bound
from ..machines.machine import Machine
from ..machines.presets import as_machine
from ..planning.plan import OVER_NODES, Plan
from ..planning.work import Work, work_of
from ..schedules import DKV, KV
from ..schedules.counts import last_uses, live_table, load_rows, load_table
from .bytes import BACKWARD, FORWARD
from .traffic import Sizes, Traffic, charge, gathered, sum_bytes, traffic_of, ulysses


@dataclass(frozen=True, eq=False)
class Timeline:
    """What `simulate` predicts; seconds and bytes of one pass.

    Attributes:
        title: the plan and the machine in words.
        compute, comm: (begin, end) by rank and step, float64 [ranks, steps, 2].
        total_s: from the begin of the first rank to the end of the last one.
        comm_s: total_s if computing took no time.
        compute_s: the time in which the busiest rank computes.
        link_bytes: bytes that each resource carries, by its name; resources that carry none are left out.
        bound_s: the cut bound of the KV that ranks need, in the backward pass also of its gradients; None
            where Ulysses (intra > 1) or remote queries could move other bytes instead.
    """

    title: str
    compute: np.ndarray
    comm: np.ndarray
    total_s: float
    comm_s: float
    compute_s: float
    link_bytes: dict[str, float]
    bound_s: float | None

    @property
    def steps(self) -> int:
        """Steps per rank."""
        return self.compute.shape[1]

    @cached_property
    def idle(self) -> float:
        """Fraction of total_s in which a rank, on average, does not compute."""
        busy = float(np.diff(self.compute, axis=2).sum(axis=1).mean())
        return 1 - busy / self.total_s if self.total_s else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The attributes as plain numbers, lists and dicts."""
        data = {f.name: getattr(self, f.name) for f in fields(self)}
        return {**data, "compute": self.compute.tolist(), "comm": self.comm.tolist()}

    def __str__(self) -> str:
        bound = "" if self.bound_s is None else f" (cut bound {_ms(self.bound_s)})"
        lines = [
            self.title,
            f"total {_ms(self.total_s)}: communication alone {_ms(self.comm_s)}{bound}, "
            f"computing alone {_ms(self.compute_s)}",
            f"{self.steps} steps; ranks do not compute {self.idle:.1%} of the time",
        ]
        if self.link_bytes:
            name, most = max(self.link_bytes.items(), key=lambda item: item[1])
            lines.append(f"most bytes: {name}, {most / 1e6:.2f} MB")
        return "\n".join(lines)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"


MANY_HOPS = 1 << 22
MOST_HOPS = 1 << 25


def simulate(
    plan: Plan,
    machine: Machine | str | Path | None = None,
    *,
    heads: int,
    kv_heads: int | None = None,
    head_dim: int,
    dtype: str = "bfloat16",
    backward: bool = False,
    batch: int = 1,
    overlap: bool = True,
    executor: str = "steps",
) -> Timeline:
    """Predict one pass of a plan.

    Args:
        machine: where it runs, a Machine, or a name or path as for `tasp_core.machine`; default: the
            machine it was planned for.
        heads, kv_heads: query and key/value heads (default: as many). head_dim: of q, k and v.
        dtype: of the tensors: float16, bfloat16, float32 or float64.
        backward: whether the pass is the backward pass.
        batch: packed sequences of equal documents, which all follow the plan.
        overlap: whether a step computes while it communicates.
        executor: as for `attention`: "steps", or "dependencies", with which messages run up to a step
            ahead where buffers of two ranks' KV have room for it.

    Raises:
        PlanError: sizes that make no sense, a machine of another size, a plan too large.
        TopologyError: no machine of this name, or a message between ranks without a route.

    >>> from tasp_core import plan
    >>> p = plan([8000], ranks=8, schedule="ring", layout="contiguous")
    >>> t = simulate(p, heads=1, head_dim=128, dtype="float32")
    >>> round(t.comm_s * 1e6, 1)            # 7 steps of 1.024 MB over 64.3 GB/s, and of 10 us
    181.5
    """
    if executor not in EXECUTORS:
        raise PlanError(f"executor must be one of {', '.join(EXECUTORS)}, got {executor!r}")
    machine = _machine(plan, machine)
    sizes = Sizes.of(plan, heads, kv_heads, head_dim, dtype, batch)
    only_first = _only_first_rank(plan, machine)
    hops = plan.hops(0 if only_first else None, backward=backward)
    steps = plan.schedule.num_steps(backward=backward) + 1
    collective, turns_s = gathered(plan, machine, sizes)
    sent = hops.where(hops.kind == DKV) if plan.schedule.collective else hops
    traffic = traffic_of(plan, sent, sizes, backward)
    packed = plan.schedule.exchange == "all_to_all"
    # small messages to one peer travel packed, as one per step
    single = packed | (traffic.nbytes <= traffic.messages * SMALL_BYTES)
    traffic = traffic._replace(messages=np.where(single, 1, traffic.messages))
    charged, together = charge(machine, traffic), charge(machine, collective)
    work = work_of(
        plan, hops, range(1 if only_first else plan.context_plan.ranks), steps, backward=backward
    )
    if work.missing:
        raise PlanError(
            f"rank {work.missing.rank} never receives KV that it needs: check(plan) says which"
        )
    busy = np.repeat(_seconds(machine, sizes, work, backward), plan.intra, axis=0)
    posted = _by_end(traffic, traffic.messages, plan.ranks, steps)
    most = [posted[end, traffic.step] for end in (traffic.src, traffic.dst)]
    lasts = charged.seconds + machine.latency_s + machine.message_s * np.maximum(*most)
    copied = posted * (0.0 if packed else machine.message_cpu_s)
    if machine.copy_gbps and not packed:
        copied += _by_end(traffic, traffic.nbytes, plan.ranks, steps) / (machine.copy_gbps * 1e9)
    if only_first:
        busy, copied = busy[:1], copied[:1]
        traffic = traffic._replace(src=np.zeros_like(traffic.src), dst=np.zeros_like(traffic.dst))
    gather_s = turns_s + float(together.seconds.max()) if len(together.seconds) else 0.0
    heads_s, head_bytes = ulysses(plan, machine, sizes, backward)
    ahead = int(_room_ahead(plan.context_plan)) if executor == "dependencies" and overlap else None
    run = _Run(traffic, lasts, copied, gather_s, packed, overlap, ahead)
    compute, comm, total_s = run.times(busy)
    comm_s = run.times(np.zeros_like(busy))[2]
    shape = (plan.ranks, steps, 2)
    return Timeline(
        title=f"{plan.summary()}\non {machine.name}, {'backward' if backward else 'forward'}"
        + ("" if machine.tflops else "; its kernel rate is unknown, so computing takes no time"),
        compute=np.broadcast_to(compute + heads_s[0], shape),
        comm=np.broadcast_to(comm + heads_s[0], shape),
        total_s=total_s + sum(heads_s),
        comm_s=comm_s + sum(heads_s),
        compute_s=float(busy.sum(axis=1).max()),
        link_bytes=sum_bytes(
            _everywhere(machine, traffic_of(plan, sent, sizes, backward))
            if only_first
            else charged.link_bytes,
            together.link_bytes,
            head_bytes,
        ),
        bound_s=_bound(plan, machine, sizes, None if only_first else work, backward),
    )


def _machine(plan: Plan, named: Machine | str | Path | None) -> Machine:
    """The machine with all ranks of the plan, as named or as the plan has it.

    A plan with Ulysses keeps the machine between its groups, in which a group is one rank.

    Raises:
        PlanError: another number of ranks, or a plan that only knows its machine between groups.
        TopologyError: no machine of this name.
    """
    if named is not None:
        machine = as_machine(named)
    else:
        machine, degree = plan.machine, plan.intra
        spans_nodes = machine.name.endswith(OVER_NODES)
        if degree > 1 and (not machine.homogeneous or spans_nodes):
            raise PlanError(
                "the machine of this plan describes groups of ranks; give simulate the machine itself"
            )
        name = machine.name.rpartition("/")[0] if degree > 1 else machine.name
        machine = replace(machine, name=name, node_size=machine.node_size * degree)
    if machine.ranks != plan.ranks:
        raise PlanError(
            f"machine {machine.name!r} has {machine.ranks} ranks, the plan {plan.ranks}"
        )
    return machine


def _only_first_rank(plan: Plan, machine: Machine) -> bool:
    """Whether rank 0 alone is simulated and stands for all ranks.

    Raises:
        PlanError: too many hops, and ranks differ.
    """
    n, schedule = plan.context_plan.ranks, plan.schedule
    hops = 0 if schedule.variable_size else n * (n - 1) * schedule.num_shares
    symmetric = schedule.rank_symmetric and machine.homogeneous and plan.intra == 1
    if hops > MOST_HOPS and not symmetric:
        raise PlanError(
            f"{hops} hops are too many to simulate one by one; "
            "use fewer ranks or shares, or a machine whose ranks are all equal"
        )
    return symmetric and hops > MANY_HOPS


def _by_end(traffic: Traffic, values: np.ndarray, ranks: int, steps: int) -> np.ndarray:
    """Sums of `values` over the messages that a rank sends or receives, float64 [ranks, steps]."""
    shape, values = (ranks, steps), values.astype(float)
    sent, received = (
        load_table(shape, end, traffic.step, amount=values) for end in (traffic.src, traffic.dst)
    )
    return sent + received


def _seconds(machine: Machine, sizes: Sizes, work: Work, backward: bool) -> np.ndarray:
    """Seconds of computing, float64 [context-parallel ranks, steps]."""
    heads = sizes.q(sizes.parts[0])  # query heads x head dim x batch
    tflops = (machine.backward_tflops if backward else 0) or machine.tflops
    if not tflops:
        return np.zeros(work.pairs.shape)
    result = work.pairs * (heads * (BACKWARD if backward else FORWARD) / (tflops * 1e12))
    result += work.calls * machine.kernel_s
    if machine.memory_gbps:  # queries are read, partial outputs written, from step 1 on also merged
        row = np.full(work.rows.shape[1], 3 * sizes.item + 2 * sizes.accumulator_bytes)
        row[0] = 2 * sizes.item
        gbytes = heads * row * (2 if backward else 1) / 1e9
        result += work.rows * (gbytes / machine.memory_gbps)
    # a rank with more work than the mean gets the others' time, but is never faster than by itself
    if machine.ranks_a_core:
        alone = result / max(1.0, machine.ranks_a_core)
        return np.maximum(np.minimum(result, result.mean(axis=0)), alone)
    return result


@dataclass(frozen=True)
class _Run:
    """When each step begins and ends, from the steps before it."""

    traffic: Traffic
    lasts: np.ndarray  # seconds of each row of `traffic` once it has begun
    copied: np.ndarray  # seconds of the processor that messages take, by rank and step
    gather_s: float  # seconds of an all-gather in step 0; 0 without one
    together: bool  # every step is one collective
    overlap: bool
    ahead: int | None = None  # steps by which messages may run ahead; None: step by step

    def times(self, busy: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
        """(begin, end) of computing and of communication, by rank and step; when all ranks have ended.

        Args:
            busy: seconds of computing, [ranks, steps].

        Returns:
            compute and comm, float64 [ranks, steps, 2]; seconds until the last rank has ended.
        """
        if self.ahead is not None:
            return self._by_dependencies(busy, self.ahead)
        ranks, steps = busy.shape
        compute, comm = np.zeros((2, ranks, steps, 2))
        ready = np.zeros(ranks)  # when each rank begins the step
        bounds = np.searchsorted(self.traffic.step, np.arange(steps + 1))
        for t in range(steps):
            rows = slice(*bounds[t : t + 2])
            src, dst, lasts = self.traffic.src[rows], self.traffic.dst[rows], self.lasts[rows]
            arrived = ready + self.copied[:, t]
            if self.together and len(lasts):
                arrived[:] = ready.max() + lasts.max()
            else:
                end = np.maximum(ready[src], ready[dst]) + lasts
                np.maximum.at(arrived, src, end)
                np.maximum.at(arrived, dst, end)
            if t == 0 and self.gather_s:
                arrived[:] = ready.max() + self.gather_s
            begin = ready if self.overlap else arrived
            computed = begin + busy[:, t]
            compute[:, t, 0], compute[:, t, 1] = begin, computed
            comm[:, t, 0], comm[:, t, 1] = ready, arrived
            ready = np.maximum(arrived, computed + self.copied[:, t] * self.overlap)
        return compute, comm, float(ready.max())

    def _by_dependencies(
        self, busy: np.ndarray, ahead: int
    ) -> tuple[np.ndarray, np.ndarray, float]:
        """As `times`: a step's messages wait for those before them, and for rows to be free."""
        ranks, steps = busy.shape
        compute, comm = np.zeros((2, ranks, steps, 2))
        arrived = np.zeros(ranks)  # when the messages so far have ended
        computed = np.zeros(
            (ranks, steps + 1)
        )  # when the computation of each step ends; last: never
        bounds = np.searchsorted(self.traffic.step, np.arange(steps + 1))
        for t in range(steps):
            rows = slice(*bounds[t : t + 2])
            src, dst, lasts = self.traffic.src[rows], self.traffic.dst[rows], self.lasts[rows]
            begin = np.maximum(computed[:, t - 1], arrived)  # of computing on what has arrived
            free = computed[:, t - 1 - ahead] if t > ahead else np.zeros(ranks)
            posted = np.maximum(arrived, free)
            ended = posted + self.copied[:, t]
            if self.together and len(lasts):
                ended[:] = posted.max() + lasts.max()
            else:
                end = np.maximum(posted[src], posted[dst]) + lasts
                np.maximum.at(ended, src, end)
                np.maximum.at(ended, dst, end)
            if t == 0 and self.gather_s:
                ended[:] = posted.max() + self.gather_s
            computed[:, t] = begin + busy[:, t] + self.copied[:, t]
            compute[:, t, 0], compute[:, t, 1] = begin, begin + busy[:, t]
            comm[:, t, 0], comm[:, t, 1] = posted, ended
            arrived = ended
        return compute, comm, float(max(arrived.max(), computed.max()))


def _room_ahead(plan: Plan) -> bool:
    """Whether all KV may arrive a step earlier without any rank holding more than that of two ranks."""
    hops = plan.hops()
    kv = hops.where(hops.kind == KV)
    if plan.schedule.collective or not len(kv.step):
        return False
    n, shares, listed = plan.ranks, plan.schedule.num_shares, plan.schedule.offloaded
    arrival = np.full((n, n, shares), -1)
    arrival[kv.dst, kv.owner, kv.share] = kv.step
    relayed = kv.where(kv.src != kv.owner)
    sends = relayed.src, relayed.owner, relayed.share, relayed.step
    last = last_uses(arrival + 1, sends, (listed.rank, listed.owner, listed.share, listed.step))
    at = kv.dst, kv.owner, kv.share
    size = plan.tokens_moved(kv)
    live = live_table(n, kv.dst, np.maximum(0, kv.step - 1), last[at], size)
    return bool(live.max() <= 2 * int(plan.layout.counts.max()))


def _everywhere(machine: Machine, traffic: Traffic) -> dict[str, float]:
    """Bytes of all resources from what rank 0 sends, where every rank sends the same."""
    n, m, u = machine.ranks, machine.node_size, machine.num_nodes
    mine = traffic.src == 0
    (to,), [nbytes] = load_rows((traffic.dst[mine],), traffic.nbytes[mine])
    total: dict[str, float] = {}
    for src in range(n):
        for dst, size in zip(to.tolist(), nbytes.tolist(), strict=True):
            # rank 0 sends to dst, so src sends to the rank that far from it in nodes and local ranks
            node, local = (src // m + dst // m) % u, (src + dst) % m
            for name in machine.resources(src, node * m + local):
                total[name] = total.get(name, 0.0) + size
    return total


def _bound(
    plan: Plan, machine: Machine, sizes: Sizes, work: Work | None, backward: bool
) -> float | None:
    """The cut bound in seconds: of what ranks need (`work`), or of the mean KV per rank without it.

    None where other bytes than KV could move instead.
    """
    if plan.intra > 1 or len(plan.schedule.offloaded.step):
        return None
    both = sizes.item + (sizes.accumulator_bytes if backward and machine.homogeneous else 0)
    token = sizes.kv(sizes.parts[0]) * both
    if work is None:
        return cut_bound(machine, float(plan.layout.counts.mean()) * token)
    subchunks = plan.subchunks
    size = subchunks.count.reshape(plan.ranks, subchunks.parts, -1).sum(
        axis=1
    )  # tokens of (owner, share)
    return needed_bound(machine, work.needed, size * float(token))
