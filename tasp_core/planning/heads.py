"""Which heads each member of a Ulysses group attends with."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..errors import PlanError

if TYPE_CHECKING:
    from torch import Tensor


class Heads(NamedTuple):
    """One member's query heads [q_low, q_high) and the key/value heads they use."""

    q_low: int
    q_high: int
    kv_low: int
    kv_high: int

    def q(self, x: Tensor) -> Tensor:
        return x[..., self.q_low : self.q_high, :]

    def kv(self, x: Tensor) -> Tensor:
        return x[..., self.kv_low : self.kv_high, :]


def split_heads(heads: int, kv_heads: int, degree: int) -> list[Heads]:
    """Each member's heads.

    Raises:
        PlanError: the degree does not divide the query heads; names the largest that does.

    >>> split_heads(8, 2, 4)[1]
    Heads(q_low=2, q_high=4, kv_low=0, kv_high=1)
    """
    if heads % degree:
        best = max(d for d in range(1, degree + 1) if heads % d == 0 and degree % d == 0)
        raise PlanError(
            f"{heads} query heads cannot be shared evenly by intra={degree} ranks; "
            f"use intra={best} and let the schedule do the rest between groups"
        )
    size, group = heads // degree, heads // kv_heads
    ends = ((i * size, (i + 1) * size) for i in range(degree))
    return [Heads(a, b, a // group, (b - 1) // group + 1) for a, b in ends]
