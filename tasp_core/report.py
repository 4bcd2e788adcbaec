"""What `check` found about a plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .schedules import Promise


@dataclass(frozen=True)
class Report:
    """What `check` found; loads count shares a link and step, forward pass.

    Attributes:
        max_load, min_load: most and least shares a link inside a node carries in a step (between
            nodes of one rank: a NIC).
        max_nic, min_nic: the same for shares a rank sends over its NIC.
        busy: mean share of the links that carry something in a step.
        busiest: (src, dst, shares) of the link, or (rank, rank, shares) of the NIC, with the most in all.
        pairs: visible (query, key) pairs, each computed exactly once.
        peak_shards: most travelling KV a rank holds, in multiples of one rank's KV.
        peak_guests: most queries of other ranks a rank holds, in multiples of one rank's tokens.
        work: pairs computed, int64 [ranks, steps + 1].
        tokens_sent: tokens whose keys or queries each rank sends, int64 [ranks].
        messages: hops with tokens in them, whole forward pass.
        promise: the loads and buffers that the plan was held to.
        links_proved: whether loads were held to it; a collective's are the library's own choice.
    """

    max_load: int
    min_load: int
    max_nic: int
    min_nic: int
    busy: float
    busiest: tuple[int, int, int]
    pairs: int
    peak_shards: float
    peak_guests: float
    work: np.ndarray
    tokens_sent: np.ndarray
    messages: int
    promise: Promise
    links_proved: bool

    @property
    def balance(self) -> float:
        """Work of the busiest rank over the mean; 1.0 is perfect."""
        total = self.work.sum(axis=1)
        return float(total.max() / total.mean()) if total.any() else 1.0

    @property
    def step_balance(self) -> float:
        """The worst step's work max/mean over ranks."""
        mean = self.work.mean(axis=0)
        some = mean > 0
        return float((self.work.max(axis=0)[some] / mean[some]).max(initial=1.0))

    def _links(self) -> str:
        if not self.links_proved:
            return "not proved: what links carry in a collective is the choice of its library"
        most = f" ({self.promise.inside} promised)" * (self.promise.inside > self.max_load)
        nics = f", {self.min_nic}..{self.max_nic} a NIC" if self.max_nic else ""
        nics += f" ({self.promise.across} promised)" * (self.promise.across > self.max_nic > 0)
        return (
            f"proved: {self.min_load}..{self.max_load} shares a link and step{most}{nics}, "
            f"{self.busy:.1%} of the links busy per step"
        )

    def __str__(self) -> str:
        return "\n".join(
            (
                f"holding    proved: every hop sends what its rank holds ({self.messages} messages)",
                f"coverage   proved: {self.pairs} visible pairs, each computed once, no other pair",
                f"links      {self._links()}",
                f"memory     proved: at most {self.peak_shards:.3g} travelling KV a rank"
                + f", {self.peak_guests:.3g} shards of guest queries" * (self.peak_guests > 0),
                "gradients  proved: every contribution reaches its owner exactly once",
                f"work       max/mean {self.balance:.4f} over ranks, "
                f"{self.step_balance:.4f} in the worst step",
            )
        )
