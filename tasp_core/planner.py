"""`plan(...)` and `supports(...)`: the one place that knows what "auto" means.

A named schedule and layout are planned as they are (planning/plan.py); "auto" asks `select`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from .costs.select import TYPICAL, select
from .errors import PlanError, check_int
from .machines.machine import Machine
from .planning.heads import split_heads
from .planning.plan import Plan, make_plan, resolve_machine
from .sequence.documents import Documents


def plan(
    docs: Documents | Iterable[int],
    ranks: int,
    *,
    schedule: str = "tasp",
    layout: str = "zigzag",
    machine: Machine | str | None = None,
    intra: int = 1,
    schedule_options: Mapping[str, Any] | None = None,
) -> Plan:
    """Plan the attention of a packed sequence on `ranks` ranks.

    Args:
        docs: the documents of the packed sequence, or their lengths in tokens (then causal).
        ranks: degree of sequence parallelism, >= 1.
        schedule: a name of `schedules()`, or "auto": what `select` takes for the tensors of an 8 B model.
        layout: a name of `layouts()`, or "auto".
        machine: where it runs, a Machine or a name; default: one full mesh of `ranks` ranks.
        intra: Ulysses degree. Groups of so many consecutive ranks share their tokens and divide the
            heads; `schedule` and `layout` work between the groups. Default 1: heads are not divided.
            It must divide the query heads, and either the ranks of a node, or all ranks into groups
            of whole nodes (all ranks: Ulysses alone).
        schedule_options: options of the schedule, e.g. {"blocks": 15, "twins": 14} for "wave",
            {"relay": 6} for "sap". What is left out comes from the machine. All but "all_gather"
            take {"exchange": "all_to_all"}, one collective per step (default "p2p": one message per
            link, no packing).

    Raises:
        PlanError, LayoutError, TopologyError: what was asked, what was found, what to do.

    >>> p = plan([600, 90, 334], ranks=5, schedule="ring")
    >>> p.tokens(0)[:2].tolist(), p.num_tokens(0), p.schedule.num_shares
    ([0, 1], 205, 1)
    """
    if "auto" not in (schedule, layout):
        return make_plan(
            docs,
            ranks,
            schedule=schedule,
            layout=layout,
            machine=machine,
            intra=intra,
            schedule_options=schedule_options,
        )
    if schedule_options:
        raise PlanError("schedule_options need a named schedule, not 'auto'")
    ranks = check_int(ranks, "ranks", 1, PlanError)
    if not isinstance(docs, Documents):
        docs = Documents.of(docs)
    intra = check_int(intra, "intra", 1, PlanError)
    where = resolve_machine(machine, ranks)
    return select(docs, where, **TYPICAL, schedule=schedule, layout=layout, intra=intra).plan


class Support(NamedTuple):
    """The answer of `supports`: true, or false with the reason."""

    ok: bool
    reason: str

    def __bool__(self) -> bool:
        return self.ok


def supports(
    docs: Documents | Iterable[int] = (),
    ranks: int = 1,
    *,
    mask: str | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    **options: Any,
) -> Support:
    """Whether `plan(docs, ranks, **options)` and attention with these heads work, or the reason not.

    Args:
        mask: a kind of mask; "causal" and "full" are known by name, others are slices of `docs`.
        heads, kv_heads: query heads and key/value heads (default: as many).

    >>> supports([8], 4, mask="prefix_lm").reason
    "mask 'prefix_lm' has no name here; write it as slices: Documents.masked(lengths, slices)"
    """
    if mask not in (None, "causal", "full"):
        reason = (
            f"mask {mask!r} has no name here; write it as slices: Documents.masked(lengths, slices)"
        )
        return Support(False, reason)
    shared = heads if kv_heads is None else kv_heads
    if heads is not None and (heads < 1 or shared is None or shared < 1 or heads % shared):
        return Support(
            False, f"{heads} query heads are not a multiple of {kv_heads} key/value heads"
        )
    try:
        made = plan(docs, ranks, **options)
        if heads is not None and shared is not None:
            split_heads(heads, shared, made.intra)
    except ValueError as error:
        return Support(False, str(error))
    return Support(True, "yes")
