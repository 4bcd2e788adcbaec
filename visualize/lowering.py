"""Lowering: how the passes turn a plan into one rank's program, one panel per pass.

    lowering(plan, rank=2)                             its first two steps, forward
    lowering(plan, rank=2, backward=True, first=1)     steps 1 and 2 of the backward pass

Steps go right, what a pass has made of them goes down. A line that the pass has added or changed is dark,
one that it leaves as it was is pale. A bar in front of a line has the colour of the rank whose KV, queries
or gradients the line is about.
"""

from __future__ import annotations

import textwrap

from tasp_core import LayoutError, Plan
from tasp_core.lowering.passes import Line, stages

from .colours import INK, PALE, colour
from .figure import Figure, few_enough
from .marks import INNER, Drawing, Marks, gridline, legend, rect, room, small, stack, text
from .rings import place

PASSES = {
    "expand_hops": "messages that the hop table asks for, and what the rank computes",
    "order": "each computation in a step: the one after its KV has arrived",
    "assign_rows": "buffer rows, from arrival to last use",
    "pack_messages": "transfers that go together as one message",
    "kernel_calls": "kernel calls: query rows x KV rows, causal or full",
    "emit": "instructions in order: messages start before the computation and are waited for after it",
    "insert_frees": "FREE after the last use of rows",
}
LINE, LEFT, MOST, SIZE = 18.0, 12.0, 16, 13


def _cell(lines: list[Line], before: set[str], width: float) -> Drawing:
    """The lines of one step, wrapped to the width."""
    marks: Marks = []
    y = 0.0
    for line in lines[:MOST]:
        parts = textwrap.wrap(
            line.text, room(width - LEFT - 8, size=SIZE), subsequent_indent="    "
        )
        high = LINE * len(parts)
        for i, owner in enumerate(line.owners[:3]):
            marks.append(rect(complex(3 * i, y + 2), complex(3, high - 4), fill=colour(owner)))
        tone = "#8A8A8A" if line.text in before else INK
        for i, part in enumerate(parts):
            at = complex(LEFT, y + LINE * (i + 0.5))
            marks.append(text(at, part, size=SIZE, anchor="start", fill=tone, name="line"))
        y += high
    if len(lines) > MOST:
        more = f"and {len(lines) - MOST} more"
        marks.append(small(complex(LEFT, y + LINE / 2), more, "start"))
        y += LINE
    return Drawing(width, y, marks)


def _panel(name: str, lines: list[Line], before: list[Line], steps: range) -> Drawing:
    """One pass: what lies in no step yet, then a column for each step."""
    old = {line.text for line in before}
    pitch = INNER / len(steps)
    marks = [text(9j, name, size=15, anchor="start", bold=True)]
    marks.append(small(complex(16 + 9.6 * len(name), 9), PASSES[name], "start"))
    marks.append(gridline(22j, complex(INNER, 22)))
    y = 28.0
    cells = [_cell([x for x in lines if x.step == step], old, pitch - 64) for step in steps]
    for i, (step, cell) in enumerate(zip(steps, cells, strict=True)):
        at = complex(pitch * i, y)
        marks.append(small(at + 8j, f"step {step}", "start"))
        marks += [m.moved(at + complex(48, 0)) for m in cell.marks]
    y += max([LINE, *(cell.height for cell in cells)])
    if loose := [line for line in lines if line.step is None]:
        cell = _cell(loose, old, INNER - 160)
        marks.append(rect(complex(0, y + 4), complex(INNER, cell.height + 8), stroke=PALE))
        marks.append(small(complex(8, y + 16), "in no step yet", "start"))
        marks += [m.moved(complex(120, y + 8)) for m in cell.marks]
        y += cell.height + 16
    return Drawing(INNER, y, marks)


def lowering(
    plan: Plan,
    *,
    rank: int = 0,
    backward: bool = False,
    first: int = 0,
    steps: int = 2,
    label: str = "",
) -> Figure:
    """Draw what each pass of lowering makes of some steps of one rank.

    Args:
        rank: whose program; with Ulysses groups, its group's.
        backward: of the backward pass.
        first, steps: which steps to show.
        label: what to call the plan; default: its schedule's name.

    Raises:
        LayoutError: the rank does not exist.
        ValueError: steps that do not exist, or more ranks than can be drawn.

    >>> from tasp_core import plan
    >>> lowering(plan([64], 8, schedule="ring")).title
    'ring on 8 ranks: 7 passes make the program of rank 0'
    """
    few_enough(plan.ranks)
    if not 0 <= rank < plan.ranks:
        raise LayoutError(f"rank {rank} does not exist: ranks are 0..{plan.ranks - 1}")
    made = stages(plan.context_plan, rank // plan.intra, backward=backward)
    size = 1 + max((line.step or 0 for line in made[-1][1]), default=0)
    if not 0 <= first < size or steps < 1:
        raise ValueError(f"there are steps 0..{size - 1}, got first={first}, steps={steps}")
    shown = range(first, min(size, first + steps))
    title = f"{place(plan, label)}: {len(made)} passes make the program of rank {rank}"
    note = "Rows are low..high. A line that a pass adds or changes is dark, others are pale. "
    note += "The bar has the colour of the rank whose KV, queries or gradients the line is about."
    before: list[Line] = []
    panels, counts = [], []
    for name, lines in made:
        here = [x for x in lines if x.step is None or x.step in shown]
        panels.append(_panel(name, here, before, shown))
        counts.append(f"{name}: {len(lines)} lines")
        before = here
    owners = sorted({o for _, lines in made for line in lines for o in line.owners})
    if len(owners) <= 32:
        panels.insert(0, legend((colour(r), f"of rank {r}") for r in owners))
    desc = f"{title}. {'; '.join(counts)}. The program: " + "; ".join(
        line.text for line in made[-1][1] if line.step in shown
    )
    return Figure(title, (note,), desc[:4000], stack(panels, gap=16))
