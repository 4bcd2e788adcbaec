"""The cut bound: no schedule is faster, whatever it sends by which way (THEORY 2.1).

For each set of ranks: the bytes that must enter it, over what can enter it a second. Tried are every
single rank and every node, and where ranks are not alike also the ranks at an end of a bus and the
rest of each of these (what must leave it).
What can enter a set is the cheapest choice of resources that every transfer into it has to pass, of
one kind for all transfers by the same kind of way.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np

from .machine import Machine


def into_gbps(machine: Machine, inside: range | list[int]) -> float:
    """GB/s that can enter a set of ranks.

    >>> from tasp_core import machine
    >>> into_gbps(machine("mesh4x2"), [0]), into_gbps(machine("mesh4x2"), [0, 1, 2, 3])
    (242.89999999999998, 200.0)
    """
    members = set(inside)
    ways: dict[tuple[str, ...], list[set[str]]] = {}
    for src in range(machine.ranks):
        for dst in inside if src not in members else ():
            way = machine.resources(src, dst)
            kinds = tuple(name.rpartition(" ")[0] for name in way)
            for used, name in zip(ways.setdefault(kinds, [set() for _ in way]), way, strict=True):
                used.add(name)
    cuts = (set().union(*choice) for choice in product(*ways.values()))
    return min(sum(map(machine.capacity_gbps, cut)) for cut in cuts)


def cut_sets(machine: Machine) -> Iterator[list[int]]:
    """The sets of ranks whose cuts are looked at; where all ranks are alike, one of each kind."""
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


def cut_bound(machine: Machine, bytes_per_rank: float) -> float:
    """Least seconds in which every rank can take in every other rank's keys and values.

    Args:
        bytes_per_rank: bytes of one rank's keys and values.

    >>> from tasp_core import machine
    >>> round(cut_bound(machine("mesh8x2"), 1e9), 4)
    0.03
    """
    n = machine.ranks
    return max(
        ((n - len(s)) * bytes_per_rank / 1e9 / into_gbps(machine, s) for s in cut_sets(machine)),
        default=0.0,
    )


def needed_bound(machine: Machine, needed: np.ndarray, nbytes: np.ndarray) -> float:
    """`cut_bound` of what ranks really need.

    Args:
        needed: whether a rank needs a share, bool [ranks, owners, shares].
        nbytes: the shares' sizes, [owners, shares].
    """
    n, result = machine.ranks, 0.0
    for inside in cut_sets(machine):
        alike = [inside]
        if machine.homogeneous:  # one set of each kind was yielded: all others of its size
            alike = [[*range(r, r + len(inside))] for r in range(0, n, len(inside))]
        gbps = into_gbps(machine, inside)
        for members in alike:
            wanted = np.where(needed[members].any(axis=0), nbytes, 0.0)
            wanted[members] = 0.0
            result = max(result, float(wanted.sum()) / (gbps * 1e9))
    return result
