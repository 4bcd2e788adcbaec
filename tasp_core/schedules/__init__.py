"""The schedules, by name. To add one: write a file with a `Schedule` subclass and list it here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import PlanError
from ..machines.machine import Machine
from ..sequence.layouts import Layout
from .double_ring import DoubleRing
from .hops import DKV, DQ, EXCHANGES, KINDS, KV, OUT, Hops, OffloadedPairs, Q
from .paced import Paced, best_pace
from .query_moving import Helper, Mesh, TokenRing
from .ring import Ring, RingSchedule, Tasp, TaspPaths, TaspRails
from .sap.sap import Sap
from .schedule import DeclaredLimits, Schedule, Table
from .trees import Trees, tree_options
from .wave import AllGather, Wave, best_twins

__all__ = [
    "DKV",
    "DQ",
    "EXCHANGES",
    "KINDS",
    "KV",
    "OUT",
    "AllGather",
    "DeclaredLimits",
    "DoubleRing",
    "Hops",
    "OffloadedPairs",
    "Paced",
    "Q",
    "Ring",
    "RingSchedule",
    "Schedule",
    "Table",
    "Tasp",
    "TaspPaths",
    "TaspRails",
    "Trees",
    "Wave",
    "build",
    "schedules",
]

FAMILIES: tuple[type[Schedule], ...] = (
    Ring,
    DoubleRing,
    Tasp,
    TaspPaths,
    TaspRails,
    Wave,
    Paced,
    Trees,
    AllGather,
    Helper,
    TokenRing,
    Mesh,
    Sap,
)
SCHEDULES = {cls.name: cls for cls in FAMILIES}


def schedules() -> dict[str, str]:
    """Names of the schedules with one line each."""
    return {name: str(cls.__doc__) for name, cls in SCHEDULES.items()}


MOST_ARRIVALS = 1 << 18


def _wave_options(machine: Machine, options: Mapping[str, Any]) -> dict[str, Any]:
    """Blocks: n - 1, so that two KV of buffer are enough; twins: what the machine's rates favour.

    Above 512 ranks fewer blocks: a rank's table stays small enough to plan in seconds.
    """
    others = max(1, machine.ranks - 1)
    defaults = {"blocks": min(others, MOST_ARRIVALS // others), "twins": best_twins(machine)}
    return {**defaults, **options}


def _mesh_options(machine: Machine, options: Mapping[str, Any]) -> dict[str, Any]:
    """A row a node, so that queries stay inside; on one node the most even rows x columns."""
    n, u = machine.ranks, machine.num_nodes
    square = min((r for r in range(1, n + 1) if n % r == 0), key=lambda r: abs(r - n // r))
    return {"rows": u if u > 1 else square, **options}


def _paced_options(machine: Machine, options: Mapping[str, Any]) -> dict[str, Any]:
    """What is quickest for 64 MB of KV a rank, unless all is given."""
    if set(options) >= {"blocks", "twins", "nic", "link"} or machine.num_nodes == 1:
        return dict(options)
    return {**best_pace(machine), **options}


OPTIONS = {
    "double_ring": ("exchange", "rings"),
    "wave": ("exchange", "blocks", "twins"),
    "paced": ("exchange", "blocks", "twins", "nic", "link"),
    "trees": ("exchange", "wires", "shares", "steps", "floor"),
    "all_gather": (),
    "mesh": ("exchange", "rows"),
    "sap": ("exchange", "buffer_tokens", "move_q", "relay"),
}
DEFAULTS: dict[str, Callable[[Machine, Mapping[str, Any]], dict[str, Any]]] = {
    "wave": _wave_options,
    "mesh": _mesh_options,
    "paced": _paced_options,
    "trees": lambda machine, options: tree_options(machine, dict(options)),
}


def build(
    name: str,
    machine: Machine,
    options: Mapping[str, Any] | None = None,
    layout: Layout | None = None,
) -> Schedule:
    """The named schedule on a machine, its options resolved; `layout` for those compiled for one.

    Raises:
        PlanError: an unknown name or option, or a machine the schedule cannot serve.

    >>> from tasp_core import machine
    >>> build("wave", machine("mesh8x2")).options
    {'blocks': 15, 'twins': 14}
    """
    if name not in SCHEDULES:
        raise PlanError(f"no schedule {name!r}; known are {', '.join(SCHEDULES)}")
    given = dict(options or {})
    allowed = OPTIONS.get(name, ("exchange",))
    unknown = sorted(set(given) - set(allowed))
    if unknown:
        raise PlanError(
            f"schedule {name!r} has no option {', '.join(unknown)}; "
            f"it takes {', '.join(allowed) or 'none'}"
        )
    resolved = DEFAULTS[name](machine, given) if name in DEFAULTS else given
    if name == "sap" and layout is not None:  # tokens that may not be permuted: move the work
        alone = given.get("exchange", "p2p") == "p2p" and layout.name == "contiguous"
        alone = alone and layout.docs.slices is None
        resolved = {"move_q": alone, **given}
    node_size = machine.ranks if name == "all_gather" else machine.node_size
    if SCHEDULES[name].variable_size:
        resolved = {**resolved, "layout": layout}
        return SCHEDULES[name](machine.ranks, node_size, **resolved)
    schedule = SCHEDULES[name](machine.ranks, node_size, **resolved)
    schedule.limits  # noqa: B018  (a schedule that cannot exist on this machine says so here)
    return schedule
