"""TASP: sequence-parallel attention as data. `import tasp_core as tasp`; see README.md.

Importing this package, and planning, imports no tensor library.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .costs.explain import Explanation, explain
from .costs.select import Choice, select
from .costs.simulate import Timeline, simulate
from .errors import LayoutError, PlanError, TopologyError, TransportError
from .lowering.lower import lower
from .lowering.program import Program
from .machines.bounds import cut_bound
from .machines.machine import Bus, Machine
from .machines.presets import machine
from .planner import plan, supports
from .planning.check import Report, check
from .planning.plan import Plan
from .runtime.attention import attention
from .runtime.launch import RankError, launch
from .schedules import schedules
from .schedules.hamiltonian import Rings, decompose
from .sequence.documents import Documents
from .sequence.layouts import layouts

__version__ = "0.1.0"

# functions on tensors: their modules need torch, so they are imported at first use
_TENSOR_NAMES = {
    "shard": "runtime.sharding",
    "shard_batch": "runtime.sharding",
    "unshard": "runtime.sharding",
    "gather": "runtime.sharding",
    "roll": "runtime.sharding",
    "next_token_labels": "runtime.loss",
    "token_loss": "runtime.loss",
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
