"""Lowering: a plan and a rank -> a Program. The passes that do it are in passes.py."""

from __future__ import annotations

from ..errors import LayoutError
from ..planning.plan import Plan
from .passes import lower_passes
from .program import Program


def lower(
    plan: Plan, rank: int, *, backward: bool = False, keep_kv: bool = False, ahead: int = 0
) -> Program:
    """One rank's Program for the forward or the backward pass; with `intra`, its group's.

    With keep_kv all KV that arrives in the forward pass stays for the backward pass, in which none
    travels: more memory, fewer bytes.

    With `ahead`, messages may arrive so many steps before they are used: for an executor that does not
    wait for each step to end. Buffers are larger then, up to the KV of two ranks; where that is not
    enough, rows are those of ahead=0.

    Raises:
        LayoutError: the rank does not exist.
        PlanError: the plan asks for a collective that no executor knows.

    >>> from tasp_core import plan
    >>> program = lower(plan([64], ranks=4, schedule="ring"), 0)
    >>> program.kv_buffer_rows, [len(s.compute.calls) for s in program.steps]
    (32, [2, 1, 1, 1])
    >>> for instruction in program.steps[0].instructions:
    ...     print(instruction)
    SEND kv0.0 ->1 #0 @kv 0..8 8..16
    RECV kv3.0 <-3 #0 @kv 16..24 24..32
    POST p2p
    ATTEND kv 0..16 causal 0..8x0..8 8..16x8..16 full 8..16x0..8
    WAIT
    """
    if not 0 <= rank < plan.ranks:
        raise LayoutError(f"rank {rank} does not exist: ranks are 0..{plan.ranks - 1}")
    made = lower_passes(plan.context_plan, rank // plan.intra, backward=backward, keep_kv=keep_kv)
    if ahead and not keep_kv:
        more = lower_passes(
            plan.context_plan, rank // plan.intra, backward=backward, keep_kv=False, ahead=ahead
        )
        most = 2 * int(plan.context_plan.layout.counts.max())
        made = more if more.kv_buffer_rows <= max(most, made.kv_buffer_rows) else made
    return made
