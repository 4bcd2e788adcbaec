"""Memory: what lies in one rank's buffers, step by step, read from its program's instructions.

    memory(plan, rank=2)                  keys and values that pass through
    memory(plan, rank=2, backward=True)   and the gradients on their way home

Rows of the buffer go down, steps go right. A box is a share of another rank's KV at its rows, from the
step in which it is received (paler) to the one in which the program frees it, after its last use. A box of
one step only is a share that nothing reads: no query of the rank sees it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tasp_core import Plan, Program, lower
from tasp_core.lowering.passes import buffer_rows
from tasp_core.lowering.program import AllGather, Free, Recv, Send, Zero
from tasp_core.schedules import DKV, KINDS, KV, Q

from .colours import colour, ink, mix
from .figure import Figure, few_enough
from .marks import (
    Drawing,
    Marks,
    every,
    fit,
    gridline,
    legend,
    line,
    number,
    rect,
    small,
    stack,
    text,
)
from .rings import place

SHORT = {
    "keys and values of other ranks": "KV",
    "queries of other ranks": "Q",
    "gradients on their way home": "dKV",
}
LEFT, TOP, HIGH, WIDE, TIPS = 76.0, 44.0, 360.0, 1060.0, 1000


class Span(NamedTuple):
    """Rows [low, low + count) of a buffer hold a share from step `first` to step `last`."""

    kind: int
    owner: int
    share: int
    low: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    first: int
    last: int

    @property
    def name(self) -> str:
        """As hops name it; of several shares together only whose they are."""
        return f"{KINDS[self.kind]}{self.owner}" + (f".{self.share}" if self.share >= 0 else "")


def received(program: Program, kind: int, counts: Sequence[int]) -> list[Span]:
    """KV (kind KV) or queries (Q) of other ranks, from their arrival to the FREE of their rows.

    Args:
        counts: every rank's tokens: where one collective moves all KV, rows after those are padding.
    """
    own, buffer = program.tokens, "kv" if kind == KV else "q"
    freed = np.full(buffer_rows(program)[buffer], program.num_steps - 1)  # when each row is, next
    spans = []
    for i in reversed(program.instructions):
        parts: list[tuple[int, int, int, int]] = []
        if isinstance(i, Free) and i.buffer == buffer:
            for _, low, high in i.writes:
                freed[low:high] = i.step
        elif isinstance(i, Recv) and i.message.kind == kind:
            parts = i.message.parts
        elif isinstance(i, AllGather) and kind == KV:
            others = (r for r in range(i.ranks) if r != program.rank)
            parts = [(r, 0, own + r * i.rows, counts[r]) for r in others if counts[r]]
        for owner, share, low, count in parts:
            last = int(freed[low : low + count].max())
            spans.append(Span(kind, owner, share, low - own, count, i.step, last))
    return spans[::-1]


def accumulated(program: Program) -> list[Span]:
    """Gradients of other ranks' KV, from the ZERO of their rows to their SEND."""
    own, spans = program.tokens, []
    zeroed = np.zeros(buffer_rows(program)["dkv"], dtype=np.int64)
    for i in program.instructions:
        if isinstance(i, Zero) and i.buffer == "dkv":
            for _, low, high in i.writes:
                zeroed[low:high] = i.step
        elif isinstance(i, Send) and i.message.kind == DKV:
            for owner, share, low, count in i.message.parts:
                if owner != program.rank:
                    first = int(zeroed[low])
                    spans.append(Span(DKV, owner, share, low - own, count, first, i.step))
    return spans


def buffers(plan: Plan, program: Program) -> list[tuple[str, list[Span], int]]:
    """(name, what lies in it, rows) of each buffer for what is not the rank's own."""
    names, counts = tuple(SHORT), plan.layout.counts.tolist()
    result = [(names[0], received(program, KV, counts), program.kv_buffer_rows)]
    if program.remote_query_rows:
        result.append((names[1], received(program, Q, counts), program.remote_query_rows))
    if program.backward:
        result.append((names[2], accumulated(program), program.remote_grad_rows))
    return result


def joined(spans: list[Span]) -> list[Span]:
    """Neighbours of one owner that come and go together, as one."""
    found: list[Span] = []
    for s in sorted(spans, key=lambda s: (s.first, s.low)):
        before = found[-1] if found else None
        if before and (s.kind, s.owner, s.first, s.last, s.low) == (
            before.kind,
            before.owner,
            before.first,
            before.last,
            before.low + before.count,
        ):
            share = s.share if s.share == before.share else -1
            found[-1] = before._replace(share=share, count=before.count + s.count)
        else:
            found.append(s)
    return found


def _boxes(spans: list[Span], rows: int, pitch: float) -> Marks:
    """Each span: the step of arrival pale, the others in the owner's colour, a word where it fits."""
    size, marks, words, some = HIGH / rows, [], [], joined(spans)
    for s in some:
        tone, at = colour(s.owner), complex(LEFT + pitch * s.first, TOP + size * s.low)
        tip = f"{s.name}: rows {s.low} to {s.low + s.count}, steps {s.first} to {s.last}"
        parts = [(at, 1, mix(tone, "#FFFFFF", 0.55))]
        parts += [(at + pitch, s.last - s.first, tone)] if s.last > s.first else []
        for where, steps, fill in parts:
            box = complex(pitch * steps, size * s.count)
            edge = "#FFFFFF" if box.imag > 3 else "none"
            marks.append(
                rect(
                    where,
                    box,
                    fill=fill,
                    stroke=edge,
                    name="span",
                    tip=tip if len(some) <= TIPS else "",
                )
            )
        where, steps, fill = parts[-1]
        box = complex(pitch * steps, size * s.count)
        if box.imag >= 15 and box.real >= 8 * len(s.name) + 4:
            words.append(text(where + box / 2, s.name, size=13, fill=ink(fill)))
    return marks + words


def _panel(head: str, spans: list[Span], rows: int, tokens: int, steps: int) -> Drawing:
    """One buffer; lines where its height is a multiple of the rank's own KV."""
    pitch, size = min(120.0, (WIDE - LEFT) / steps), HIGH / max(1, rows)
    wide, foot = pitch * steps, TOP + HIGH * bool(rows)
    marks = [text(8j, head, size=16, anchor="start", bold=True)]
    marks += _boxes(spans, rows, pitch) if rows else []
    whole = rows / max(1, tokens)
    for k in range(0, int(whole + 1e-9) + 1, every(HIGH / max(whole, 1e-9), 20)):
        y = TOP + size * k * tokens
        marks.append(line(complex(LEFT - 4, y), complex(LEFT + wide, y), stroke="#999999", layer=1))
        marks.append(small(complex(LEFT - 8, y), f"{k} {SHORT[head]}", "end"))
    for t in range(0, steps, every(pitch, 24)):
        marks.append(gridline(complex(LEFT + pitch * t, TOP), complex(LEFT + pitch * t, foot)))
        marks.append(small(complex(LEFT + pitch * (t + 0.5), foot + 13), str(t)))
    marks.append(small(complex(LEFT + wide / 2, foot + 32), "step"))
    return Drawing(LEFT + wide, foot + 44, marks)


def memory(plan: Plan, *, rank: int = 0, backward: bool = False, label: str = "") -> Figure:
    """Draw what one rank's buffers hold in each step.

    Args:
        rank: whose buffers.
        backward: of the backward pass, which has a second buffer, for gradients.
        label: what to call the plan; default: its schedule's name.

    Raises:
        LayoutError, PlanError: the rank does not exist.
        ValueError: more ranks than can be drawn.

    >>> from tasp_core import plan
    >>> memory(plan([64], 8, schedule="ring")).title
    'ring on 8 ranks: rank 0 needs room for 2 KV of other ranks'
    """
    few_enough(plan.ranks)
    program = lower(plan, rank, backward=backward)
    tokens, steps = program.tokens, len(program.steps)
    rows = buffers(plan.context_plan, program)
    needs = ", ".join(f"{number(n / max(1, tokens))} {SHORT[what]}" for what, _, n in rows)
    title = f"{place(plan, label)}: rank {rank} needs room for {needs} of other ranks"
    note = f"1 KV: as much as the rank's own keys and values, {tokens:,} tokens. A box has its owner's "
    note += "colour, paler in its first step, in which it arrives or is computed. "
    note += "Rows are used again as soon as nothing needs them; what no query sees leaves at once."
    panels = [_panel(h, s, n, tokens, steps) for h, s, n in rows]
    owners = sorted({s.owner for _, spans, _ in rows for s in spans})
    if len(owners) <= 32:
        panels.insert(0, legend((colour(r), f"of rank {r}") for r in owners))
    drawn = stack(panels, gap=20)
    said = (f"{fit(h, 400)}: {len(s)} shares in {n:,} rows" for h, s, n in rows)
    return Figure(title, (note,), f"{title}. {'; '.join(said)}; {steps} steps.", drawn)
