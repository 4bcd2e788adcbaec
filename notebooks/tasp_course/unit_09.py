"""Unit 9, planners: checks and the score board."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np

import tasp_core as tasp
import visualize
from tasp_core import Machine, PlanError
from tasp_core.result_file import write
from visualize import Figure

from .planners import HEAD_DIM, HEADS, KV_BYTES, TOKENS, Planner, machines, planned, ratio, scores
from .verdict import exercise, expect, raised, recap

__all__ = ["KV_BYTES", "machines", "planned", "ratio", "scores"]

BOARD = Path(__file__).resolve().parents[2] / "results" / "scoreboard.json"
RIVALS = ("ring", "tasp")
ROUND_OFF = 1e-6
ALL_LINKS, PATIENT = 4.5, 2.2  # the most, in cut bounds on average, for exercises 2 and 3


def slow_sender() -> Machine:
    """A machine on which one rank has slow outgoing links."""
    mesh = tasp.machine("mesh6")
    return mesh.degraded(
        {f"link 2>{b}": 2.0 for b in range(6) if b != 2}, "mesh6 with slow links out of rank 2"
    )


@exercise
def check_bound(answer: Callable[[Machine, float], float]) -> None:
    """The cut bound of one node without switches, from the rates of its links."""
    for machine in (tasp.machine("mesh4"), *machines(), slow_sender()):
        right, got = tasp.cut_bound(machine, KV_BYTES), answer(machine, KV_BYTES)
        hint = "how many bytes must enter rank r, over all links into it?"
        if machine.name == slow_sender().name:
            hint = "how many bytes must leave a rank at least once, over all links out of it?"
        expect(
            abs(got / right - 1) < ROUND_OFF,
            f"{machine.name}: {right * 1e3:.3f} ms, got {got * 1e3:.3f} ms; {hint}",
        )


def _expect_mean_ratio(planner: Planner, most: float, hint: str) -> None:
    """Fail where a planner's plans are wrong, or their mean ratio on all machines is too large."""
    try:
        ratios = scores(planner)
    except PlanError as error:
        expect(False, str(error).splitlines()[0])
    mean, worst = float(np.mean(ratios)), machines()[int(np.argmax(ratios))]
    expect(
        mean <= most,
        f"all plans are proved; communication takes {mean:.3f} cut bounds on average, at most {most} "
        f"are allowed; it is worst on {worst.name}, {max(ratios):.2f}; {hint}",
    )


@exercise
def check_planner(answer: Planner) -> None:
    """A planner whose plans are right, and which uses all links that can help."""
    hint = "does every link send in a step, where its sender has a share that the receiver lacks?"
    _expect_mean_ratio(answer, ALL_LINKS, hint)


@exercise
def check_patient(answer: Planner) -> None:
    """A planner that does not use slow links."""
    hint = "how slow may a link be that sends, and how many ranks have the share that it sends?"
    _expect_mean_ratio(answer, PATIENT, hint)


def _no_plan(error: BaseException) -> str:
    """Why a planner has no plan, in one line: what is wrong with a step, or what it raised."""
    if isinstance(error, PlanError):
        return str(error).splitlines()[0]
    return f"{raised(error).splitlines()[0]}; correct it, run its cell, then this one"


def against(machine: Machine, planner: Planner) -> Figure:
    """How tasp and a planner load links, and how long both take; tasp alone where there is no plan."""
    lengths = [machine.ranks * TOKENS]
    plan = tasp.plan(lengths, machine.ranks, schedule="tasp", layout="contiguous", machine=machine)
    plans = [("tasp", plan)]
    try:
        plans.append(("my planner", planned(machine, planner)))
    except (Exception, SystemExit) as error:  # the planner is a learner's: it may raise anything
        sys.stdout.write(f"my planner is not drawn: {_no_plan(error)}\n")
    times = [(name, tasp.simulate(p, heads=HEADS, head_dim=HEAD_DIM)) for name, p in plans]
    return visualize.together([visualize.links(plans), visualize.timeline(times)])


@lru_cache
def _rival(name: str) -> list[float]:
    return scores(name)


def board(path: Path = BOARD) -> str:
    """The score board as text: the library's schedules, and the planners that were entered."""
    rows = {name: _rival(name) for name in RIVALS}
    rows |= json.loads(path.read_text())["entries"] if path.is_file() else {}
    lines = [
        "planner              mean   worst  (communication in cut bounds; 1.00 is the least possible)"
    ]
    for name, ratios in sorted(rows.items(), key=lambda row: float(np.mean(row[1]))):
        mean = float(np.mean(ratios))
        lines.append(f"{name[:20]:20} {mean:5.2f}  {max(ratios):5.2f}   {'#' * round(8 * mean)}")
    return "\n".join(lines)


def enter(name: str, planner: Planner, path: Path = BOARD) -> str:
    """Put a planner on the board, if its plans are right; return the board, or why it is not on it."""
    entries = json.loads(path.read_text())["entries"] if path.is_file() else {}
    try:
        entries[name] = scores(planner)
    except (Exception, SystemExit) as error:  # the planner is a learner's: it may raise anything
        return f"{board(path)}\n{name} is not on the board: {_no_plan(error)}"
    write(path, "scoreboard", entries=entries)
    return board(path)


check_recap = recap(
    (0.1, "4 GB must enter rank 3 over 40 GB/s"),
    (10.0, "the step lasts as long as the slower transfer: 60 MB over 6 GB/s"),
    ("no", "1.3 cut bounds / 1.4 would be less than one cut bound"),
    (24, "each rank receives the two shares of three others"),
    (0.5, "1 GB has to leave once"),
)
