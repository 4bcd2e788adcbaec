"""TASP: sequence-parallel attention as data. `import tasp_core as tasp`; see README.md.

Importing this package, and planning, imports no tensor library.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .attention import attention
from .check import check
from .documents import Documents
from .errors import LayoutError, PlanError, TopologyError, TransportError
from .explain import Explanation, explain
from .launch import RankError, launch
from .layout import layouts
from .lower import lower
from .plan import Plan, plan
from .program import Program
from .report import Report
from .rings import Rings, decompose
from .schedules import schedules
from .select import Choice, select
from .simulate import Timeline, simulate
from .support import supports
from .topology import Bus, Machine, cut_bound, machine

__version__ = "0.1.0"

# functions on tensors: their modules need torch, so they are imported at first use
_TENSOR_NAMES = {
    "shard": "tensors",
    "shard_batch": "tensors",
    "unshard": "tensors",
    "gather": "tensors",
    "roll": "tensors",
    "next_token_labels": "loss",
    "token_loss": "loss",
}

__all__ = [
    "Bus",
    "Choice",
    "Documents",
    "Explanation",
    "LayoutError",
    "Machine",
    "Plan",
    "PlanError",
    "Program",
    "RankError",
    "Report",
    "Rings",
    "Timeline",
    "TopologyError",
    "TransportError",
    "attention",
    "check",
    "cut_bound",
    "decompose",
    "explain",
    "launch",
    "layouts",
    "lower",
    "machine",
    "plan",
    "schedules",
    "select",
    "simulate",
    "supports",
    *_TENSOR_NAMES,
]


def __getattr__(name: str) -> Any:
    if name in _TENSOR_NAMES:
        import_module(".torch_required", __name__)
        return getattr(import_module(f".{_TENSOR_NAMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
