"""Execution by dependencies: the same bits as step by step, on real ranks, and errors that come out."""

from __future__ import annotations

import time

import pytest
import torch

import tasp_core as tasp
from tasp_core.kernels.aten import AtenCpu
from tasp_core.lab.bench.accuracy import Inputs
from tasp_core.lab.bench.document_lengths import row_lengths
from tasp_core.lowering.hazards import hazards
from tasp_core.lowering.lower import lower
from tasp_core.lowering.program import Attend, Recv, Wait
from tasp_core.lowering.streams import streams_of

DOCS = tasp.Documents.of([120, 7, 61, 0, 33])
CASES = [
    ("sap", "balanced", "mesh4", {}),
    ("sap", "contiguous", "mesh2x2", {}),
    ("sap", "balanced", "mesh4", {"steps": 5, "buffer_tokens": 20}),
    ("sap", "balanced", "mesh4", {"exchange": "all_to_all"}),
    ("tasp", "zigzag", "mesh4", {}),
    ("wave", "per_document", "mesh2x2", {}),
    ("token_ring", "contiguous", "mesh4", {}),
    ("all_gather", "per_document", "mesh4", {}),
]


def made(schedule, layout, machine, options, docs=DOCS):
    ranks = tasp.machine(machine).ranks
    return tasp.plan(
        docs,
        ranks,
        schedule=schedule,
        layout=layout,
        machine=machine,
        schedule_options=options or None,
    )


def passes(rank, group, plans, inputs, executor, keep_kv=False):
    """Output, log-sum-exp and gradients of each plan."""
    result = []
    for p in plans:
        q, k, v, dout = (tasp.shard(x, p, rank) for x in inputs.tensors())
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out, lse = tasp.attention(
            *leaves, p, group, executor=executor, return_lse=True, keep_kv=keep_kv
        )
        out.backward(dout)
        result.append([out.detach(), lse, *(x.grad for x in leaves)])
    return result


@pytest.mark.parametrize("keep_kv", [False, True])
def test_results_are_those_of_the_steps_to_the_bit(keep_kv):
    plans = [made(*case) for case in CASES]
    inputs = Inputs.random(DOCS.total, 4, 2, 16)
    by_steps, by_dependencies = (
        tasp.launch(passes, 4, plans, inputs, executor, keep_kv)
        for executor in ("steps", "dependencies")
    )
    for one, other in zip(by_steps, by_dependencies, strict=True):
        for case, mine, same in zip(CASES, one, other, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, same, strict=True)), case


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case[:3]))
@pytest.mark.parametrize("backward", [False, True])
def test_whatever_runs_at_once_touches_different_rows(case, backward):
    p = made(*case)
    for rank in range(p.ranks):
        for ahead in (0, 1):
            program = lower(p, rank, backward=backward, ahead=ahead)
            assert hazards(program) == []
            streams = streams_of(program)
            assert sorted(streams.messages + streams.computations) == [
                *range(len(program.instructions))
            ]
            _check_by_rows(program, streams)


def _check_by_rows(program, streams):
    """Every conflict between the streams is waited for, found pair by pair."""

    def rows(regions):
        return {(r.buffer, i) for r in regions for i in range(r.low, r.high)}

    reads, writes = (
        [rows(getattr(i, k)) for i in program.instructions] for k in ("reads", "writes")
    )
    ends, waiting = {}, []
    for index in streams.messages:
        waiting.append(index)
        if isinstance(program.instructions[index], Wait):
            ends.update(dict.fromkeys(waiting, index))
            waiting = []
    for b in range(len(program.instructions)):
        for a in range(b):
            if (a in streams.messages) == (b in streams.messages):
                continue
            conflict = writes[a] & (reads[b] | writes[b]) or reads[a] & writes[b]
            end = ends.get(a, a)
            if conflict and end < b:
                assert streams.after[b] >= end, (a, b)


def test_messages_start_before_the_computation_of_the_step_before_has_ended():
    p = made("sap", "balanced", "mesh4", {"steps": 6, "buffer_tokens": 12})
    earlier = 0
    for rank in range(4):
        for ahead in (0, 1):
            program = lower(p, rank, ahead=ahead)
            streams = streams_of(program)
            attends = [i for i, x in enumerate(program.instructions) if isinstance(x, Attend)]
            for index, x in enumerate(program.instructions):
                if isinstance(x, Recv) and ahead:
                    before = [a for a in attends if a < index]
                    earlier += bool(before) and streams.after[index] < before[-1]
    assert earlier > 0


def test_rows_of_two_ranks_are_the_most():
    docs = tasp.Documents.of([400, 40, 40])
    for case in CASES:
        p = made(*case, docs=docs)
        if p.schedule.collective:
            continue
        for rank in range(p.ranks):
            usual = lower(p, rank).kv_buffer_rows
            wide = lower(p, rank, ahead=1).kv_buffer_rows
            assert usual <= wide <= max(usual, 2 * int(p.layout.counts.max()))


class _Broken(AtenCpu):
    """A kernel that fails in its second call."""

    calls = 0

    def forward(self, *arguments):
        self.calls += 1
        if self.calls > 1:
            raise OSError("the kernel is on fire")
        return super().forward(*arguments)


def test_a_rank_that_fails_is_an_error_on_all_and_nothing_hangs():
    p = made("tasp", "zigzag", "mesh4", {})
    inputs = Inputs.random(DOCS.total, 4, 2, 16)

    def attend(rank, group):
        q, k, v, _ = (tasp.shard(x, p, rank) for x in inputs.tensors())
        if rank == 2:
            q = q[:-1]
        with pytest.raises(tasp.PlanError, match="rank 2"):
            tasp.attention(q, k, v, p, group, executor="dependencies")

    tasp.launch(attend, 4, timeout_s=60)

    def broken(rank, group):
        q, k, v, _ = (tasp.shard(x, p, rank) for x in inputs.tensors())
        kernel = _Broken() if rank == 1 else "aten"
        tasp.attention(q, k, v, p, group, kernel=kernel, executor="dependencies")

    started = time.perf_counter()
    with pytest.raises(tasp.RankError, match="the kernel is on fire"):
        tasp.launch(broken, 4, timeout_s=60, message_timeout_s=50)
    assert time.perf_counter() - started < 40  # the others are told, long before the time-out


def test_options_that_say_nothing_are_refused():
    p = tasp.plan([8], 1)
    x = torch.zeros(8, 2, 4)
    with pytest.raises(tasp.PlanError, match="executor must be one of steps, dependencies"):
        tasp.attention(x, x, x, p, executor="threads")
    assert (tasp.attention(x, x, x, p, executor="dependencies") == 0).all()
    meta = torch.zeros(8, 2, 4, device="meta")
    with pytest.raises(tasp.PlanError):
        tasp.attention(meta, meta, meta, p, executor="dependencies")


def test_predictions_know_it_where_buffers_have_room():
    sizes = {"heads": 32, "kv_heads": 8, "head_dim": 128}
    gained = 0
    for name, layout in (("sft", "balanced"), ("sft", "contiguous"), ("code", "contiguous")):
        p = tasp.plan(
            row_lengths(name, 1 << 18, 0), 16, schedule="sap", layout=layout, machine="h100x2"
        )
        for backward in (False, True):
            steps, free = (
                tasp.simulate(p, backward=backward, executor=executor, **sizes)
                for executor in ("steps", "dependencies")
            )
            assert max(free.comm_s, free.compute_s) <= free.total_s * (1 + 1e-9)
            assert free.total_s <= steps.total_s * (1 + 1e-9)
            gained += free.total_s < 0.95 * steps.total_s
    assert gained
    ring = tasp.plan([1 << 16], 8, schedule="ring", layout="zigzag")
    one, other = (tasp.simulate(ring, executor=e, **sizes) for e in ("steps", "dependencies"))
    assert other.total_s == pytest.approx(one.total_s)
    with pytest.raises(tasp.PlanError, match="executor must be one of steps, dependencies"):
        tasp.simulate(ring, executor="threads", **sizes)
    rows = tasp.select(row_lengths("code", 1 << 16, 0), "h100x2", executor="dependencies", **sizes)
    assert rows.plan.ranks == 16
