"""Every exchange carries every kind of message: proved, interpreted on integers, exact on real ranks."""

from __future__ import annotations

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from interpreter import assert_right, interpret

import tasp_core as tasp
from tasp_core import Plan, PlanError, check
from tasp_core.lab.bench.accuracy import Inputs, Reference, run_rank
from tasp_core.lab.bench.one_process import Clock, InProcessExchange, Mailbox
from tasp_core.lowering.lower import lower
from tasp_core.lowering.program import Post
from tasp_core.runtime import execute
from tasp_core.runtime.exchange import GlooExchange
from tasp_core.schedules import DQ, KV, OUT, Hops, Q
from tasp_core.schedules.wave import AllGather

DOCS = tasp.Documents.of([13, 140, 7])
INPUTS = Inputs.random(DOCS.total, 4, 2, 8)
MOVING = {
    # what moves queries: (layout, options)
    "helper": ("contiguous", {}),
    "mesh": ("zigzag", {}),
    "token_ring": ("zigzag", {}),
    "sap": ("contiguous", {"move_q": True}),
}


def moving(schedule, ranks=4, exchange="all_to_all", **more):
    layout, options = MOVING[schedule]
    return tasp.plan(
        DOCS,
        ranks,
        schedule=schedule,
        layout=layout,
        schedule_options={**options, "exchange": exchange},
        **more,
    )


def from_file(schedule):
    """A table of single messages, which a file turns into collectives."""
    single = moving(schedule, exchange="p2p")
    data = json.loads(single.with_hops(single.hops(backward=True).lines()).to_json())
    return Plan.from_json(json.dumps({**data, "options": {"exchange": "all_to_all"}}))


PLANS = {
    **{name: moving(name) for name in MOVING},
    **{f"{name} of a file": from_file(name) for name in MOVING},
    "mesh over nodes": moving("mesh", machine="mesh2x2"),
    "wave": tasp.plan(DOCS, 4, schedule="wave", schedule_options={"exchange": "all_to_all"}),
    "all_gather": tasp.plan(DOCS, 4, schedule="all_gather", machine="mesh2x2"),
}
GROUPS = moving("helper", 8, intra=2)


@pytest.mark.parametrize("name", PLANS)
def test_proved_and_interpreted(name):
    p = PLANS[name]
    kinds = {lower(p, r, backward=b).kinds for r in range(4) for b in (False, True)}
    if name.split()[0] in MOVING:
        assert p.schedule.exchange == "all_to_all"
        assert {Q, OUT, DQ} <= set().union(*kinds)  # token_ring moves no keys
    check(p)
    assert_right(p)


@pytest.fixture(scope="module")
def answers():
    def work(rank, group):
        return [run_rank(rank, group, p, INPUTS)[0] for p in PLANS.values()]

    return dict(zip(PLANS, zip(*tasp.launch(work, 4), strict=True), strict=True))


@pytest.mark.parametrize("name", PLANS)
def test_exact_on_real_ranks(answers, name):
    """Forward and backward; queries that stayed behind gave 1e19 and NaN."""
    errors = Reference(INPUTS, DOCS).errors(answers[name], PLANS[name])
    assert errors.ok, errors


def test_exact_between_groups():
    found = tasp.launch(lambda rank, group: run_rank(rank, group, GROUPS, INPUTS)[0], 8)
    assert Reference(INPUTS, DOCS).errors(found, GROUPS).ok


@pytest.mark.parametrize("name", MOVING)
def test_bits_do_not_depend_on_the_exchange(name):
    plans = [moving(name, exchange=x) for x in ("p2p", "all_to_all")]

    def work(rank, group):
        return [run_rank(rank, group, p, INPUTS)[0] for p in plans]

    for single, packed in tasp.launch(work, 4):
        assert all(map(torch.equal, single, packed))


# ---- another exchange in the place of a process group


def in_process(p):
    """Every rank's output of `attention` itself, over messages that are copies in this process."""
    mailbox = Mailbox(Clock(torch.device("cpu")))

    def one(rank):
        q, k, v = (tasp.shard(x, p, rank) for x in INPUTS.tensors()[:3])
        with mailbox.lock, torch.no_grad():
            return tasp.attention(q, k, v, p, InProcessExchange(mailbox, rank, p.ranks))

    with ThreadPoolExecutor(p.ranks) as pool:
        return list(pool.map(one, range(p.ranks)))


@pytest.mark.parametrize("name", ["wave", "mesh", "sap"])  # as all-to-alls, too
def test_attention_takes_any_exchange(name):
    p = PLANS[name]
    alone = tasp.attention(*INPUTS.tensors()[:3], tasp.plan(DOCS, 1))
    torch.testing.assert_close(tasp.unshard(in_process(p), p), alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("p", "reason"),
    [
        (PLANS["all_gather"], "InProcessExchange has no all-gather"),
        (tasp.plan(DOCS, 4, intra=2), "InProcessExchange exchanges no heads and tokens"),
    ],
)
def test_what_an_exchange_does_not_do_is_refused(p, reason):
    with pytest.raises(PlanError, match=reason):
        in_process(p)


# ---- what is not carried


@pytest.mark.parametrize("lost", [Q, OUT])
@pytest.mark.parametrize("name", ["helper", "mesh"])
def test_kinds_that_a_schedule_does_not_name_are_refused(name, lost, monkeypatch):
    p = PLANS[name]
    kinds = tuple(k for k in p.schedule.kinds() if k != lost)
    monkeypatch.setattr(type(p.schedule), "kinds", lambda self, *, backward=False: kinds)
    with pytest.raises(AssertionError, match="a kind that stays behind"):
        interpret(p, backward=False)
    program = lower(p, 0)
    t, step = next(
        (t, s)
        for t, s in enumerate(program.steps)
        if any(m.kind == lost for m in (*s.sends, *s.recvs))
    )
    exchange = GlooExchange.__new__(GlooExchange)
    exchange.rank = 0
    word = {Q: "q", OUT: "out"}[lost]
    with pytest.raises(PlanError, match=rf"step {t}: {word}\d\.0 is to move, .* carries kv"):
        exchange.post_all_to_all(t, step.sends, step.recvs, {"kv": torch.zeros(1)}, program.kinds)


def test_an_executor_refuses_an_exchange_that_it_does_not_know():
    p = tasp.plan(DOCS, 4, schedule="ring")
    kernel = type("Kernel", (), {"computes": True, "finish": lambda self: None})()
    context = execute.Context(p, 0, object(), kernel, 1.0)
    with pytest.raises(PlanError, match="carrier pigeon"):
        context.post(Post(0, "carrier pigeon"), (), (), {})


def test_every_rank_calls_the_same_collectives():
    """Ranks that move no queries take part in the collectives of those that do."""
    for p in (PLANS["helper"], PLANS["sap"], PLANS["mesh"]):
        for backward in (False, True):
            programs = [lower(p, r, backward=backward) for r in range(4)]
            assert len({(x.kinds, len(x.steps), x.exchange) for x in programs}) == 1
    idle = [x for x in (lower(PLANS["helper"], r) for r in range(4)) if not x.remote_query_rows]
    assert any(not x.sends_queries for x in idle)


# ---- collectives of a schedule


@dataclasses.dataclass(frozen=True)
class Odd(AllGather):
    """An all-gather whose hops say something else than a collective does."""

    words: tuple[str, ...] = ()
    library: str = "all_gather"

    @property
    def collective(self):
        return self.library

    def forward(self, rank):
        table = Hops.parse(self.words)
        return table if rank is None else table.where((table.src == rank) | (table.dst == rank))

    def gradients(self, rank):
        return Hops.concat([])


def gathering(*changes, library="all_gather"):
    p = PLANS["all_gather"]
    words = [w for w in p.hops().lines() if w not in [old for old, _ in changes]]
    words += [new for _, new in changes if new]
    return dataclasses.replace(p, schedule=Odd(4, 4, words=tuple(words), library=library))


@pytest.mark.parametrize(
    ("p", "reason"),
    [
        (gathering(("t0 0>1 kv0.0", "t1 0>1 kv0.0")), "at step 0, from its owner at t1 0>1 kv0.0"),
        (gathering(("t0 0>1 kv0.0", "t1 2>1 kv0.0")), "at step 0, from its owner at t1 2>1 kv0.0"),
        (gathering(("t0 3>0 kv3.0", None)), "rank 0 is not to receive kv3.0"),
        (gathering(("", "t0 0>1 q0.0")), "moves KV only at t0 0>1 q0.0"),
        (gathering(library="broadcast"), "knows no collective 'broadcast'"),
        (gathering(library="all_to_all"), "knows no collective 'all_to_all'"),
    ],
)
def test_a_collective_moves_what_its_hops_say(p, reason):
    with pytest.raises(PlanError, match=reason):
        check(p)


@pytest.mark.parametrize("p", [gathering(library="broadcast"), gathering(("", "t0 0>1 q0.0"))])
def test_a_collective_that_no_executor_knows_is_not_lowered(p):
    """Nor one beside which there are messages: none is left out without a word."""
    with pytest.raises(
        PlanError, match=r"rank 0, step 0: executors know one collective, all_gather"
    ):
        lower(p, 0)


def test_words_of_a_collective_are_single_messages():
    single = PLANS["all_gather"].with_hops(PLANS["all_gather"].hops(backward=True).lines())
    again = Plan.from_json(single.to_json())
    for p in (single, again):
        assert lower(p, 1).collective is None
        assert {m.kind for m in lower(p, 1).steps[0].sends} == {KV}
        check(p)
        assert_right(p)
    data = json.loads(PLANS["all_gather"].to_json())
    text = json.dumps({**data, "options": {"exchange": "all_to_all"}})
    with pytest.raises(PlanError, match="schedule 'all_gather' has no option"):
        Plan.from_json(text)
