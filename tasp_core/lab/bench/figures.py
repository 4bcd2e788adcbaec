"""Figures of one method's passes: samples and predictions under the same names, and what follows from them.

A name is a mode and a direction, as in "whole forward" or "communication backward" (see passes.py). In a
result file a method has {"label", "samples": {name: seconds, ...}, "predicted": {name: seconds}}, and
"predicted" also has "bound forward" and "bound backward", the link or cut bound of the communication.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...costs.simulate import simulate
from ...machines.machine import Machine
from ...planning.plan import Plan

Result = dict[str, Any]  # a part of a result file


def predictions(
    plan: Plan,
    machine: Machine,
    direction: str,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: str = "float32",
) -> dict[str, float | None]:
    """Seconds of one direction that the simulator predicts, by name."""
    timeline = simulate(
        plan,
        machine,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        backward=direction == "backward",
    )
    return {
        f"communication {direction}": timeline.comm_s,
        f"computation {direction}": timeline.compute_s,
        f"whole {direction}": timeline.total_s,
        f"bound {direction}": timeline.bound_s,
    }


def median(method: Result, name: str) -> float:
    """Median of a method's samples of that name; NaN if it was not measured."""
    return float(np.median(method["samples"].get(name, [np.nan])))


def total(method: Result, mode: str) -> float:
    """Median seconds of all directions of a mode together; NaN if it was not measured."""
    samples = [values for name, values in method["samples"].items() if name.startswith(mode)]
    return float(np.median(np.sum(samples, axis=0))) if samples else np.nan


def ccr(method: Result, baseline: Result) -> float:
    """Computation-to-communication ratio: the method's computation over the baseline's communication."""
    return total(method, "computation") / total(baseline, "communication")
