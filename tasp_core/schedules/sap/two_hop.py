"""Relays: shares go straight or by way of a third rank, so that idle links of a mesh carry some.

Where few ranks have documents in common, few links of a full mesh are busy. Each transfer takes the
way and the step that leave the busiest (link, step) least busy: straight from the owner, from a rank
that has just received the share for itself, or from a third rank that gets it for this in the step
before. A rank passes on only what came from the owner in the step before: two steps' arrivals are all the
keys it holds, and gradients go home by two arcs at most, which takes four steps.
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
    """Ways and steps of transfers.

    Args:
        dst, share: share `share[i]` must come to rank `dst[i]`. owner, size: of every share.
        budget: tokens a rank takes in in a step, about (one share more at most).
        steps: over how many steps to spread them; more where the budget asks for it.
    """
    turn = np.arange(len(share)) - np.searchsorted(share, share)  # first all first receivers
    number = share - np.searchsorted(owner, owner[share])
    order = np.lexsort(((dst - owner[share]) % ranks, number, turn))
    plan = _Plan(ranks, budget, steps)
    for s, b in zip(share[order].tolist(), dst[order].tolist(), strict=True):
        plan.add(s, int(owner[s]), b, int(size[s]))
    return Moves(*np.array(plan.moves, dtype=np.int64).reshape(-1, 4).T)


class _Plan:
    """Loads of links and arrivals by step, and what has been decided."""

    def __init__(self, ranks: int, budget: int, steps: int) -> None:
        self.ranks, self.budget = ranks, budget
        self.load = np.zeros((steps, ranks, ranks), dtype=np.int64)
        self.taken = np.zeros((steps, ranks), dtype=np.int64)
        # by share: the step in which it came to a rank, and whether from its owner
        self.came: dict[int, dict[int, tuple[int, bool]]] = {}
        self.moves: list[tuple[int, int, int, int]] = []

    def add(self, share: int, owner: int, dst: int, size: int) -> None:
        """Bring a share to a rank, unless it came there as a relay."""
        came = self.came.setdefault(share, {})
        if dst in came:
            return
        cost = self._costs(owner, dst, size, came)
        if not np.isfinite(cost.min()):  # all steps are full: one more
            self.load, self.taken = (
                np.concatenate([x, np.zeros_like(x[:1])]) for x in (self.load, self.taken)
            )
            cost = self._costs(owner, dst, size, came)
        t, via = np.unravel_index(int(cost.argmin()), cost.shape)
        if via != owner and int(via) not in came:
            self._move(int(t) - 1, owner, int(via), share, size, True)
        self._move(int(t), int(via), dst, share, size, via == owner)

    def _costs(
        self, owner: int, dst: int, size: int, came: dict[int, tuple[int, bool]]
    ) -> np.ndarray:
        """By (step of arrival, rank it comes from): load of the busiest link used, infinite if full."""
        full = self.taken >= self.budget
        last = np.where(full[:, dst, None], np.inf, self.load[:, :, dst] + size + 0.0)
        first = np.full_like(last, np.inf)  # from the owner to a third rank, one step before
        first[1:] = np.where(full[:-1], np.inf, self.load[:-1, owner] + 1.5 * size)
        for rank, (step, direct) in came.items():
            first[:, rank] = np.inf
            if direct and step + 1 < len(first):
                first[step + 1, rank] = 0.0
        first[:, owner] = 0.0
        last[:, dst] = np.inf
        return np.maximum(first, last)

    def _move(self, step: int, src: int, dst: int, share: int, size: int, direct: bool) -> None:
        self.moves.append((step, src, dst, share))
        self.load[step, src, dst] += size
        self.taken[step, dst] += size
        self.came[share][dst] = step, direct
