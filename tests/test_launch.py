"""launch: whatever one of four ranks does in a forward pass, it is named first, every time."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from threading import Thread

import pytest
import torch
import torch.distributed as dist
from spread import spread

import tasp_core as tasp
from tasp_core.errors import TransportError
from tasp_core.lab.bench.accuracy import Inputs

DOCS = tasp.Documents.of([13, 70, 7])
INPUTS = Inputs.random(DOCS.total, 2, 1, 8)
PLAN = tasp.plan(DOCS, 4)


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch):
    monkeypatch.setattr(sys.modules["tasp_core.runtime.launch"], "GRACE_S", 1.5)


def forward(rank, group):
    q, k, v, _ = (tasp.shard(x, PLAN, rank) for x in INPUTS.tensors())
    return tasp.attention(q, k, v, PLAN, group)


def raises():
    raise ValueError("a fault of my own")


def stop(number):
    os.kill(os.getpid(), number)
    time.sleep(0.1)


FAULTS = {
    "sleeps": (lambda: time.sleep(60), "hung: no result in", " in fails\n"),
    "is stopped": (lambda: stop(signal.SIGSTOP), "hung: no result in", "stopped, by SIGSTOP"),
    "is killed": (lambda: stop(signal.SIGKILL), "died without a word", "signal 9"),
    "raises": (raises, "ValueError: a fault of my own", "in raises"),
}


WHEN = ((0, True), (2, False), (3, True))  # the rank at fault, and whether after a good pass


def fails(rank, group, fault, who, between):
    """Two forward passes; the rank at fault stops before the first or between the two."""
    if between:
        forward(rank, group)
    if rank == who:
        FAULTS[fault][0]()
    time.sleep(0.1 * ((rank - who) % 4))  # healthy ranks start to wait one after the other
    forward(rank, group)


@pytest.mark.parametrize(
    ("fault", "who", "between"),
    [
        *((fault, *when) for fault in ("is killed", "raises") for when in WHEN),
        # the others run into a time-out
        *spread(((fault, *when) for fault in ("sleeps", "is stopped") for when in WHEN), keep=2),
    ],
)
def test_the_rank_at_fault_is_named_first(fault, who, between):
    began = time.monotonic()
    with pytest.raises(tasp.RankError) as caught:
        tasp.launch(fails, 4, fault, who, between, timeout_s=9, message_timeout_s=1.5)
    error = caught.value
    assert error.first == who
    assert str(error).startswith(f"rank {who} failed first:\n")
    for word in FAULTS[fault][1:]:
        assert word in error.errors[who]
    assert isinstance(error.cause, ValueError) == (fault == "raises")
    assert error.__cause__ is error.cause
    assert set(error.errors) == {0, 1, 2, 3}
    assert time.monotonic() - began < 20


def test_ranks_that_wait_for_each_other_lead_to_the_one_at_fault():
    """0 waits for 1, 1 for 2, which sleeps; 0 reports long before 1 does."""

    def chain(rank, group):
        if rank == 2:
            time.sleep(60)
        time.sleep(0.8 * rank)
        try:
            dist.recv(torch.zeros(1), rank + 1, group)
        except RuntimeError as error:
            raise TransportError(f"rank {rank} waited", peers=[rank + 1]) from error

    with pytest.raises(tasp.RankError) as caught:
        tasp.launch(chain, 3, timeout_s=9, message_timeout_s=1.5)
    assert caught.value.first == 2
    assert " in chain\n" in caught.value.errors[2]
    assert "rank 1 waited" in caught.value.errors[1]


def test_a_rank_that_others_do_not_mean_is_not_blamed():
    """0 says that it waited for 3, which raised; 1, which raised as well, is not why 0 failed."""

    def work(rank, group):
        if rank == 0:
            time.sleep(0.5)
            raise TransportError("waited", peers=(3,))
        time.sleep(0.1 * rank)
        raise KeyError(rank)

    with pytest.raises(tasp.RankError) as caught:
        tasp.launch(work, 4)
    assert caught.value.first == 1  # the first that failed by itself

    def late(rank, group):
        if rank == 0:
            raise TransportError("waited", peers=(3,))
        time.sleep(0.1 + 0.1 * rank)
        raise KeyError(rank)

    with pytest.raises(tasp.RankError) as caught:
        tasp.launch(late, 4)
    assert caught.value.first == 3
    assert isinstance(caught.value.cause, KeyError)


def test_without_any_report_the_rank_that_waits_for_no_message_is_named():
    def work(rank, group):
        if rank == 2:
            time.sleep(60)
        forward(rank, group)

    with pytest.raises(tasp.RankError) as caught:
        tasp.launch(work, 4, timeout_s=2, message_timeout_s=1.99)
    assert caught.value.first == 2


def test_a_message_error_keeps_its_peers_on_its_way():
    error = pickle.loads(pickle.dumps(TransportError("words", peers=[2, 1])))
    assert (str(error), error.peers) == ("words", (2, 1))
    assert TransportError("words").peers == ()


def test_a_slow_rank_fails_nothing():
    """One that computes for longer than a message may take, while another has left already."""

    def work(rank, group):
        time.sleep(2.5 * (rank == 1))
        return rank

    assert tasp.launch(work, 2, timeout_s=20, message_timeout_s=1.0) == [0, 1]


def test_ranks_of_a_process_with_several_threads_compute_on_one():
    """A fork copies none of the threads among which such a process has shared its sums."""
    large, threads = torch.ones(1 << 20), torch.get_num_threads()

    def work(rank, group):
        return torch.get_num_threads(), large.exp().sum().item()

    torch.set_num_threads(2)
    try:
        large.exp().sum()
        found = tasp.launch(work, 2, timeout_s=20)
    finally:
        torch.set_num_threads(threads)
    assert found == [(1, pytest.approx(2.718282 * (1 << 20), rel=1e-4))] * 2


@pytest.mark.parametrize(
    "options",
    [
        {"timeout_s": 0},
        {"timeout_s": float("nan")},
        {"timeout_s": 5, "message_timeout_s": 5},
        {"message_timeout_s": 0},
        {"message_timeout_s": float("nan")},
    ],
)
def test_time_outs_that_cannot_be(options):
    with pytest.raises(tasp.PlanError, match=r"timeout_s must be .*got"):
        tasp.launch(lambda rank, group: rank, 1, **options)


def from_anywhere(rank, group):
    """The last rank sends late; the others have finished by then."""
    got = torch.zeros(1)
    if rank == 0:
        dist.recv(got)
    elif rank == 3:
        time.sleep(0.5)
        dist.send(torch.tensor([7.0]), 0)
    return got.item()


def test_a_rank_that_has_finished_sends_nothing_more():
    """A receive from any rank would take it."""
    assert tasp.launch(from_anywhere, 4, timeout_s=20) == [7.0, 0.0, 0.0, 0.0]


def killed_after_its_report(rank, group):
    if rank == 0:
        pid = os.getpid()
        Thread(target=lambda: (time.sleep(0.5), os.kill(pid, signal.SIGKILL)), daemon=True).start()
    else:
        time.sleep(1.5)
    return rank


def test_a_rank_that_is_killed_after_its_report_holds_nobody():
    start = time.monotonic()
    assert tasp.launch(killed_after_its_report, 2, timeout_s=20) == [0, 1]
    assert time.monotonic() - start < 10
