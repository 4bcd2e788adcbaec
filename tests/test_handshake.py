"""Ranks: what they compare before a step, and what they must not touch of their parent."""

from __future__ import annotations

import gc
import os
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import tasp_core as tasp
from tasp_core.lab.bench.accuracy import Inputs, Reference, run_rank
from tasp_core.lowering.lower import lower
from tasp_core.runtime.exchange import STEPS, GlooExchange
from tasp_core.runtime.packing import TAGS, PackedMessage
from tasp_core.runtime.process_group import state_of

DOCS = tasp.Documents.of([137, 201, 46])
INPUTS = Inputs.random(DOCS.total, 4, 2, 8)
GOOD = [tasp.plan(DOCS, 4, schedule=s) for s in ("tasp", "ring", "sap")]
OTHER = tasp.plan(DOCS, 4, schedule="wave", layout="striped")


def by_turns(rank, group):
    """Right calls, and between them calls in which the last rank has another plan."""
    found, errors = [], []
    for turn in range(12):
        good = GOOD[turn % len(GOOD)]
        found.append(run_rank(rank, group, good, INPUTS)[0])
        try:
            run_rank(rank, group, OTHER if rank == 3 else good, INPUTS)
        except tasp.PlanError as error:
            errors.append(str(error))
    return found, errors


def test_a_call_that_failed_leaves_nothing_to_the_next():
    by_rank = tasp.launch(by_turns, 4, timeout_s=60.0)
    for turn, good in enumerate(GOOD):
        assert Reference(INPUTS, DOCS).errors([found[turn] for found, _ in by_rank], good).ok
    for found, errors in by_rank:
        assert len(errors) == 12
        assert all("rank 3 has wave" in text for text in errors)
        for turn, result in enumerate(found):
            assert all(map(torch.equal, result, found[turn % len(GOOD)]))


def test_a_rank_that_is_out_of_step_is_named():
    def one_ahead(rank, group):
        if rank == 2:
            state_of(group).calls += 1
        with pytest.raises(tasp.PlanError) as caught:
            run_rank(rank, group, GOOD[0], INPUTS)
        return str(caught.value)

    for text in tasp.launch(one_ahead, 4):
        assert "call: rank 2 has 2; the others have 1" in text


class Posted:
    """Stands for a process group: what is posted, in order."""

    def __init__(self):
        self.calls = []

    def recv(self, tensors, peer, tag):
        self.calls.append(("recv", peer, tag))

    def send(self, tensors, peer, tag):
        self.calls.append(("send", peer, tag))


def test_receives_are_posted_first_and_tags_differ_from_those_of_other_plans(monkeypatch):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:gloo")
    message = lower(GOOD[0], 0).steps[0].sends[0]
    messages = [PackedMessage(message, torch.zeros(2), tag) for tag in (0, TAGS - 1)]
    seen = set()
    for tag_prefix in (0, 1, (1 << 15) - 1):
        exchange = GlooExchange.__new__(GlooExchange)
        exchange.group = Posted()
        exchange._handshake = SimpleNamespace(tag_prefix=tag_prefix)
        exchange.members = [10, 11, 12, 13]
        exchange.start(STEPS - 1, messages, messages)
        peer = exchange.members[message.peer]
        kinds, peers, tags = zip(*exchange.group.calls, strict=True)
        assert kinds == ("recv", "recv", "send", "send")
        assert set(peers) == {peer}
        assert tags[:2] == tags[2:]
        assert 0 <= min(tags) <= max(tags) < 1 << 31
        assert not seen & set(tags)
        seen |= set(tags)


def test_what_a_handshake_costs_in_messages():
    """One small all-to-all when all agree."""

    def counted(rank, group):
        calls, real = [], dist.all_gather
        dist.all_gather = lambda *a, **b: calls.append(a) or real(*a, **b)
        run_rank(rank, group, GOOD[0], INPUTS)
        return len(calls)

    assert tasp.launch(counted, 4) == [0] * 4


def test_a_rank_does_not_collect_what_its_parent_left():
    """A process group among it would wait for threads that the fork has not copied."""
    parent = os.getpid()

    class Left:
        def __del__(self):
            if os.getpid() != parent:
                os._exit(3)

    gc.disable()
    try:
        left = Left()
        left.itself = left
        del left
        assert tasp.launch(lambda rank, group: gc.collect() >= 0, 1, timeout_s=30.0) == [True]
    finally:
        gc.enable()
        gc.collect()  # here, not in the ranks of a later test


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="this system has no batch scheduling")
def test_ranks_do_not_stop_each_other_in_the_midst_of_a_message():
    """Of 24 threads on two cores, a woken one must not take the core of one that holds a connection."""

    def policy(rank, group):
        before = os.sched_getscheduler(0)
        with suppress(OSError):  # where a sandbox refuses, the usual one is left
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        return before, os.sched_getscheduler(0)

    usual = os.sched_getscheduler(0)
    for found, possible in tasp.launch(policy, 2, timeout_s=30.0):
        assert found == (possible if usual == os.SCHED_OTHER else usual)
    assert os.sched_getscheduler(0) == usual  # a notebook's own kernel stays quick
