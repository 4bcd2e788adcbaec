"""A plan's recipe: the few values that, with its documents, rebuild it; for JSON and fingerprints."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .errors import PlanError, whole
from .layout import Layout
from .schedules import Promise, Schedule, Table, build
from .topology import MESH, Machine
from .topology import machine as find_machine

if TYPE_CHECKING:
    from .plan import Plan


def recipe(plan: Plan) -> dict[str, Any]:
    """Groups, layout and schedule of a plan as plain values; "ranks" counts groups of `intra` ranks."""
    schedule = plan.schedule
    data: dict[str, Any] = {
        "ranks": plan.layout.ranks,
        "intra": plan.intra,
        "layout": plan.layout.name,
        "schedule": schedule.name,
        "node_size": schedule.node_size,
        "options": schedule.options,
    }
    if isinstance(schedule, Table):
        data |= {"hops": list(schedule.words), "num_shares": schedule.shares}
        data["promise"] = list(schedule.claim)
        if schedule.like is not None:
            data["like"] = {"schedule": schedule.like.name, "options": schedule.like.options}
    return data


def read_schedule(data: dict[str, Any], machine: Machine, layout: Layout) -> Schedule:
    """The schedule of a recipe.

    Raises:
        PlanError: values that contradict each other; KeyError, TypeError: missing or wrong ones.
    """
    if data["schedule"] == Table.name:
        like = data.get("like")
        return Table(
            machine.ranks, data["node_size"], data["options"].get("exchange", "p2p"),
            tuple(data["hops"]), whole(data["num_shares"], "num_shares", 1, PlanError),
            Promise(*data["promise"]),
            like and build(like["schedule"], machine, like["options"], layout),
        )  # fmt: skip
    schedule = build(data["schedule"], machine, data["options"], layout)
    if schedule.node_size != data["node_size"]:
        raise PlanError(f"node_size is {data['node_size']}, the machine's is {schedule.node_size}")
    return schedule


def resolve_machine(machine: Machine | str | None, ranks: int) -> Machine:
    """A machine of `ranks` ranks: the given one, a named one, or one full mesh.

    Raises:
        PlanError: it has another number of ranks.
    """
    if machine is None:
        return replace(MESH, name=f"mesh{ranks}", node_size=ranks)
    found = machine if isinstance(machine, Machine) else find_machine(machine)
    if found.ranks != ranks:
        raise PlanError(
            f"machine {found.name!r} has {found.ranks} ranks ({found.num_nodes} nodes of "
            f"{found.node_size}), the plan is for {ranks}; give a machine with {ranks} ranks"
        )
    return found


def between_groups(machine: Machine, intra: int) -> Machine:
    """The machine of which each group of `intra` node mates is one rank.

    Raises:
        PlanError: groups that do not fit into nodes; names the degrees that do.
    """
    m = machine.node_size
    if intra == 1:
        return machine
    if m % intra:
        fit = ", ".join(str(a) for a in range(1, m + 1) if m % a == 0)
        raise PlanError(
            f"intra={intra} does not divide the {m} ranks of a node of {machine.name!r}; use one of {fit}"
        )
    name = f"{machine.name}/{intra}"
    if machine.plain:
        return replace(machine, name=name, node_size=m // intra)
    # members of a group work side by side: the slowest one's link or NIC is their group's
    slowest: dict[str, float] = {}
    for resource, gbps in machine.overrides:
        group = re.sub(r"\d+", lambda r: str(int(r[0]) // intra), resource)
        ends = set(re.findall(r"\d+", group))
        if not resource.startswith("bus") and len(ends) > resource.startswith("link"):
            slowest[group] = min(gbps, slowest.get(group, gbps))
    nic_gbps = machine.nic_gbps * (machine.nics or m) / m
    return replace(
        machine, name=name, node_size=m // intra, nic_gbps=nic_gbps, nics=0, buses=(),
        overrides=tuple(slowest.items()),
    )  # fmt: skip
