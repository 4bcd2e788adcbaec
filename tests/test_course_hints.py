"""Course: hints to answers with calls that were not asked for, to wrong buffers, to planners that raise."""

from __future__ import annotations

import pytest

pytest.importorskip("jupytext", reason="the course needs the notebooks' packages: make notebooks")
import torch
import torch.distributed as dist

from tasp_course import unit_03, unit_09
from tasp_course.kit import wrong_answers
from tasp_course.planners import machines
from tasp_course.sources import units

TURNS = wrong_answers(units(["3"])[0])["check_turn"]
MOVES = wrong_answers(units(["3"])[0])["check_move"]


def raises(rate, have):
    return have[99]


def exits(rate, have):
    raise SystemExit("enough")


PLANNERS = pytest.mark.parametrize(
    ("planner", "error"), [(raises, "KeyError"), (exits, "SystemExit")]
)


@pytest.mark.parametrize(
    ("label", "call"),
    [
        ("isend, awaited", "isend"),
        ("isend, not awaited", "isend"),
        ("irecv, awaited", "irecv"),
        ("a batch of isend and irecv", "P2POp"),
    ],
)
def test_where_blocking_calls_are_asked_for_others_are_named(label, call):
    verdict = unit_03.check_turn(TURNS[label])
    assert verdict.state == "wrong"
    assert f"{call} does not wait until its message is through" in verdict.hint, verdict
    assert "send and recv alone" in verdict.hint


def test_other_orders_of_blocking_calls_stay_right():
    def by_keywords(rank, group, own):
        n = dist.get_world_size(group)
        got = torch.empty(1)
        if rank == 0:  # the others receive first, one after the other round the ring
            dist.send(torch.tensor([own]), dst=1, group=group)
            dist.recv(got, group=group)  # from any rank
        else:
            dist.recv(got, src=rank - 1, group=group)
            dist.send(torch.tensor(own), (rank + 1) % n)
        return got.item()

    assert unit_03.check_turn(by_keywords).state == "right"


@pytest.mark.parametrize(
    ("label", "size"),
    [
        ("a buffer too short", "receives into 3 float32 numbers"),
        ("a buffer too long", "receives into 8 float32 numbers"),
        ("a buffer of another dtype", "receives into 4 float16 numbers"),
        ("each tensor twice in a message", "sends 8 float32 numbers"),
    ],
)
def test_a_message_of_the_wrong_size_is_named(label, size):
    verdict = unit_03.check_move(MOVES[label])
    assert verdict.state == "wrong"
    assert size in verdict.hint, verdict
    assert "each message here has 4 float32 numbers" in verdict.hint


@pytest.mark.parametrize(
    ("label", "size"),
    [
        ("an empty buffer", "receives into 0 float32 numbers"),
        ("a longer message", "sends 2 float32 numbers"),
    ],
)
def test_a_wrong_size_in_a_blocking_call_is_named_too(label, size):
    verdict = unit_03.check_turn(TURNS[label])
    assert size in verdict.hint, verdict


def test_a_batch_stays_right_in_a_step():
    def batched(rank, group, hops, held):
        arriving, operations = {}, []
        for src, dst, owner in hops:
            if src == rank:
                operations.append(dist.P2POp(dist.isend, held[owner], dst, group))
            if dst == rank:
                arriving[owner] = torch.empty_like(held[rank])
                operations.append(dist.P2POp(dist.irecv, arriving[owner], src, group))
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        return held | arriving

    assert unit_03.check_move(batched).state == "right"


def test_the_checks_leave_this_process_as_it_is():
    before = dist.isend, dist.irecv, dist.P2POp, dist.ProcessGroup.send, dist.ProcessGroup.recv
    unit_03.check_turn(TURNS["isend, awaited"])
    after = dist.isend, dist.irecv, dist.P2POp, dist.ProcessGroup.send, dist.ProcessGroup.recv
    assert before == after


@PLANNERS
def test_a_planner_that_raises_is_not_put_on_the_board(planner, error, tmp_path):
    path = tmp_path / "scoreboard.json"
    last = unit_09.enter("mine", planner, path).splitlines()[-1]
    assert last.startswith(f"mine is not on the board: your answer raised {error}")
    assert last.endswith("correct it, run its cell, then this one")
    assert not path.exists()


@PLANNERS
def test_a_planner_that_raises_is_not_drawn_and_the_rest_is(planner, error, capsys):
    figure = unit_09.against(machines()[1], planner)
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1
    assert f"my planner is not drawn: your answer raised {error}" in printed
    assert "tasp" in str(figure)


def test_a_planner_that_makes_no_plan_is_not_drawn_and_told_why(capsys):
    unit_09.against(machines()[1], lambda rate, have: [])
    printed = capsys.readouterr().out
    assert "my planner is not drawn: step 0 on random1: the planner sends nothing" in printed
