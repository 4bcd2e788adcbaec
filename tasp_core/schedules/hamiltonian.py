"""Hamiltonian cycles of complete digraphs, and Hamiltonian cycles over several nodes.

K_n, the complete digraph on n ranks, splits into n - 1 arc-disjoint Hamiltonian cycles for every n
except 4 and 6 (Tillson 1980): n - 1 rings that together use every directed link exactly once. For
n = 4 and 6 we return 2(n - 1) cycles that use every link exactly twice ("fold 2"), which loads the
links just as evenly once a rank's KV is cut into 2(n - 1) shares.

    >>> decompose(3).cycles
    ((2, 0, 1), (2, 1, 0))
    >>> decompose(4).fold, len(decompose(4))
    (2, 6)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..errors import TopologyError, check_int


@dataclass(frozen=True, eq=False)
class Rings:
    """Directed Hamiltonian cycles on ranks 0..n-1.

    Attributes:
        array: int64 [rings, n]; row i lists ring i's ranks in the order in which data travels.
        fold: how often each ordered pair of ranks is used, where that is the same for all pairs;
            0 where it is not (rings over several nodes use few of the pairs).
    """

    array: np.ndarray
    fold: int

    def __post_init__(self) -> None:
        self.array.flags.writeable = False  # decompositions are shared by all plans

    @property
    def cycles(self) -> tuple[tuple[int, ...], ...]:
        """The cycles as tuples of ranks."""
        return tuple(map(tuple, self.array.tolist()))

    def __len__(self) -> int:
        return len(self.array)

    def pair_counts(self) -> np.ndarray:
        """How many rings use each ordered pair, int64 [src, dst]."""
        n = self.array.shape[1]
        counts = np.zeros((n, n), dtype=np.int64)
        np.add.at(counts, (self.array, np.roll(self.array, -1, axis=1)), 1)
        return counts

    def verify(self) -> Rings:
        """Prove it: every row visits every rank once, every ordered pair is used `fold` times.

        Raises:
            TopologyError: naming the first ring or pair that is wrong.
        """
        n = self.array.shape[1]
        bad = np.flatnonzero((np.sort(self.array, axis=1) != np.arange(n)).any(axis=1))
        if bad.size:
            raise TopologyError(
                f"ring {bad[0]} is not a Hamiltonian cycle of {n} ranks: {self.array[bad[0]].tolist()}"
            )
        if self.fold and n > 1:
            wrong = np.argwhere(self.pair_counts() != self.fold * (1 - np.eye(n, dtype=np.int64)))
            if wrong.size:
                src, dst = wrong[0]
                uses = self.pair_counts()[src, dst]
                raise TopologyError(f"link {src}>{dst} is used {uses} times, expected {self.fold}")
        return self


def _zigzag(m: int) -> np.ndarray:
    """0, 1, -1, 2, -2, ... mod m: consecutive differences 1, -2, 3, ... are all distinct."""
    t = np.arange(m)
    return np.where(t % 2 == 1, (t + 1) // 2, -(t // 2)) % m


def _rotations(m: int) -> np.ndarray:
    """Walecki's zigzag path over Z_m, rotated m times, each closed through one more point, m."""
    paths = (np.arange(m)[:, None] + _zigzag(m)[None, :]) % m
    return np.concatenate([np.full((m, 1), m), paths], axis=1)


def _even(n: int) -> np.ndarray:
    """Even n >= 8: Walecki's cycles on n - 1 points, point n - 1 inserted, and one rainbow cycle.

    Give an arc the colour of the cycle that uses it. A Hamiltonian path that uses every colour once
    gives up one arc of each cycle; the new point is inserted where that arc was, and the path,
    closed through the new point, is the last cycle.
    """
    m, half, a, b = n - 2, (n - 2) // 2, n - 2, n - 1

    def run(start: int, stop: int) -> list[int]:
        return list(range(start, stop + 1, 2))

    if n % 4 == 2:
        path = [a, *run(half + 3, m - 1), 1, 2, *run(3, half + 1), *run(half + 2, m - 2)]
        path += [0, *run(4, half)]
    else:
        path = [2, *run(3, m - 1), 1, a, *run(half + 3, m - 2), 0, *run(4, half + 1)]
    place = dict.fromkeys(range(m), m - 1)
    place |= {2: 2, half + 2: m - 3, (half + 3) % m: 1, half + 1: m + 1 if n % 4 == 0 else 2}
    if n % 4 == 2:
        place[1] = 2
    cycles = [np.insert(row, place[i], b) for i, row in enumerate(_rotations(m))]
    return np.array([*cycles, [b, *path]])


def decompose(n: int) -> Rings:
    """Split the complete digraph on n ranks into Hamiltonian cycles that load every link equally.

    Args:
        n: ranks, n >= 1. Closed form, O(n^2).

    Raises:
        TopologyError: n is below 1.

    Source: Walecki (odd n), Tillson 1980 (existence for even n >= 8); the even construction is
    this project's own.

    >>> decompose(8).fold, decompose(8).cycles[-1]
    (1, (7, 2, 3, 5, 1, 6, 0, 4))
    """
    return _decompose(check_int(n, "decompose(n): n, the number of ranks,", 1, TopologyError))


@lru_cache(maxsize=64)
def _decompose(n: int) -> Rings:
    if n == 1:
        return Rings(np.zeros((0, 1), dtype=np.int64), 1)
    if n % 2 == 1:
        return Rings(_rotations(n - 1), 1)
    if n == 2:
        return Rings(np.array([[1, 0]]), 1)
    if n in (4, 6):
        forward = _rotations(n - 1)
        return Rings(np.concatenate([forward, forward[:, ::-1]]), 2)
    return Rings(_even(n), 1)


@lru_cache(maxsize=64)
def node_rings(node_size: int, num_nodes: int, *, rail_aligned: bool) -> Rings:
    """m rings over u nodes of m ranks, (m-K_m-m)^u: a Hamiltonian path in each node, then one hop on.

    Ring i walks i + (0, 1, -1, 2, ...) mod m inside a node. Every ordered pair inside a node and
    every hop between nodes carries one share per step. As published, ring i enters every node at
    local rank i, so that every hop between nodes changes its local rank ("rail"). Rail-aligned,
    node k walks path i + k m/2, so that hops keep their rail (for odd u, all but those of one border).

    Args:
        node_size: m, ranks per node, even.
        num_nodes: u >= 2.

    Raises:
        TopologyError: odd m, or fewer than two nodes.

    >>> node_rings(2, 2, rail_aligned=True).cycles
    ((0, 1, 3, 2), (1, 0, 2, 3))
    """
    m, u = node_size, num_nodes
    if m < 2 or m % 2:
        raise TopologyError(
            f"paths through nodes need an even number of ranks per node, got {m}; "
            "use schedule 'wave' (any node size) or 'tasp' over all ranks"
        )
    if u < 2:
        raise TopologyError(
            f"paths through nodes need at least 2 nodes, got {u}; use 'tasp' on one node"
        )
    ring, node, step = np.arange(m)[:, None, None], np.arange(u)[None, :, None], _zigzag(m)
    shift = node * (m // 2) if rail_aligned else 0
    return Rings((node * m + (ring + shift + step) % m).reshape(m, u * m), 0)
