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

from .uneven import HEAD_DIM, HEADS, KV_BYTES, TOKENS, Planner, machines, planned, ratio, scores
from .verdict import exercise, expect, raised, recap

__all__ = ["KV_BYTES", "machines", "planned", "ratio", "scores"]

BOARD = Path(__file__).resolve().parents[2] / "results" / "scoreboard.json"
RIVALS = ("ring", "tasp")
ROUND_OFF = 1e-6
ALL_LINKS, PATIENT = 4.5, 2.2  # the most, in cut bounds on average, for exercises 2 and 3


def quiet() -> Machine:
    """A machine one rank of which can hardly send."""
    mesh = tasp.machine("mesh6")
    return mesh.degraded({f"link 2>{b}": 2.0 for b in range(6) if b != 2}, "mesh6, rank 2 whispers")


@exercise
def check_bound(answer: Callable[[Machine, float], float]) -> None:
    """The cut bound of one node without switches, from the rates of its links."""
    for machine in (tasp.machine("mesh4"), *machines(), quiet()):
        right, got = tasp.cut_bound(machine, KV_BYTES), answer(machine, KV_BYTES)
        hint = "what must come into rank r, over all links into it?"
        if machine.name == quiet().name:
            hint = "what must leave a rank at least once, over all links out of it?"
        expect(
            abs(got / right - 1) < ROUND_OFF,
            f"{machine.name}: {right * 1e3:.3f} ms, got {got * 1e3:.3f} ms; {hint}",
        )


def _hold(planner: Planner, most: float, hint: str) -> None:
    """Hold a planner to its mean ratio on all machines."""
    try:
        found = scores(planner)
    except PlanError as error:
        expect(False, str(error).splitlines()[0])
    mean, worst = float(np.mean(found)), machines()[int(np.argmax(found))]
    expect(
        mean <= most,
        f"all plans are proved; communication takes {mean:.3f} cut bounds on average, at most {most} "
        f"is asked for; it is worst on {worst.name}, {max(found):.2f}; {hint}",
    )


@exercise
def check_planner(answer: Planner) -> None:
    """A planner whose plans are right, and which uses what links there are."""
    _hold(answer, ALL_LINKS, "does every link send in a step, where its sender has something new?")


@exercise
def check_patient(answer: Planner) -> None:
    """A planner that leaves slow links alone."""
    hint = "from which ratio to the fastest on does a link send, and how rare is what it sends?"
    _hold(answer, PATIENT, hint)


def _no_plan(error: BaseException) -> str:
    """Why a planner has no plan, in one line: what is wrong with a step, or what it raised itself."""
    if isinstance(error, PlanError):
        return str(error).splitlines()[0]
    return f"{raised(error).splitlines()[0]}; mend it, run its cell, then this one"


def against(machine: Machine, planner: Planner) -> Figure:
    """How tasp and a planner load links, and how long both take; tasp alone where there is no plan."""
    row = [machine.ranks * TOKENS]
    plan = tasp.plan(row, machine.ranks, schedule="tasp", layout="contiguous", machine=machine)
    plans = [("tasp", plan)]
    try:
        plans.append(("my planner", planned(machine, planner)))
    except (Exception, SystemExit) as error:  # the planner is a learner's: anything may come
        sys.stdout.write(f"my planner is not drawn: {_no_plan(error)}\n")
    times = [(name, tasp.simulate(p, heads=HEADS, head_dim=HEAD_DIM)) for name, p in plans]
    return visualize.together([visualize.links(plans), visualize.timeline(times)])


@lru_cache
def _rival(name: str) -> list[float]:
    return scores(name)


def board(path: Path = BOARD) -> str:
    """The score board as text: the library's schedules, and who has entered."""
    rows = {name: _rival(name) for name in RIVALS}
    rows |= json.loads(path.read_text())["entries"] if path.is_file() else {}
    lines = ["planner              mean   worst  (communication in cut bounds, 1.00 is the least)"]
    for name, found in sorted(rows.items(), key=lambda row: float(np.mean(row[1]))):
        mean = float(np.mean(found))
        lines.append(f"{name[:20]:20} {mean:5.2f}  {max(found):5.2f}   {'#' * round(8 * mean)}")
    return "\n".join(lines)


def enter(name: str, planner: Planner, path: Path = BOARD) -> str:
    """Put a planner on the board, if its plans are right; the board, and else why it is not on it."""
    entries = json.loads(path.read_text())["entries"] if path.is_file() else {}
    try:
        entries[name] = scores(planner)
    except (Exception, SystemExit) as error:  # the planner is a learner's: anything may come
        return f"{board(path)}\n{name} is not on the board: {_no_plan(error)}"
    write(path, "scoreboard", entries=entries)
    return board(path)


check_recap = recap(
    (0.1, "4 GB must come in over 40 GB/s"),
    (10.0, "the slower transfer: 60 MB over 6 GB/s"),
    ("no", "1.3 bounds / 1.4 would be less than one bound"),
    (24, "each rank needs the two pieces of three others"),
    (0.5, "1 GB has to leave once"),
)
