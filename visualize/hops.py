"""Hops: one communication step of a plan, and who has whose keys and values after it.

    hops(plan, step=2) -> Figure; its plotly form plays all steps

On the left an arrow for each link in use, in the colour of the rank whose KV it carries (dark grey
where it carries several ranks'). On the right a row for each rank: its cells fill with the owners'
colours as their shares arrive. Drawn as frames for plans of few hops, see FRAMES.
"""

from __future__ import annotations

import numpy as np

from tasp_core import Plan
from tasp_core.schedules import KV, Hops, Q
from tasp_core.schedules.counts import load_table

from .colours import INK, PALE, SOFT, colour
from .figure import Figure, few_enough
from .marks import Drawing, Marks, every, number, rect, small, text, unit
from .rings import place
from .stage import between, discs, nodes, nodes_of, stage

STAGE, CELLS, LEFT, TOP = 560.0, 400.0, 660.0, 104.0
FRAMES = 900  # arrows and cells of an animation at most: its JSON stays below 250 kB
LABELLED = 16  # arrows with words, at most


def _arrows(plan: Plan, here: Hops) -> Marks:
    """An arrow for each link in use, with its words where there is room."""
    s, n = stage(nodes_of(plan.machine), STAGE), plan.context_plan.ranks
    link, inverse = np.unique(here.src * n + here.dst, return_inverse=True)
    words = here.lines()
    opposed = bool(np.isin(link % n * n + link // n, link).any())
    marks, labels = nodes(s), []
    for i, (src, dst) in enumerate(zip((link // n).tolist(), (link % n).tolist(), strict=True)):
        mine = np.flatnonzero(inverse == i)
        owners = np.unique(here.owner[mine]).tolist()
        tone = colour(owners[0]) if len(owners) == 1 else SOFT
        shown = [words[k].split()[-1] for k in mine[:6]]
        tip = f"{src} to {dst}: {' '.join(shown)}{' ...' * (len(mine) > 6)}"
        mark = between(s, src, dst, stroke=tone, width=s.thin, tip=tip, opposed=opposed)
        marks.append(mark)
        if len(link) <= LABELLED:
            a, control, b = mark.points
            label = shown[0] + f" +{len(mine) - 1}" * (len(mine) > 1)
            aside = 1j * unit(b - a)
            side = a / 4 + control / 2 + b / 4 + complex(30 * aside.real, 15 * aside.imag)
            labels.append(text(side, label, size=13, fill=tone, halo=True))
    return marks + discs(s) + labels


def _had(plan: Plan, kind: int) -> np.ndarray:
    """Part of each owner's KV (or queries) a rank has before step t, float [steps + 1, rank, owner]."""
    n, hops = plan.context_plan.ranks, plan.hops()
    hops = hops.where(hops.kind == kind)
    moved = plan.tokens_moved(hops) / np.maximum(1, plan.layout.counts)[hops.owner]
    shape = (plan.schedule.num_steps() + 1, n, n)
    had = load_table(shape, hops.step + 1, hops.dst, hops.owner, amount=moved)
    had[0, np.arange(n), np.arange(n)] = kind == KV
    return had.cumsum(axis=0)


def _matrix(had: np.ndarray, before: np.ndarray, remote: np.ndarray) -> Marks:
    """Rows of cells that fill with the owners' colours; what is new has a dark frame.

    A hollow square in the owner's colour: queries of that rank that have arrived.
    """
    n = len(had)
    size = min(44.0, CELLS / n)
    at = complex(LEFT, TOP)
    marks, fresh = [], []
    for rank in range(n):
        for owner in range(n):
            part, corner = float(had[rank, owner]), at + complex(owner, rank) * size
            new = part - before[rank, owner] > 1e-9
            if n <= 24 and part < 1:
                marks.append(rect(corner, complex(size, size), fill="#FFFFFF", stroke=PALE))
            if part:
                up = size * part
                box = corner + 1j * (size - up)
                tip = f"rank {rank} has {part:.0%} of rank {owner}'s KV" if n <= 16 else ""
                edge = "#FFFFFF" if n <= 32 else "none"
                marks.append(
                    rect(
                        box,
                        complex(size, up),
                        fill=colour(owner),
                        stroke=edge,
                        name="held",
                        tip=tip,
                    )
                )
            if remote[rank, owner]:
                tip = f"rank {rank} has had {remote[rank, owner]:.0%} of rank {owner}'s queries"
                inset = complex(0.25, 0.25) * size
                fresh.append(
                    rect(
                        corner + inset,
                        2 * inset,
                        stroke=colour(owner),
                        width=3,
                        name="remote query",
                        tip=tip if n <= 16 else "",
                    )
                )
            if new and n <= 24:
                inner = corner + complex(1.5, 1.5)
                fresh.append(rect(inner, complex(size - 3, size - 3), stroke=INK, width=1.5))
    marks += [*fresh, rect(at, complex(n, n) * size, stroke="#999999")]
    for rank in range(0, n, every(size, 20)):
        along = size * (rank + 0.5)
        marks.append(small(at + complex(along, -11), str(rank)))
        marks.append(small(at + complex(-8, along), str(rank), "end"))
    marks.append(small(at + complex(n * size / 2, -30), "keys and values of rank"))
    middle = at + complex(-40, n * size / 2)
    marks.append(text(middle, "held by rank", size=13, fill=SOFT, turn=-90))
    return marks


def _draw(plan: Plan, step: int, had: np.ndarray, remote: np.ndarray) -> Drawing:
    """One step."""
    table = plan.hops()
    here = table.where(table.step == step)
    have = had[step + 1].sum(axis=1)
    caption = f"step {step} of 0 to {len(had) - 2}: {len(here.src)} hops"
    seen = f"after it a rank has {_range(have)} of {len(have)} ranks' KV"
    marks = [text(complex(LEFT, 8), caption, size=16, anchor="start", bold=True)]
    marks.append(small(complex(LEFT, 32), seen + "; new: framed", "start"))
    marks += _arrows(plan, here) + _matrix(had[step + 1], had[step], remote[step + 1])
    return Drawing(LEFT + CELLS, max(STAGE, TOP + 60), marks)


def _range(have: np.ndarray) -> str:
    low, high = number(float(have.min())), number(float(have.max()))
    return low if low == high else f"{low} to {high}"


def hops(plan: Plan, *, step: int = 0, label: str = "") -> Figure:
    """Draw one communication step: what each link carries, and what each rank has afterwards.

    Args:
        step: of the forward pass, from 0.
        label: what to call the plan; default: its schedule's name.

    Raises:
        ValueError: a step the plan does not have, or more ranks than can be drawn.

    >>> from tasp_core import plan
    >>> hops(plan([64], 4, schedule="ring"), step=2).svg.count('class="arrow"')
    4
    """
    few_enough(plan.ranks)
    where, steps = place(plan, label), plan.schedule.num_steps()
    had, remote = _had(plan, KV), _had(plan, Q)
    if not 0 <= step < max(1, steps):
        raise ValueError(f"step {step} does not exist: {where} has {steps} steps, from 0")
    if not steps:
        ground = stage(nodes_of(plan.machine), 110)
        drawn = Drawing(110, 110, discs(ground))
        return Figure(f"{where}: nothing travels", (), f"{where}: nothing travels.", drawn)
    table, n = plan.hops(), len(had[0])
    count = len(table.src)
    arrows = len(np.unique((table.step * n + table.src) * n + table.dst))
    shown = range(steps) if arrows + steps * n * n <= FRAMES else [step]
    states = {t: _draw(plan, t, had, remote) for t in shown}
    note = (
        "An arrow: one link in use, in the colour of the rank whose keys and values (KV) it carries; "
        'grey: of several ranks. "kv3.1": share 1 of rank 3. A cell fills as the shares arrive.'
    )
    title = (
        f"{where}: {count} hops in {steps} step{'s' * (steps != 1)} bring every KV to its readers"
    )
    if remote.any():
        note += " A hollow square: its queries have come."
        title = title.replace("bring every KV to its readers", "bring queries and keys together")
    said = " ".join(table.where(table.step == step).lines()[:64])
    desc = f"{where}, step {step} of {steps}: {said}."
    frames = tuple((f"{t}", d) for t, d in states.items()) if len(states) > 1 else ()
    return Figure(title, (note,), desc, states[step], frames, step)
