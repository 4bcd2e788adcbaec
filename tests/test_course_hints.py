"""Course: what learners are told of planners that raise."""

from __future__ import annotations

import pytest

pytest.importorskip("jupytext", reason="the course needs the notebooks' packages: make notebooks")
from tasp_course import unit_09
from tasp_course.uneven import machines


def raises(rate, have):
    return have[99]


def leaves(rate, have):
    raise SystemExit("enough")


PLANNERS = pytest.mark.parametrize(
    ("planner", "told"), [(raises, "KeyError"), (leaves, "SystemExit")]
)


@PLANNERS
def test_a_planner_that_raises_is_not_put_on_the_board(planner, told, tmp_path):
    path = tmp_path / "scoreboard.json"
    last = unit_09.enter("mine", planner, path).splitlines()[-1]
    assert last.startswith(f"mine is not on the board: your answer raised {told}")
    assert last.endswith("mend it, run its cell, then this one")
    assert not path.exists()


@PLANNERS
def test_a_planner_that_raises_is_not_drawn_and_the_rest_is(planner, told, capsys):
    figure = unit_09.against(machines()[1], planner)
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert f"my planner is not drawn: your answer raised {told}" in said
    assert "tasp" in str(figure)


def test_a_planner_that_makes_no_plan_is_not_drawn_and_told_why(capsys):
    unit_09.against(machines()[1], lambda rate, have: [])
    said = capsys.readouterr().out
    assert "my planner is not drawn: step 0 on uneven1: an empty step" in said
