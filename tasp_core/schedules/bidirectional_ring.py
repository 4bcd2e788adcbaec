"""Bidirectional ring: one half of KV travels up a ring of ranks while the other half travels down.

Links and NICs are full duplex; Ring Attention sends in one direction of them only. Here, in step t,

    rank r sends to r + 1    share 0 of rank r - t
    rank r sends to r - 1    share 1 of rank r + t

so that each direction of a link between neighbours carries half as much as in Ring Attention. Steps and
buffers stay the same: n - 1 steps, two KV. Gradients follow one hop behind their KV, as on every ring
(ring.py). With two ranks both directions are the same link, and one ring carries everything.

For machines on which a rank has two neighbours; where it has links to all others, `tasp` and `wave` use
these too. Not covered: another order of the ranks on the ring than 0, 1, 2, ...

Source: Wang et al. 2023, "Overlap Communication with Dependent Computation via Decomposition in Large Deep
Learning Models" (ASPLOS), which sends the operands of matrix products in both directions of a ring; its use
for attention is this project's own.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from .hamiltonian import Rings
from .ring import RingSchedule
from .schedule import Example


class BidirectionalRing(RingSchedule):
    """half of KV each way round one ring: n - 1 steps, both directions of a link"""

    name = "bidirectional_ring"
    example = Example("mesh5", steps=4)

    @cached_property
    def rings(self) -> Rings:
        up = np.arange(self.ranks, dtype=np.int64)
        return Rings(np.stack([up, up[::-1]] if self.ranks > 2 else [up]), 0)
