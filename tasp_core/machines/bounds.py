"""The cut bound: no schedule is faster, whatever it sends by which route.

A set of ranks needs at least the bytes that must enter it, over the bytes per second that can. The bound is
that of the slowest set. (For all-gathers ForestColl, Zhao et al. 2024, proves that it can be reached.)

    cuts(machine)             the sets that the bounds look at, with the GB/s that can enter each
    tightest_cuts(machine)    by maximum flow (networkx): no set of ranks at all is slower than the last one

Maximum flow takes seconds for tens of ranks, and machines may have 1,024. So `cuts` tries single ranks
and nodes. Where ranks differ it also tries the ranks at either end of a bus, the complement of each of
these sets and, up to MOST_FLOW_RANKS ranks, what the maximum flow finds. Where all ranks are equal, the
maximum flow finds nothing tighter: tests/test_bounds.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from math import fsum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .machine import Machine
from .presets import as_machine

if TYPE_CHECKING:
    import networkx

MOST_FLOW_RANKS = 16  # ranks of a machine whose cuts are searched by maximum flow: 0.3 s


class Cut(NamedTuple):
    """A set of ranks, and the GB/s that can enter it."""

    inside: tuple[int, ...]
    gbps: float


def into_gbps(machine: Machine, inside: range | list[int]) -> float:
    """GB/s that can enter a set of ranks, by the cheapest resources that all transfers into it pass.

    For each kind of route one of its kinds of resources is cut; all choices are tried.

    >>> from tasp_core import machine
    >>> into_gbps(machine("mesh4x2"), [0]), into_gbps(machine("mesh4x2"), [0, 1, 2, 3])
    (242.89999999999998, 200.0)
    """
    members = set(inside)
    used_by_kind: dict[tuple[str, ...], list[set[str]]] = {}
    for src in range(machine.ranks):
        for dst in inside if src not in members else ():
            route = machine.resources(src, dst)
            kinds = tuple(name.rpartition(" ")[0] for name in route)
            columns = used_by_kind.setdefault(kinds, [set() for _ in route])
            for used, name in zip(columns, route, strict=True):
                used.add(name)
    choices = (set().union(*choice) for choice in product(*used_by_kind.values()))
    return min(fsum(map(machine.capacity_gbps, choice)) for choice in choices)


def _tried_sets(machine: Machine) -> Iterator[list[int]]:
    """The sets of ranks tried without a search; where all ranks are alike, one set of each kind."""
    n = machine.ranks
    ranks = range(1) if machine.homogeneous else range(n)
    nodes = {machine.node_peers(r) for r in ranks}
    sets: set[tuple[int, ...]] = {(r,) for r in ranks}
    sets |= {tuple(peers) for peers in nodes}
    for peers, bus in product(nodes, machine.buses):
        sets |= {tuple(peers.start + r for r in end) for end in (bus.src, bus.dst)}
    for inside in sorted(sets):
        rest = [r for r in range(n) if r not in set(inside)]
        if rest:
            yield list(inside)
            if not machine.homogeneous:
                yield rest


def machine_graph(machine: Machine) -> networkx.DiGraph:
    """A machine as a graph for flows: ranks are nodes, each resource is an edge with its capacity in GB/s.

    Nodes are the ranks, and (name, "in") and (name, "out") of each resource. The route of a pair of ranks
    is a path from src through its resources, in order, to dst. The edges that join them have no "capacity",
    that is, no limit. The graph may have paths that are no route, so its cuts may let in more than the
    machine does, never less.

    >>> from tasp_core import machine
    >>> graph = machine_graph(machine("mesh3"))
    >>> graph.edges[("link 0>2", "in"), ("link 0>2", "out")]["capacity"]
    64.3
    """
    import networkx

    graph = networkx.DiGraph()
    graph.add_nodes_from(range(machine.ranks))
    for src in range(machine.ranks):
        for dst in range(machine.ranks):
            if src == dst:
                continue
            before: int | tuple[str, str] = src
            for name in machine.resources(src, dst):
                graph.add_edge(before, (name, "in"))
                graph.add_edge((name, "in"), (name, "out"), capacity=machine.capacity_gbps(name))
                before = (name, "out")
            graph.add_edge(before, dst)
    return graph


def tightest_cuts(machine: Machine, gbps: float = float("inf")) -> list[Cut]:
    """Cuts, each tighter than the one before: no set of ranks of the graph has a tighter cut than the last.

    Every rank can receive every other rank's KV at x GB/s if and only if x times `ranks` can flow to each
    rank from a source that sends x to each (ForestColl, Zhao et al. 2024). Where less flows to a rank, the
    minimum cut gives the next, smaller x.

    Args:
        gbps: only cuts with fewer GB/s per rank outside are searched.

    >>> from tasp_core import Machine
    >>> bridges = {f"link {a}>{b}": 90.0 for a, b in ((0, 1), (1, 0), (2, 3), (3, 2))}
    >>> pairs = Machine("two bridged pairs", 4, host_gbps=25.0, overrides=bridges)
    >>> tightest_cuts(pairs)[-1]
    Cut(inside=(0, 1), gbps=50.0)
    """
    import networkx

    n, graph, result = machine.ranks, machine_graph(machine), list[Cut]()
    if n == 1:
        return result
    gbps = min(gbps, sum(rate for _, _, rate in graph.edges(data="capacity", default=0.0)))
    while True:
        tighter: list[tuple[float, Cut]] = []
        graph.add_edges_from((("source", r) for r in range(n)), capacity=gbps)
        for rank in range(n):
            flow, (_, behind) = networkx.minimum_cut(graph, "source", rank)
            if flow < n * gbps * (1 - 1e-9):
                cut = Cut(
                    tuple(sorted(r for r in range(n) if r in behind)), _entering(graph, behind)
                )
                tighter.append((cut.gbps / (n - len(cut.inside)), cut))
        if not tighter:
            return result
        gbps, cut = min(tighter)
        result.append(cut)


def _entering(graph: networkx.DiGraph, behind: set[int | tuple[str, str]]) -> float:
    """GB/s of the resources whose end, but not whose beginning, lies behind a cut."""
    limited = graph.edges(data="capacity", default=0.0)
    return fsum(rate for a, b, rate in limited if b in behind and a not in behind | {"source"})


@lru_cache(maxsize=64)
def cuts(machine: Machine) -> tuple[Cut, ...]:
    """The cuts that the bounds are made of."""
    result = [Cut(tuple(s), into_gbps(machine, s)) for s in _tried_sets(machine)]
    if result and not machine.homogeneous and machine.ranks <= MOST_FLOW_RANKS:
        least = min(cut.gbps / (machine.ranks - len(cut.inside)) for cut in result)
        result += tightest_cuts(machine, least)
    return tuple(result)


def cut_bound(machine: Machine | str | Path, bytes_per_rank: float) -> float:
    """Least seconds in which every rank can take in every other rank's KV.

    Args:
        machine: a Machine, or a name or path as for `tasp_core.machine`.
        bytes_per_rank: bytes of one rank's KV.

    Raises:
        TopologyError: no machine of this name.

    >>> round(cut_bound("mesh8x2", 1e9), 4)
    0.03
    """
    machine = as_machine(machine)
    n = machine.ranks
    seconds = ((n - len(cut.inside)) * bytes_per_rank / 1e9 / cut.gbps for cut in cuts(machine))
    return max(seconds, default=0.0)


def needed_bound(machine: Machine, needed: np.ndarray, nbytes: np.ndarray) -> float:
    """The cut bound of what ranks really need: least seconds in which each can take in the shares it needs.

    Args:
        needed: whether a rank needs a share, bool [ranks, owners, shares].
        nbytes: the shares' sizes, [owners, shares].
    """
    n, result = machine.ranks, 0.0
    for inside, gbps in cuts(machine):
        sets = [[*inside]]
        if machine.homogeneous:  # of each kind one set is tried: here are all others of its size
            sets = [[*range(r, r + len(inside))] for r in range(0, n, len(inside))]
        for members in sets:
            wanted = np.where(needed[members].any(axis=0), nbytes, 0.0)
            wanted[members] = 0.0
            result = max(result, float(wanted.sum()) / (gbps * 1e9))
    return result
