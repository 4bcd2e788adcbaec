"""select: simulate the plans that suit a packed sequence and a machine, take the best, and say why.

    choice = tasp.select(docs, tasp.machine("h100x2"), heads=32, kv_heads=8, head_dim=128)
    choice.plan, choice.reason, print(choice)

Every schedule says itself which options are worth trying on a machine (`Schedule.candidates`), and on
which machines it is not worth trying (`Schedule.unsuited`).

Of the plans within CLOSE of the quickest, the one with the smallest buffers is taken; of equal ones, the
one that communicates least. As sequences grow, the choice must not switch back and forth. So a plan must
also be within KEEP of the quickest at 2 and 4 times the length, and one that was within CLOSE at half the
length may be KEEP behind. Plans that are FAR behind at the sequence's own length are not simulated at the
others. Not tried: layouts that cannot win (striped; contiguous for one document), the exchange
"all_to_all", and more than one schedule where Ulysses divides all ranks' heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import PlanError
from ..machines.machine import Machine
from ..machines.presets import as_machine
from ..planning.plan import Plan, between_groups, make_plan
from ..schedules import SCHEDULES
from ..schedules.schedule import cached_by_name
from ..sequence.documents import Documents
from .simulate import simulate
from .traffic import Sizes

CLOSE, KEEP, FAR = 0.025, 0.049, 0.5
AUTO = "auto"
# what plan(..., schedule="auto") assumes, which knows no tensors: heads and dims of an 8 B model
TYPICAL: dict[str, Any] = {"heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}


class Row(NamedTuple):
    """One candidate; seconds are 0 where it is excluded, `excluded` then says why.

    `buffer_bytes` is what a rank holds besides its own tensors: KV and queries of other ranks, and what
    Ulysses gathers.
    """

    schedule: str
    layout: str
    intra: int
    options: dict[str, Any]
    total_s: float = 0.0
    comm_s: float = 0.0
    compute_s: float = 0.0
    buffer_bytes: float = 0.0
    excluded: str = ""
    heads_alone: bool = False

    @property
    def name(self) -> str:
        """The candidate as text."""
        options = ",".join(f"{k}={v}" for k, v in self.options.items())
        ulysses = f"ulysses {self.intra}" if self.intra > 1 else ""
        context = () if self.heads_alone else (self.schedule, options, "x", self.layout)
        return " ".join(x for x in (*context, ulysses) if x)


@dataclass(frozen=True)
class Choice:
    """The plan taken, one line why, and all candidates: the quickest first, excluded ones last."""

    plan: Plan
    reason: str
    table: tuple[Row, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        rows = [row._asdict() for row in self.table]
        return {"plan": self.plan.summary(), "reason": self.reason, "table": rows}

    def explain(self) -> str:
        """The table of candidates as text."""
        lines = [("candidate", "total ms", "comm ms", "compute ms", "buffers MB")]
        for row in self.table:
            times = (f"{x * 1e3:.3f}" for x in (row.total_s, row.comm_s, row.compute_s))
            why = f"- {row.excluded}"
            last = why if row.excluded else f"{row.buffer_bytes / 1e6:.1f}"
            lines.append((row.name, *(("-",) * 3 if row.excluded else times), last))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = []
        for first, *others, last in lines:
            cells = (x.rjust(w) for x, w in zip(others, widths[1:-1], strict=True))
            text.append("  ".join((first.ljust(widths[0]), *cells, last)))
        return "\n".join(text)

    def __str__(self) -> str:
        return f"{self.plan.summary()}\n{self.reason}"


def select(
    docs: Documents | Iterable[int],
    machine: Machine | str | Path,
    *,
    heads: int,
    kv_heads: int | None = None,
    head_dim: int,
    dtype: str = "bfloat16",
    backward: bool = False,
    batch: int = 1,
    schedule: str = AUTO,
    layout: str = AUTO,
    intra: int | None = None,
    buffer_bytes: float = float("inf"),
    executor: str = "steps",
) -> Choice:
    """The plan with the least simulated time, forward or, with `backward`, of both passes.

    Args:
        machine: a Machine, or a name or path as for `tasp_core.machine`.
        heads, kv_heads: query and key/value heads (default: as many). head_dim: of q, k and v.
        dtype: of the tensors: float16, bfloat16, float32 or float64. batch: packed sequences.
        backward: add the time of the backward pass.
        schedule, layout, intra: a fixed one; default: all that may win.
        buffer_bytes: the most bytes that a rank may hold besides its own tensors.
        executor: how programs run, as for `simulate`.

    Raises:
        PlanError: no candidate works; the message has each one's reason.
        TopologyError: no machine has this name.

    >>> chosen = select(Documents.of([65536]), "mesh8", heads=32, kv_heads=8, head_dim=128)
    >>> chosen.plan.schedule.name, chosen.plan.ranks
    ('wave', 8)
    """
    if not isinstance(docs, Documents):
        docs = Documents.of(docs)
    machine = as_machine(machine)
    sizes: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    sizes |= {"dtype": dtype, "batch": batch}
    asked = (
        machine,
        tuple(sizes.items()),
        schedule,
        layout,
        intra,
        backward,
        buffer_bytes,
        executor,
    )
    candidates = _compared(docs, *asked)
    table = tuple(row for row, _ in candidates)
    works = [(row, made) for row, made in candidates if not row.excluded]
    if not works:
        reasons = "; ".join(sorted({f"{row.name}: {row.excluded}" for row in table}))
        raise PlanError(f"no plan for {machine.ranks} ranks of {machine.name!r} works: {reasons}")
    now = _behind(candidates)
    near = frozenset((r.schedule, r.layout, r.intra) for r, _ in works if now[r.name] <= FAR)
    others = (_compared(_resized(docs, x), *asked, near) for x in (0.5, 2, 4))
    before, *after = map(_behind, others)
    steady = [
        item
        for item in works
        if all(later.get(item[0].name, 1.0) <= KEEP for later in (now, *after))
        and min(now[item[0].name], before.get(item[0].name, 1.0)) <= CLOSE
    ]
    cost = [(round(row.buffer_bytes), row.comm_s) for row, _ in steady]
    row, made = steady[cost.index(min(cost))] if steady else works[0]
    reason = _reason(row, made, table, _alone(docs, machine, sizes, backward))
    return Choice(made, reason, table)


def _resized(docs: Documents, factor: float) -> Documents:
    if docs.slices is not None:
        return docs  # the mask of a longer or shorter sequence is not known
    lengths = (docs.lengths * factor).astype(int)
    return Documents.of(lengths, causal=docs.causal, window=docs.window)


def _behind(candidates: list[tuple[Row, Any]]) -> dict[str, float]:
    """How far each candidate that works is behind the quickest, as a part of the latter's time."""
    good = [row for row, _ in candidates if not row.excluded]
    return {row.name: row.total_s / good[0].total_s - 1 for row in good}


@cached_by_name(maxsize=128)  # a sequence, and it at half, double and four times its length
def _compared(
    docs: Documents,
    machine: Machine,
    tensors: tuple[tuple[str, Any], ...],
    schedule: str,
    layout: str,
    intra: int | None,
    backward: bool,
    most: float,
    executor: str,
    only: frozenset[tuple[str, str, int]] | None = None,
) -> list[tuple[Row, Any]]:
    """Candidates with their figures and plans, the quickest first, then the excluded ones."""
    sizes = dict(tensors)
    width = 4 * (sizes["kv_heads"] or sizes["heads"]) * sizes["head_dim"] * sizes["batch"]
    kv_bytes = docs.total / machine.ranks * width  # of 16-bit keys and values
    compared: list[tuple[Row, Any]] = []
    said: set[tuple[str, int, str]] = set()
    for candidate in _candidates(docs, machine, kv_bytes, schedule, layout, intra):
        if only is not None and candidate[:3] not in only:
            continue
        row, made = _measured(candidate, docs, machine, sizes, backward, most, executor)
        why = (row.schedule, row.intra, row.excluded)
        if not row.excluded or why not in said:  # one row for a reason that no layout changes
            compared.append((row, made))
        said.add(why)
    return sorted(compared, key=lambda x: (x[0].excluded != "", x[0].total_s, x[0].comm_s))


def _candidates(
    docs: Documents,
    machine: Machine,
    kv_bytes: float,
    schedule: str,
    layout: str,
    intra: int | None,
) -> Iterator[Row]:
    """Candidates, without their figures."""
    m, n = machine.node_size, machine.ranks
    degrees = [intra] if intra else [a for a in range(1, m + 1) if m % a == 0]
    if not intra and machine.homogeneous:  # over several nodes, up to all ranks
        degrees += [a for a in range(2 * m, n + 1, m) if n % a == 0]
    built_in = [name for name, cls in SCHEDULES.items() if cls.is_built_in()]
    names = built_in if schedule == AUTO else [schedule]
    packed = int((docs.lengths > 0).sum() > 1)
    spread = ["contiguous"] * (packed or not docs.causal) + ["zigzag"] * docs.causal
    layouts = (
        spread + (["per_document", "balanced"] if packed else []) if layout == AUTO else [layout]
    )
    for a, name, place in product(degrees, names, layouts):
        alone = a == n  # Ulysses over all ranks: all schedules and layouts are the same
        if alone and (name, place) != (names[0], layouts[0]):
            continue
        known = SCHEDULES.get(name)  # of an unknown name, planning raises
        unsuited = known.unsuited(machine) if known and schedule == AUTO else ""
        if unsuited:
            yield Row(name, place, a, {}, excluded=unsuited)
            continue
        options: Iterable[dict[str, Any]] = ({},)
        over_nodes = machine.homogeneous and a % m == 0 and n % a == 0
        if known and not alone and (m % a == 0 or over_nodes):
            options = known.candidates(between_groups(machine, a), kv_bytes)
        for tried in options:
            yield Row(name, place, a, tried, heads_alone=alone and a > 1)


def _measured(
    row: Row,
    docs: Documents,
    machine: Machine,
    sizes: dict[str, Any],
    backward: bool,
    most: float,
    executor: str,
) -> tuple[Row, Plan | None]:
    """The row with its figures and its plan, or with the reason why it is excluded."""
    if row.excluded:
        return row, None
    try:
        made = make_plan(
            docs,
            machine.ranks,
            schedule=row.schedule,
            layout=row.layout,
            machine=machine,
            intra=row.intra,
            schedule_options=row.options or None,
        )
        passes = [
            simulate(made, machine, **sizes, backward=b, executor=executor)
            for b in (False, True)[: 1 + backward]
        ]
    except ValueError as error:
        return row._replace(excluded=str(error)), None
    width, part = Sizes.of(made, **sizes), made.context_plan.layout.counts.max()
    limits = made.schedule.limits
    kv = max(map(width.kv, width.parts)) * limits.buffer * (made.context_plan.ranks > 1)
    partial = width.accumulator_bytes / width.item  # of remote queries, beside the queries
    kv += max(map(width.q, width.parts)) * limits.remote_queries * (1 + partial)
    gathered = max(2 * width.q(p) + width.kv(p) for p in width.parts) * (made.intra > 1)
    row = row._replace(
        total_s=sum(x.total_s for x in passes),
        comm_s=sum(x.comm_s for x in passes),
        compute_s=sum(x.compute_s for x in passes),
        buffer_bytes=float(part * (kv + gathered) * width.item),
    )
    if row.buffer_bytes > most:
        why = f"buffers of {row.buffer_bytes / 1e6:.1f} MB, {most / 1e6:.1f} are allowed"
        return row._replace(excluded=why), None
    return row, made


def _alone(docs: Documents, machine: Machine, sizes: dict[str, Any], backward: bool) -> float:
    """Seconds of plain attention, all of it on one rank."""
    single = make_plan(docs, 1, schedule=_baseline(), layout="contiguous")
    one = Machine("one", 1, **{k: getattr(machine, k) for k in KERNEL})
    seconds = (
        simulate(single, one, **sizes, backward=b).total_s for b in (False, True)[: 1 + backward]
    )
    return sum(seconds) / max(1.0, machine.ranks_a_core)


def _sent(made: Plan) -> str:
    """Of a schedule that leaves out what nobody needs: how much it sends, against what a ring does."""
    made = made.context_plan
    visits = (made.ranks - 1) * made.docs.total
    if not made.schedule.sends_only_what_is_needed or not visits:
        return ""
    sent = int(made.tokens_moved(made.hops()).sum()) / visits
    return f"; it sends {sent:.1%} of the tokens that a ring does, as no others are needed"


KERNEL = ("tflops", "backward_tflops", "kernel_s", "memory_gbps")


def _baseline() -> str:
    """The schedule that others are compared with: the first one, Ring Attention."""
    return next(iter(SCHEDULES))


def _reason(row: Row, made: Plan, table: tuple[Row, ...], alone_s: float) -> str:
    """One line: what was taken, against what, and what it saves."""
    others = [
        x for x in table if not x.excluded and (x.schedule, x.intra) != (row.schedule, row.intra)
    ]
    baseline = next((x for x in others if (x.schedule, x.intra) == (_baseline(), 1)), None)
    rival = baseline or next(iter(others), None)
    text = f"{row.name}: {row.total_s * 1e3:.3f} ms"
    text += (
        ", communication hidden"
        if row.total_s < 1.05 * row.compute_s
        else (f", of which computing {row.compute_s * 1e3:.3f}")
    )
    if rival:
        text += f"; {rival.name} {rival.total_s * 1e3:.3f} ms"
    text += _sent(made)
    named = [
        (cls.compared_as * (x.intra == 1), x) for x in others if (cls := SCHEDULES.get(x.schedule))
    ]
    named = [("Ulysses over all ranks", x) if x.heads_alone else (name, x) for name, x in named]
    for name, x in {name: x for name, x in reversed(named) if name}.items():  # the best of each
        text += f"; {name} {x.total_s * 1e3:.3f} ms"
    if alone_s and alone_s < row.total_s:
        text += (
            f"; plain attention on one rank would take {alone_s * 1e3:.3f} ms: "
            "the packed sequence is too short to be worth splitting"
        )
    return text
