"""Machines: ranks, what connects them, and how much each connection carries.

    topology(machine("h100x2")) -> Figure

A box is a node. A line between two ranks is a link between these two only; a line to the middle is a
rank's port to the switch, or its route to the host. NICs join nodes. The first MOST_NODES nodes are
drawn. Resources whose capacity differs from the rule (slow or dead ones) are dashed and listed.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tasp_core import Machine, cut_bound
from tasp_core.machines.presets import as_machine

from .colours import ACCENT, INK, SOFT
from .figure import Figure, few_enough
from .marks import Drawing, Marks, beside, fit, grid, line, number, rect, span, stack, text
from .stage import Stage, discs, nodes_of, stage
from .timeline import seconds

MOST_NODES, GAP, LINK, LISTED = 4, 24.0, "#8FA9BF", 6


def _links(machine: Machine, s: Stage, peers: range) -> Marks:
    """A line for each pair of ranks with a link between them, in either direction."""
    marks, changed = [], dict(machine.overrides)
    least = min((r for name, r in machine.overrides if r and name[0] == "l"), default=1.0)
    for a in peers:
        for b in range(a + 1, peers.stop):
            names = (f"link {a}>{b}", f"link {b}>{a}")
            rates = [changed.get(name, machine.link_gbps) for name in names]
            odd = any(name in changed for name in names) and machine.link_gbps > 0
            if any(rates) or odd:
                tip = f"{a} and {b}: {span(min(rates), max(rates))} GB/s"
                wide = 1.2 if machine.link_gbps else min(4.0, 1.2 * max(rates) / least)
                look = (ACCENT, 2.0, "4 4") if odd else (LINK, wide, "")
                ends = (s.places[a - peers.start], s.places[b - peers.start])
                marks.append(line(*ends, stroke=look[0], width=look[1], dash=look[2], tip=tip))
    return marks


def _middle(machine: Machine, s: Stage) -> Marks:
    """What joins all ranks of a node: a switch, or the hosts."""
    words = [w for w, rate in (("switch", machine.port_gbps), ("hosts", machine.host_gbps)) if rate]
    if not words or len(s.places) < 2:
        return []
    marks = [line(p, s.centre, stroke=SOFT, width=2.5) for p in s.places]
    label = " / ".join(words)
    half = complex(10 + 4 * len(label), 13)
    marks.append(rect(s.centre - half, 2 * half, fill="#FFFFFF", stroke=INK, width=1.5))
    return [*marks, text(s.centre, label, size=13)]


def _node(machine: Machine, number: int, peers: range, side: float, many: bool) -> Drawing:
    """One node in its box, its NICs below."""
    s, marks = stage((peers,), side), []
    if many:
        marks.append(rect(0j, complex(side, side), fill="#F2F2F2", stroke="#A8A8A8", name="node"))
        marks.append(text(complex(10, 16), f"node {number}", size=13, anchor="start", bold=True))
        foot, nics = complex(side / 2, side), machine.nics or len(peers)
        marks.append(line(foot, foot + 46j, stroke=ACCENT, width=5))
        words = f"{nics} NIC{'s' * (nics > 1)}"
        marks.append(text(foot + 10 + 24j, words, size=13, anchor="start"))
    marks += _links(machine, s, peers) + _middle(machine, s) + discs(s)
    return Drawing(side, side + 46 * many, marks)


def _network(machine: Machine, wide: float, more: int) -> Drawing:
    """What joins the nodes."""
    words = f"network between nodes: {number(machine.nic_gbps)} GB/s per NIC and direction"
    words += f"; {more} more node{'s' * (more > 1)}" if more else ""
    bar = rect(0j, complex(wide, 34), fill="#FBEEE6", stroke=ACCENT, width=1.5)
    return Drawing(wide, 34, [bar, text(complex(wide / 2, 17), fit(words, wide))])


def _title(machine: Machine, nodes: tuple[range, ...]) -> str:
    sizes = sorted({len(peers) for peers in nodes})
    each = " and ".join(map(str, sizes))
    where = f": {len(nodes)} nodes of {each}" if len(nodes) > 1 else ""
    return f"{machine.name} has {machine.ranks} rank{'s' * (machine.ranks > 1)}{where}"


def facts(machine: Machine, nodes: tuple[range, ...]) -> list[str]:
    """The machine's capacities in words."""
    m, rows = max(map(len, nodes)), []
    if machine.link_gbps and m > 1:
        rows.append(
            f"each ordered pair of ranks of a node has a link of {number(machine.link_gbps)} GB/s"
        )
    for rate, what in (
        (machine.port_gbps, "port to the switch"),
        (machine.host_gbps, "route to its host"),
    ):
        if rate:
            rows.append(f"each rank's {what}: {number(rate)} GB/s per direction")
    rows += [
        f"through the hosts, from ranks {_few(b.src)} to ranks {_few(b.dst)}: "
        f"{number(b.gbps)} GB/s shared by all"
        for b in machine.buses
    ]
    if len(nodes) > 1:
        nics = f"each of {machine.nics} NICs per node" if machine.nics else "each rank's NIC"
        rows.append(f"{nics}: {number(machine.nic_gbps)} GB/s per direction")
    rows += _overrides(machine)
    rows.append(f"a step costs {seconds(machine.latency_s)} besides its bytes")
    if machine.ranks > 1:
        bound = seconds(cut_bound(machine, 1e9))
        rows.append(f"cut bound: 1 GB of KV per rank needs at least {bound} to reach all ranks")
    return [*rows, f"source: {machine.source}"] if machine.source else rows


def _overrides(machine: Machine) -> list[str]:
    """Resources that differ from the rule: a few by name, many as counts by capacity."""
    changed = machine.overrides
    if len(changed) <= LISTED:
        return [
            f"{name}: {number(rate)} GB/s" if rate else f"{name}: dead" for name, rate in changed
        ]
    kinds = Counter((name.partition(" ")[0], rate) for name, rate in changed)
    return [
        f"{count} {kind}s of {number(rate)} GB/s" if rate else f"{count} {kind}s are dead"
        for (kind, rate), count in sorted(kinds.items())
    ]


def _few(ranks: tuple[int, ...]) -> str:
    """Ranks as a list, or as a range where they follow each other."""
    run = ranks == tuple(range(ranks[0], ranks[-1] + 1))
    return f"{ranks[0]}..{ranks[-1]}" if run and len(ranks) > 2 else ", ".join(map(str, ranks))


def topology(machine: Machine | str | Path) -> Figure:
    """Draw a machine: ranks, links, switches, hosts, NICs and their capacities.

    Args:
        machine: a Machine, or a name or path as for `tasp_core.machine`.

    Raises:
        TopologyError: no machine of this name.
        ValueError: more ranks per node than can be drawn.

    >>> topology("h100x2").title
    'h100x2 has 16 ranks: 2 nodes of 8'
    """
    machine = as_machine(machine)
    nodes = nodes_of(machine)
    few_enough(max(map(len, nodes)))
    shown, many, title = nodes[:MOST_NODES], len(nodes) > 1, _title(machine, nodes)
    side, said = 260.0 if many else 420.0, facts(machine, nodes)
    drawn = [_node(machine, k, peers, side, many) for k, peers in enumerate(shown)]
    graph = grid(drawn, MOST_NODES, gap=GAP)
    if many:
        graph = stack([graph, _network(machine, graph.width, len(nodes) - len(shown))])
    top = 24.0 if many else max(20.0, side / 2 - 11 * len(said))
    lines = [text(complex(0, top + 22 * i), s, anchor="start") for i, s in enumerate(said)]
    wide = 0.56 * 14 * max(map(len, said))
    listed = Drawing(wide, top + 22 * len(lines), lines)
    whole = stack([graph, listed]) if many else beside([graph, listed], gap=40)
    note = "A circle is a rank (one device). GB/s are per direction."
    return Figure(title, (note,), f"{title}. {'; '.join(said)}.", whole)
