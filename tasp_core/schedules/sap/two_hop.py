"""Two-hop routes: shares go directly or through a third rank, so that idle links of a mesh carry some.

Where few ranks have documents in common, few links of a full mesh are busy. Each transfer takes the route
and the step that leave the busiest (link, step) least busy. The route is one of these:

    from the owner
    from a rank that received the share for itself, from the owner, in the step before
    from a third rank, to which the owner sends it in the step before for this purpose

So a rank holds the arrivals of two steps only, and gradients return over two arcs at most, which takes
four steps.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Moves(NamedTuple):
    """Hops of shares, int64."""

    step: np.ndarray
    src: np.ndarray
    dst: np.ndarray
    share: np.ndarray


def spread(
    dst: np.ndarray,
    share: np.ndarray,
    owner: np.ndarray,
    size: np.ndarray,
    ranks: int,
    budget: int,
    steps: int,
) -> Moves:
    """Routes and steps of transfers.

    Args:
        dst, share: share `share[i]` must come to rank `dst[i]`; sorted by share.
        owner, size: of every share, its rank and tokens.
        budget: tokens that a rank receives per step; one share more at most.
        steps: over how many steps to spread the transfers; more where the budget needs them.
    """
    turn = np.arange(len(share)) - np.searchsorted(share, share)  # the first receivers of all first
    number = share - np.searchsorted(owner, owner[share])
    order = np.lexsort(((dst - owner[share]) % ranks, number, turn))
    plan = _Plan(ranks, budget, steps)
    for s, b in zip(share[order].tolist(), dst[order].tolist(), strict=True):
        plan.add(s, int(owner[s]), b, int(size[s]))
    return Moves(*np.array(plan.moves, dtype=np.int64).reshape(-1, 4).T)


class _Plan:
    """Loads of links and of receivers by step, and the hops decided so far."""

    def __init__(self, ranks: int, budget: int, steps: int) -> None:
        self.ranks, self.budget = ranks, budget
        self.load = np.zeros((steps, ranks, ranks), dtype=np.int64)
        self.received = np.zeros((steps, ranks), dtype=np.int64)
        # of each share: the step in which it arrives at a rank, and whether from its owner
        self.arrived: dict[int, dict[int, tuple[int, bool]]] = {}
        self.moves: list[tuple[int, int, int, int]] = []

    def add(self, share: int, owner: int, dst: int, size: int) -> None:
        """Send a share to a rank, unless that rank has received it to pass it on."""
        arrived = self.arrived.setdefault(share, {})
        if dst in arrived:
            return
        cost = self._costs(owner, dst, size, arrived)
        if not np.isfinite(cost.min()):  # all steps are full: one more
            self.load, self.received = (
                np.concatenate([x, np.zeros_like(x[:1])]) for x in (self.load, self.received)
            )
            cost = self._costs(owner, dst, size, arrived)
        t, via = np.unravel_index(int(cost.argmin()), cost.shape)
        if via != owner and int(via) not in arrived:
            self._move(int(t) - 1, owner, int(via), share, size, True)
        self._move(int(t), int(via), dst, share, size, via == owner)

    def _costs(
        self, owner: int, dst: int, size: int, arrived: dict[int, tuple[int, bool]]
    ) -> np.ndarray:
        """The busiest link's load by route, [step of arrival, sender]; infinite where a step is full."""
        full = self.received >= self.budget
        last = np.where(full[:, dst, None], np.inf, self.load[:, :, dst] + size + 0.0)
        first = np.full_like(last, np.inf)  # from the owner to a third rank, in the step before
        first[1:] = np.where(full[:-1], np.inf, self.load[:-1, owner] + 1.5 * size)
        for rank, (step, direct) in arrived.items():
            first[:, rank] = np.inf
            if direct and step + 1 < len(first):
                first[step + 1, rank] = 0.0
        first[:, owner] = 0.0
        last[:, dst] = np.inf
        return np.maximum(first, last)

    def _move(self, step: int, src: int, dst: int, share: int, size: int, direct: bool) -> None:
        self.moves.append((step, src, dst, share))
        self.load[step, src, dst] += size
        self.received[step, dst] += size
        self.arrived[share][dst] = step, direct
