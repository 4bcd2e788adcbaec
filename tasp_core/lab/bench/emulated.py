"""`fabric bench`: methods in turn on emulated machines, each held against the oracle before it is timed.

Every figure stands beside the cut bound and the simulator's prediction. A sample is the slowest
rank's; before each one all buckets are emptied, so that no byte travels on rate saved up before.
Kernels run on emulated devices (emulation/device.py), or, where a case says nothing of them, on the cores
that all ranks and their messages share.

Some cases may be measured again and put among the others of an earlier result file. A case carries the
time, the environment and the calibrated rates it was measured and predicted with (`stamp`), so that a file
says of each case which run it is of. A case of an earlier file is kept where `cases()` still defines it as
it was then: the same row, machine and methods under the same title.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...costs.simulate import simulate
from ...errors import PlanError
from ...machines.machine import Machine
from ...machines.presets import machine
from ...planning.plan import Plan
from ...result_file import environment, read
from ..emulation.device import Device
from ..emulation.network import Fabric
from ..emulation.wiring import LEAST_BURST, emulated
from .accuracy import Errors, Inputs, Reference, as_dict
from .calibrate import Bench, kernels, messages
from .emulated_cases import Case, cases, judge, table
from .passes import DIRECTIONS, Pass, Samples, in_turn, method_errors, slowest

LENGTHS = (64, 128, 256, 512)  # of calls, in tokens


def drain(group: Any) -> None:
    """Once the last pass is over on all ranks, empty the buckets of all ways between them, and meet."""
    dist.barrier(group=group)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    peers = [(rank + d) % ranks for d in range(1, ranks)]
    filler = torch.zeros(LEAST_BURST * 5 // 4, dtype=torch.uint8)
    works = [dist.irecv(torch.empty_like(filler), p, group=group) for p in peers]
    works += [dist.isend(filler, p, group=group) for p in peers]
    for work in works:
        if work is not None:
            work.wait()
    dist.barrier(group=group)


def _rank(
    rank: int, group: Any, case: Case, plans: list[Plan], inputs: Inputs, oracle: Reference
) -> list[tuple[Errors, Samples]]:
    """Errors of every method and, if all are right, its samples on this rank."""
    kernel = Device(case.tflops) if case.tflops else "auto"
    passes = [Pass(p, rank, group, inputs, lambda: drain(group), kernel=kernel) for p in plans]
    errors = method_errors(passes, oracle)
    if not all(e.ok for e in errors):
        return [(e, {}) for e in errors]
    samples = in_turn(passes, modes=case.modes, backward=case.backward, repeats=case.repeats)
    return list(zip(errors, samples, strict=True))


def predictions(case: Case, plan: Plan, on: Machine) -> dict[str, float | None]:
    """What the simulator says, and the bound, by name of the samples."""
    found: dict[str, float | None] = {}
    for direction in DIRECTIONS[: 1 + case.backward]:
        t = simulate(
            plan,
            on,
            heads=case.heads,
            kv_heads=case.kv_heads,
            head_dim=case.head_dim,
            dtype="float32",
            backward=direction == "backward",
        )
        found |= {
            f"communication {direction}": t.comm_s,
            f"computation {direction}": t.compute_s,
            f"whole {direction}": t.total_s,
            f"bound {direction}": t.bound_s,
        }
    return found


def run_case(case: Case, rates: dict[str, Any]) -> dict[str, Any]:
    """One case's result; `rates` are what calibration found of kernels and messages here."""
    inputs = Inputs.random(case.docs.total, case.heads, case.kv_heads, case.head_dim)
    oracle = Reference(inputs, case.docs, backward=case.backward)
    plans = [method.plan(case.docs, case.on()) for method in case.methods]
    with Fabric(case.on()) as net:
        by_rank = net.launch(_rank, case, plans, inputs, oracle, timeout_s=400.0)
    rows: list[dict[str, Any]] = []
    for i, (method, plan) in enumerate(zip(case.methods, plans, strict=True)):
        errors, samples = by_rank[0][i][0], slowest([r[i][1] for r in by_rank])
        rows.append(
            {
                "label": method.label,
                "schedule": method.schedule,
                "layout": method.layout,
                "options": plan.schedule.options,
                "intra": method.intra,
                "fingerprint": plan.fingerprint(),
                "errors": as_dict(errors),
                "samples": samples,
                "predicted": predictions(case, plan, replace(case.on(), **(rates | case.device()))),
            }
        )
    return {
        "title": str(case),
        "config": case.config(),
        "methods": rows,
        "machine": asdict(case.on()),
        "right": all(r["errors"]["ok"] for r in rows),
    }


def _rates(rank: int, group: Any, heads: int, kv_heads: int) -> tuple[dict[str, Any], Samples]:
    bench = Bench(group, torch.device("cpu"))
    found = messages(bench)
    found |= kernels(bench, heads=heads, kv_heads=kv_heads, lengths=LENGTHS)
    return found, bench.samples


def calibrated(heads: int = 8, kv_heads: int = 8) -> tuple[dict[str, Any], Samples]:
    """Rates of kernels and messages when eight ranks share this machine, and their samples."""
    with Fabric(emulated(machine("mesh8"), link_mbit=50.0)) as net:
        return net.launch(_rates, heads, kv_heads, timeout_s=300.0)[0]


def _measured(
    say: Callable[[str], None], todo: list[Case], rates: dict[str, Any]
) -> dict[str, Row]:
    """Results by title, up to the first wrong one.

    Kernels that share cores are calibrated anew for each case: what cores give changes by the minute.
    """
    results: dict[str, Row] = {}
    for number, case in enumerate(todo):
        say(f"[{number + 1}/{len(todo)}] {case}")
        own: dict[str, Any] = rates
        samples: Samples = {}
        if not case.tflops and "whole" in case.modes:
            own, samples = calibrated(case.heads, case.kv_heads)
        result = results[str(case)] = run_case(case, own) | stamp(own) | {"calibration": samples}
        say(table(result))
        if not result["right"]:
            break
    return results


def bench(
    say: Callable[[str], None],
    *,
    quick: bool = False,
    only: str | None = None,
    earlier: Sequence[Row] = (),
) -> dict[str, Any]:
    """Run all cases; `say` shows each table as it is known.

    With `only`, run those with that text in their title; the others are as in `earlier`, and goals
    are about all of them. The result's own rates and calibration are this run's.
    """
    every = cases(quick=quick)
    todo = every if only is None else chosen(every, only)
    kept = still_defined(every, earlier)
    titles = [row["title"] for row in earlier]
    for title in titles:
        if title not in kept and title not in map(str, todo):
            say(f"dropped, no case is defined so any more: {title}")
    rates, samples = calibrated()
    new = _measured(say, todo, rates)
    found = kept | new
    results = [found[str(case)] for case in every if str(case) in found]
    goals = judge(results)
    say("\n".join(map(str, goals)))
    config: dict[str, Any] = {"quick": quick, "rates": rates}
    if only is not None:
        config |= {
            "only": only,
            "measured": [*new],
            "kept": [t for t in kept if t not in new],
            "dropped": [t for t in titles if t not in found],
        }
    return {
        "right": all(r["right"] for r in results),
        "config": config,
        "calibration": samples,
        "cases": results,
        "goals": [g._asdict() for g in goals],
    }


Row = dict[str, Any]


def stamp(rates: dict[str, Any]) -> Row:
    """When, where and with which calibrated rates a case is measured."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"measured_at": now, "environment": environment(), "rates": rates}


def chosen(every: list[Case], text: str) -> list[Case]:
    """The cases whose title has `text` in it, in capitals or not.

    Raises:
        PlanError: there is none; the groups that titles start with are named.
    """
    found = [case for case in every if text.lower() in str(case).lower()]
    if not found:
        groups = ", ".join(f"{group}:" for group in dict.fromkeys(case.group for case in every))
        raise PlanError(
            f"no case has {text!r} in its title; titles start with {groups} a whole one is "
            f"{str(every[0])!r}"
        )
    return found


def earlier_cases(path: Path, *, quick: bool) -> list[Row]:
    """The cases of a result file, stamped; none where there is no file yet.

    Files from before cases had stamps were measured in one run: its environment and rates are theirs.

    Raises:
        PlanError: no result file of `fabric bench`, or one of other cases (quick ones or all).
    """
    if not path.exists():
        return []
    data = read(path, "fabric")
    try:
        was_quick = data["config"]["quick"]
        run = {
            "measured_at": None,
            "environment": data["environment"],
            "rates": data["config"]["rates"],
        }
        found = [run | case for case in data["cases"]]
    except (KeyError, TypeError) as error:
        raise PlanError(f"{path} is not a whole result file: {error!r}") from None
    if was_quick != quick:
        kinds = ("all cases", "the quick cases")
        raise PlanError(f"{path} is of {kinds[was_quick]}, asked was for some of {kinds[quick]}")
    return found


def still_defined(every: list[Case], earlier: Iterable[Row]) -> dict[str, Row]:
    """Those of earlier cases that are defined now as they were then, by title."""
    now = {str(case): json.loads(json.dumps(case.config())) for case in every}
    return {row["title"]: row for row in earlier if now.get(row["title"]) == row["config"]}
