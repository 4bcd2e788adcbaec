"""Machines: ranks, what connects them, and how much each connection carries.

    topology(machine("h100x2")) -> Figure

A box is a node. Inside, lines are links between pairs of ranks (full mesh), or lead to a switch that
all ranks share; between nodes every rank has a NIC. Nodes beyond MOST_NODES are counted, not drawn.
"""

from __future__ import annotations

from dataclasses import replace

from tasp_core import Machine, cut_bound

from .colours import INK, SOFT
from .figure import Figure, few_enough
from .marks import Drawing, Marks, beside, line, number, rect, stack, text
from .stage import Stage, discs, stage
from .timeline import seconds

MOST_NODES, GAP = 4, 24.0
LINK, NIC = "#8FA9BF", "#D55E00"


def _inside(machine: Machine, s: Stage) -> Marks:
    """Links of a node: between all pairs, or to a switch."""
    marks, n = [], len(s.places)
    if machine.link_gbps:
        pairs = ((a, b) for i, a in enumerate(s.places) for b in s.places[i + 1 :])
        marks += [line(a, b, stroke=LINK, width=1.2) for a, b in pairs]
    if machine.port_gbps:
        marks += [line(p, s.centre, stroke=SOFT, width=2.5) for p in s.places if n > 1]
        marks.append(rect(s.centre - (34 + 13j), 68 + 26j, fill="#FFFFFF", stroke=INK, width=1.5))
        marks.append(text(s.centre, "switch", size=13))
    return marks


def _node(machine: Machine, node: int, side: float) -> Drawing:
    """One node in its box, its NICs below."""
    s = stage(replace(machine, num_nodes=1), side)
    first, marks = node * machine.node_size, []
    if machine.num_nodes > 1:
        marks.append(rect(0j, complex(side, side), fill="#F2F2F2", stroke="#A8A8A8", name="node"))
        marks.append(text(complex(10, 16), f"node {node}", size=13, anchor="start", bold=True))
        foot = complex(side / 2, side)
        marks.append(line(foot, foot + 46j, stroke=NIC, width=5))
        words = f"{machine.node_size} NICs" if machine.node_size > 1 else "NIC"
        marks.append(text(foot + 10 + 24j, words, size=13, anchor="start", fill=NIC))
    return Drawing(
        side,
        side + 46 * (machine.num_nodes > 1),
        marks + _inside(machine, s) + discs(s, first=first),
    )


def _network(machine: Machine, wide: float, shown: int) -> Drawing:
    """What joins the nodes."""
    words = f"network between nodes: {number(machine.nic_gbps)} GB/s out of, and into, each NIC"
    more = machine.num_nodes - shown
    if more:
        words += f"; {more} more node{'s' * (more > 1)} like these"
    bar = rect(0j, complex(wide, 34), fill="#FBEEE6", stroke=NIC, width=1.5)
    return Drawing(wide, 34, [bar, text(complex(wide / 2, 17), words)])


def facts(machine: Machine) -> list[str]:
    """The machine in words."""
    m, u = machine.node_size, machine.num_nodes
    rows = [f"{machine.ranks} ranks" + (f": {u} nodes of {m}" if u > 1 else "")]
    if machine.link_gbps and m > 1:
        each = f"{m * (m - 1)} links{' a node' * (u > 1)}, one for each ordered pair"
        rows.append(f"{each}: {number(machine.link_gbps)} GB/s each")
    if machine.port_gbps:
        rows.append(f"each rank's port: {number(machine.port_gbps)} GB/s out, and as much in")
    if u > 1:
        rows.append(f"each rank's NIC: {number(machine.nic_gbps)} GB/s out, and as much in")
    rows.append(f"a step costs {seconds(machine.latency_s)} besides its bytes")
    bound = seconds(cut_bound(machine, 1e9))
    rows.append(f"1 GB of KV a rank cannot reach all others in less than {bound}")
    return [*rows, f"source: {machine.source}"] if machine.source else rows


def topology(machine: Machine) -> Figure:
    """Draw a machine: ranks, links, switches, NICs and their capacities.

    Raises:
        ValueError: more ranks a node than can be drawn.

    >>> from tasp_core import machine
    >>> topology(machine("h100x2")).title
    'h100x2 has 16 ranks: 2 nodes of 8'
    """
    few_enough(machine.node_size)
    shown = min(machine.num_nodes, MOST_NODES)
    side = 260.0 if shown > 1 else 420.0
    said = facts(machine)
    parts: Marks = []
    drawn = [_node(machine, node, side) for node in range(shown)]
    wide = shown * side + (shown - 1) * GAP
    for i, d in enumerate(drawn):
        parts += [mark.moved(i * (side + GAP)) for mark in d.marks]
    body = [Drawing(wide, drawn[0].height, parts)]
    if machine.num_nodes > 1:
        body.append(_network(machine, wide, shown))
    top = 14.0 if machine.num_nodes > 1 else side / 2 - 11 * len(said)
    lines = [text(complex(0, top + 22 * i), s, anchor="start") for i, s in enumerate(said[1:])]
    listed = Drawing(460, top + 22 * len(lines), lines)
    graph = stack(body)
    whole = stack([graph, listed]) if machine.num_nodes > 1 else beside([graph, listed], gap=40)
    note = "A circle is a rank (one device). GB/s count one direction."
    title = f"{machine.name} has {said[0]}"
    return Figure(title, (note,), f"{title}. {'; '.join(said[1:])}.", whole)
