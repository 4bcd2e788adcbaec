"""Simulate: a plan on a machine -> a Timeline: seconds, bytes of every resource, each rank's steps.

The model is what execute.py does. At each step a rank posts its messages, computes on what arrived
in the step before, and goes on when both are done; nothing else makes ranks wait for each other.

    a message     starts when both its ranks have reached the step, takes latency_s + message_s for
                  each message its busier end posts + the time of its busiest resource, on which
                  all bytes of the step share alike, less what its token bucket has saved up;
                  it also takes message_cpu_s + bytes / copy_gbps of the processor at both ends
    a computation 4 (backward 10) x pairs x head dim x heads / kernel rate + kernel_s a call
                  + rows read, merged and written / memory_gbps, beside the step's messages' processor
                  time; where ranks share cores, those with more to do get what the others leave
    Ulysses       all-to-alls in the groups before and after, not overlapped
    all_gather    one ring in rank order, or directly over all links, as the machine says

Where all ranks are alike and there are very many hops, rank 0 stands for all.
Not covered: copies into and out of buffers, packing of all-to-alls, processor time of collectives.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from ..errors import PlanError
from ..lowering.program import SMALL_BYTES
from ..machines.bounds import cut_bound, needed_bound
from ..machines.machine import Machine
from ..planning.plan import Plan
from ..planning.work import Work, work_of
from ..schedules import DKV
from .bytes import BACKWARD, FORWARD
from .traffic import Sizes, Traffic, charge, gathered, sum_bytes, traffic_of, ulysses


@dataclass(frozen=True, eq=False)
class Timeline:
    """What `simulate` predicts; seconds and bytes of one pass.

    Attributes:
        title: the plan and the machine in words.
        compute, comm: (begin, end) by rank and step, float64 [ranks, steps, 2].
        total_s: from the first rank's begin to the last rank's end.
        comm_s: the same if computing took no time. compute_s: the busiest rank's computing alone.
        link_bytes: bytes of each resource that carries any.
        bound_s: the cut bound of the bytes ranks need (backward: with as many gradients back);
            None with intra > 1.
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
        """Steps of a rank."""
        return self.compute.shape[1]

    @cached_property
    def idle(self) -> float:
        """Share of the time in which ranks, on average, do not compute."""
        busy = float(np.diff(self.compute, axis=2).sum(axis=1).mean())
        return 1 - busy / self.total_s if self.total_s else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        data = {f.name: getattr(self, f.name) for f in fields(self)}
        return {**data, "compute": self.compute.tolist(), "comm": self.comm.tolist()}

    def __str__(self) -> str:
        bound = "" if self.bound_s is None else f" (cut bound {_ms(self.bound_s)})"
        lines = [
            self.title,
            f"total {_ms(self.total_s)}: communication alone {_ms(self.comm_s)}{bound}, "
            f"computing alone {_ms(self.compute_s)}",
            f"{self.steps} steps; ranks compute nothing {self.idle:.1%} of the time",
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
    machine: Machine | None = None,
    *,
    heads: int,
    kv_heads: int | None = None,
    head_dim: int,
    dtype: str = "bfloat16",
    backward: bool = False,
    batch: int = 1,
    overlap: bool = True,
) -> Timeline:
    """Predict one pass of a plan.

    Args:
        machine: where it runs; default: the machine it was planned for.
        heads, kv_heads: query and key/value heads (default: as many). head_dim: of q, k and v.
        batch: rows that follow the same plan. overlap: whether a step computes while it communicates.

    Raises:
        PlanError: sizes that make no sense, a machine of another size, a plan too large.
        TopologyError: a message between ranks without a route.

    >>> from tasp_core import plan
    >>> p = plan([8000], ranks=8, schedule="ring", layout="contiguous")
    >>> t = simulate(p, heads=1, head_dim=128, dtype="float32")
    >>> round(t.comm_s * 1e6, 1)            # 7 steps of 1.024 MB over 64.3 GB/s, and of 10 us
    181.5
    """
    machine = _machine(plan, machine)
    sizes = Sizes.of(plan, heads, kv_heads, head_dim, dtype, batch)
    alike = _rank_symmetric(plan, machine)
    hops = plan.hops(0 if alike else None, backward=backward)
    steps = plan.schedule.num_steps(backward=backward) + 1
    collective, turns_s = gathered(plan, machine, sizes)
    sent = hops.where(hops.kind == DKV) if plan.schedule.collective else hops
    traffic = traffic_of(plan, sent, sizes, backward)
    packed = plan.schedule.exchange == "all_to_all"
    one = packed | (traffic.nbytes <= traffic.messages * SMALL_BYTES)  # one message a peer and step
    traffic = traffic._replace(messages=np.where(one, 1, traffic.messages))
    charged, together = charge(machine, traffic), charge(machine, collective)
    work = work_of(plan, hops, range(1 if alike else plan.context_plan.ranks), steps)
    if work.missing:
        raise PlanError(
            f"rank {work.missing.rank} never receives keys it needs: check(plan) says which"
        )
    busy = np.repeat(_seconds(machine, sizes, work, backward), plan.intra, axis=0)
    posted = _by_end(traffic, traffic.messages, plan.ranks, steps)
    most = [posted[end, traffic.step] for end in (traffic.src, traffic.dst)]
    lasts = charged.seconds + machine.latency_s + machine.message_s * np.maximum(*most)
    copied = posted * (0.0 if packed else machine.message_cpu_s)
    if machine.copy_gbps and not packed:
        copied += _by_end(traffic, traffic.nbytes, plan.ranks, steps) / (machine.copy_gbps * 1e9)
    if alike:
        busy, copied = busy[:1], copied[:1]
        traffic = traffic._replace(src=np.zeros_like(traffic.src), dst=np.zeros_like(traffic.dst))
    whole_s = turns_s + float(together.seconds.max()) if len(together.seconds) else 0.0
    heads_s, head_bytes = ulysses(plan, machine, sizes, backward)
    run = _Run(traffic, lasts, copied, whole_s, packed, overlap)
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
            if alike
            else charged.link_bytes,
            together.link_bytes,
            head_bytes,
        ),
        bound_s=_bound(plan, machine, sizes, None if alike else work, backward),
    )


def _machine(plan: Plan, machine: Machine | None) -> Machine:
    if machine is None:
        machine, a = plan.machine, plan.intra
        if a > 1 and not machine.homogeneous:
            raise PlanError(
                "this plan's machine describes groups of ranks; give simulate the machine itself"
            )
        name = machine.name.rpartition("/")[0] if a > 1 else machine.name
        machine = replace(machine, name=name, node_size=machine.node_size * a)
    if machine.ranks != plan.ranks:
        raise PlanError(
            f"machine {machine.name!r} has {machine.ranks} ranks, the plan {plan.ranks}"
        )
    return machine


def _rank_symmetric(plan: Plan, machine: Machine) -> bool:
    """Whether rank 0 stands for all.

    Raises:
        PlanError: too many hops, and ranks differ.
    """
    n, schedule = plan.context_plan.ranks, plan.schedule
    hops = 0 if schedule.variable_size else n * (n - 1) * schedule.num_shares
    alike = schedule.rank_symmetric and machine.homogeneous and plan.intra == 1
    if hops > MOST_HOPS and not alike:
        raise PlanError(
            f"{hops} hops are too many to simulate one by one; "
            "use fewer ranks or shares, or machine nodes that are alike"
        )
    return alike and hops > MANY_HOPS


def _by_end(traffic: Traffic, values: np.ndarray, ranks: int, steps: int) -> np.ndarray:
    """Sums of the rows' values, by rank at either end and step."""
    total = np.zeros((ranks, steps))
    for end in (traffic.src, traffic.dst):
        np.add.at(total, (end, traffic.step), values)
    return total


def _seconds(machine: Machine, sizes: Sizes, work: Work, backward: bool) -> np.ndarray:
    """Computing time by rank and step."""
    heads = sizes.q(sizes.parts[0])  # query heads x head dim x batch
    tflops = (machine.backward_tflops if backward else 0) or machine.tflops
    if not tflops:
        return np.zeros(work.pairs.shape)
    result = work.pairs * (heads * (BACKWARD if backward else FORWARD) / (tflops * 1e12))
    result += work.calls * machine.kernel_s
    if machine.memory_gbps:  # queries are read, a part is written; from step 1 on it is merged
        row = np.full(work.rows.shape[1], 3 * sizes.item + 2 * sizes.wide)
        row[0] = 2 * sizes.item
        gbytes = heads * row * (2 if backward else 1) / 1e9
        result += work.rows * (gbytes / machine.memory_gbps)
    if machine.ranks_a_core:
        alone = result / max(1.0, machine.ranks_a_core)
        return np.maximum(np.minimum(result, result.mean(axis=0)), alone)
    return result


@dataclass(frozen=True)
class _Run:
    """The recurrence over steps."""

    traffic: Traffic
    lasts: np.ndarray  # seconds of each row once it has begun
    copied: np.ndarray  # seconds of the processor that messages take, by rank and step
    gather_s: float
    together: bool  # every step is one collective
    overlap: bool

    def times(self, busy: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
        """(begin, end) of computing and of communication, by rank and step; when all is done."""
        ranks, steps = busy.shape
        compute, comm = np.zeros((2, ranks, steps, 2))
        ready = np.zeros(ranks)
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


def _everywhere(machine: Machine, traffic: Traffic) -> dict[str, float]:
    """Bytes of all resources, from what rank 0 sends: every rank sends alike."""
    n, m, u = machine.ranks, machine.node_size, machine.num_nodes
    mine = traffic.src == 0
    to, at = np.unique(traffic.dst[mine], return_inverse=True)
    nbytes = np.bincount(at, weights=traffic.nbytes[mine]).tolist()
    total: dict[str, float] = {}
    for src in range(n):
        for dst, size in zip(to.tolist(), nbytes, strict=True):
            node, local = (src // m + dst // m) % u, (src + dst) % m
            for name in machine.resources(src, node * m + local):
                total[name] = total.get(name, 0.0) + size
    return total


def _bound(
    plan: Plan, machine: Machine, sizes: Sizes, work: Work | None, backward: bool
) -> float | None:
    """The cut bound of what ranks need; of padded wholes where rank 0 stands for all."""
    if plan.intra > 1 or len(plan.schedule.offloaded.step):  # other bytes could move instead
        return None
    both = sizes.item + (sizes.wide if backward and machine.homogeneous else 0)
    token = sizes.kv(sizes.parts[0]) * both
    if work is None:
        return cut_bound(machine, float(plan.layout.counts.mean()) * token)
    subchunks = plan.subchunks
    size = subchunks.count.reshape(plan.ranks, subchunks.parts, -1).sum(
        axis=1
    )  # tokens of (owner, share)
    return needed_bound(machine, work.needed, size * float(token))
