"""`fabric bench`: methods in turn on emulated machines, compared with the reference before they are timed.

Every figure stands beside the cut bound and the simulator's prediction. A sample is the slowest rank's.
Before each sample all token buckets are emptied, so that no message uses rate that was saved up before it.
Kernels run on emulated devices (emulation/device.py), or, where a case has none, on the cores that all
ranks and their messages share.

With `only`, some cases are measured and put among the others of an earlier result file. A case of that file
is kept if `cases()` still defines it as it was. Every case has the time, the environment and the calibrated
rates that it was measured and predicted with, so that a file says for each case which run it comes from.
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

from ...errors import PlanError
from ...machines.presets import machine
from ...planning.plan import Plan
from ...result_file import environment, read
from ..emulation.device import Device
from ..emulation.network import Fabric
from ..emulation.wiring import LEAST_BURST, emulated
from .accuracy import Errors, Inputs, Reference, as_dict
from .calibrate import Bench, kernels, messages
from .emulated_cases import Case, cases, goals_of, table
from .figures import Result, predictions
from .passes import DIRECTIONS, Pass, Samples, in_turn, method_errors, slowest

LENGTHS = (64, 128, 256, 512)  # of calibrated kernel calls, in tokens


def bench(
    say: Callable[[str], None],
    *,
    quick: bool = False,
    only: str | None = None,
    earlier: Sequence[Result] = (),
) -> Result:
    """Run all cases, up to the first wrong one; `say` shows each table as it is known.

    With `only`, run those with that text in their title; the others are as in `earlier`, and goals
    are about all of them. The result's own rates and calibration are this run's.
    """
    all_cases = cases(quick=quick)
    todo = all_cases if only is None else chosen(all_cases, only)
    kept = still_defined(all_cases, earlier)
    titles = [case["title"] for case in earlier]
    for title in titles:
        if title not in kept and title not in map(str, todo):
            say(f"dropped, no case is defined so any more: {title}")
    rates, samples = calibrated()
    new = _measured(say, todo, rates)
    merged = kept | new
    results = [merged[str(case)] for case in all_cases if str(case) in merged]
    goals = goals_of(results)
    say("\n".join(map(str, goals)))
    config: dict[str, Any] = {"quick": quick, "rates": rates}
    if only is not None:
        config |= {
            "only": only,
            "measured": [*new],
            "kept": [title for title in kept if title not in new],
            "dropped": [title for title in titles if title not in merged],
        }
    return {
        "right": all(result["right"] for result in results),
        "config": config,
        "calibration": samples,
        "cases": results,
        "goals": [goal._asdict() for goal in goals],
    }


def chosen(all_cases: list[Case], text: str) -> list[Case]:
    """The cases whose title has `text` in it, in capitals or not.

    Raises:
        PlanError: there is none; the groups that titles start with are named.
    """
    matching = [case for case in all_cases if text.lower() in str(case).lower()]
    if not matching:
        groups = ", ".join(f"{group}:" for group in dict.fromkeys(case.group for case in all_cases))
        raise PlanError(
            f"no case has {text!r} in its title; titles start with {groups} an example is "
            f"{str(all_cases[0])!r}"
        )
    return matching


def earlier_cases(path: Path, *, quick: bool) -> list[Result]:
    """The cases of a result file; none where there is no file yet.

    A case without a time, environment and rates of its own was measured in the file's one run, and gets
    that run's.

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
        results = [run | case for case in data["cases"]]
    except (KeyError, TypeError) as error:
        raise PlanError(f"{path} is not a whole result file: {error!r}") from None
    if was_quick != quick:
        kinds = ("all cases", "the quick cases")
        raise PlanError(f"{path} is of {kinds[was_quick]}, asked was for some of {kinds[quick]}")
    return results


def still_defined(all_cases: list[Case], earlier: Iterable[Result]) -> dict[str, Result]:
    """Those of earlier cases that are defined now as they were then, by title."""
    now = {str(case): json.loads(json.dumps(case.config())) for case in all_cases}
    return {case["title"]: case for case in earlier if now.get(case["title"]) == case["config"]}


def calibrated(heads: int = 8, kv_heads: int = 8) -> tuple[dict[str, Any], Samples]:
    """Rates of kernels and messages when eight ranks share this machine, and their samples."""
    with Fabric(emulated(machine("mesh8"), link_mbit=50.0)) as net:
        return net.launch(_rates, heads, kv_heads, timeout_s=300.0)[0]


def _rates(rank: int, group: Any, heads: int, kv_heads: int) -> tuple[dict[str, Any], Samples]:
    bench = Bench(group, torch.device("cpu"))
    rates = messages(bench) | kernels(bench, heads=heads, kv_heads=kv_heads, lengths=LENGTHS)
    return rates, bench.samples


def _measured(
    say: Callable[[str], None], todo: list[Case], rates: dict[str, Any]
) -> dict[str, Result]:
    """Results by title, up to the first wrong one.

    Kernels that share cores are calibrated again for each case: what cores give changes by the minute.
    """
    results: dict[str, Result] = {}
    for number, case in enumerate(todo):
        say(f"[{number + 1}/{len(todo)}] {case}")
        samples: Samples = {}
        case_rates = rates
        if not case.tflops and "whole" in case.modes:
            case_rates, samples = calibrated(case.heads, case.kv_heads)
        result = results[str(case)] = run_case(case, case_rates) | {
            "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "environment": environment(),
            "rates": case_rates,
            "calibration": samples,
        }
        say(table(result))
        if not result["right"]:
            break
    return results


def run_case(case: Case, rates: dict[str, Any]) -> Result:
    """One case's result.

    Args:
        rates: fields of a Machine, which calibration measured here.
    """
    inputs = Inputs.random(case.docs.total, case.heads, case.kv_heads, case.head_dim)
    reference = Reference(inputs, case.docs, backward=case.backward)
    on = case.on()
    simulated = replace(on, **(rates | case.device()))
    plans = [method.plan(case.docs, simulated) for method in case.methods]
    with Fabric(on) as net:
        by_rank = net.launch(_rank, case, plans, inputs, reference, timeout_s=400.0)
    sizes: dict[str, Any] = {
        "heads": case.heads,
        "kv_heads": case.kv_heads,
        "head_dim": case.head_dim,
    }
    methods: list[Result] = []
    for i, (method, plan) in enumerate(zip(case.methods, plans, strict=True)):
        predicted: dict[str, float | None] = {}
        for direction in DIRECTIONS[: 1 + case.backward]:
            predicted |= predictions(plan, simulated, direction, **sizes)
        methods.append(
            {
                "label": method.label,
                "schedule": method.schedule,
                "layout": method.layout,
                "options": plan.schedule.options,
                "intra": method.intra,
                "fingerprint": plan.fingerprint(),
                "errors": as_dict(by_rank[0][i][0]),
                "samples": slowest([results[i][1] for results in by_rank]),
                "predicted": predicted,
            }
        )
    return {
        "title": str(case),
        "config": case.config(),
        "methods": methods,
        "machine": asdict(on),
        "right": all(method["errors"]["ok"] for method in methods),
    }


def _rank(
    rank: int, group: Any, case: Case, plans: list[Plan], inputs: Inputs, reference: Reference
) -> list[tuple[Errors, Samples]]:
    """Errors of every method and, if all are right, its samples on this rank."""
    kernel = Device(case.tflops) if case.tflops else "auto"
    passes = [Pass(p, rank, group, inputs, lambda: drain(group), kernel=kernel) for p in plans]
    errors = method_errors(passes, reference)
    if not all(e.ok for e in errors):
        return [(e, {}) for e in errors]
    samples = in_turn(passes, modes=case.modes, backward=case.backward, repeats=case.repeats)
    return list(zip(errors, samples, strict=True))


def drain(group: Any) -> None:
    """Once the last pass is over on all ranks, empty the token buckets of all links between them.

    All ranks return together.
    """
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
