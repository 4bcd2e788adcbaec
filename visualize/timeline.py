"""Timeline: a Gantt chart of a pass with a row for each rank: when it computes, communicates and waits.

    timeline([("Ring", simulate(plan_a, ...)), ("TASP", simulate(plan_b, ...))]) -> Figure

Times are modelled, not measured. In each row the upper bar is compute, in the rank's colour, and the lower
bar is communication. Where there is only the lower bar, compute waits for it; where there is none, the rank
is idle.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tasp_core.costs.simulate import Timeline

from .colours import SOFT, colour
from .figure import Figure, few_enough
from .marks import (
    INNER,
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

LEFT, RIGHT, TOP = 64.0, 150.0, 56.0
SEND, WAIT = "#9A9A9A", "#F6E3D7"
UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


Timelines = Timeline | Sequence[Timeline | tuple[str, Timeline]]


def seconds(value: float) -> str:
    """A time with its unit.

    >>> seconds(0.00123), seconds(2), seconds(0)
    ('1.23 ms', '2 s', '0 s')
    """
    size, name = next((u for u in UNITS if abs(value) >= u[0]), (1.0, "s"))
    return f"{number(value / size)} {name}"


def _bars(spans: np.ndarray, per_px: float) -> list[tuple[float, float, int, int]]:
    """(start, stop, first step, last step) of one row, spans closer than a px joined."""
    bars: list[tuple[float, float, int, int]] = []
    for step, (start, stop) in enumerate(spans.tolist()):
        if not stop > start:
            continue
        if bars and max(stop - start, bars[-1][1] - bars[-1][0]) < 2 * per_px:
            low, high, first, _ = bars[-1]
            if start - high < per_px:
                bars[-1] = (low, max(high, stop), first, step)
                continue
        bars.append((start, stop, step, step))
    return bars


def _row(times: Timeline, rank: int, y: float, high: float, scale: float) -> Marks:
    """A rank's compute and communication."""
    marks = [
        rect(
            complex(LEFT, y),
            complex(times.total_s * scale, 0.6 * high),
            fill=WAIT,
            name="wait",
            layer=-1,
        )
    ]
    lanes = (
        (times.compute, y, 0.6 * high, colour(rank), "compute"),
        (times.comm, y + 0.66 * high, 0.24 * high, SEND, "comm"),
    )
    for spans, top, tall, fill, name in lanes:
        for start, stop, first, last in _bars(spans[rank], 1 / scale):
            at, wide = complex(LEFT + start * scale, top), (stop - start) * scale
            tip = f"rank {rank}, {name}, step {first}" + f" to {last}" * (last > first)
            tip += f": {seconds(start)} to {seconds(stop)}"
            edge = "#FFFFFF" if wide > 3 else "none"
            marks.append(
                rect(at, complex(wide, tall), fill=fill, stroke=edge, width=0.6, name=name, tip=tip)
            )
    return marks


def idle(times: Timeline) -> np.ndarray:
    """Fraction of the pass in which each rank does not compute, float [ranks]."""
    busy = (times.compute[..., 1] - times.compute[..., 0]).sum(axis=1)
    return np.asarray(1 - busy / times.total_s if times.total_s else np.zeros_like(busy))


def _panel(label: str, times: Timeline, last: float) -> Drawing:
    """One timeline; `last` is the end of the common time axis."""
    n, wide = len(times.compute), INNER - LEFT - RIGHT
    high = max(6.0, min(34.0, 420.0 / n))
    scale, foot, waits = wide / last, TOP + n * high, idle(times)
    said = f"{seconds(times.total_s)}; ranks do not compute {_span(waits)} of it"
    marks = [text(8j, fit(label, 500, size=16, bold=True), size=16, anchor="start", bold=True)]
    marks.append(text(32j, said, anchor="start"))
    marks.append(small(complex(LEFT + wide + 12, TOP - 12), "not computing", "start"))
    for tick in ticks(last):
        x = LEFT + tick * scale
        marks.append(gridline(complex(x, TOP - 4), complex(x, foot + 4)))
        marks.append(small(complex(x, foot + 14), seconds(tick)))
    for rank in range(n):
        y = TOP + rank * high
        marks += _row(times, rank, y, high, scale)
        if rank % every(high, 18) == 0:
            marks.append(small(complex(LEFT - 10, y + high / 2), f"rank {rank}", "end"))
            share = f"{waits[rank]:.0%}"
            marks.append(small(complex(LEFT + wide + 12, y + high / 2), share, "start"))
    x = LEFT + times.total_s * scale
    marks.append(line(complex(x, TOP - 6), complex(x, foot + 4), stroke=SOFT, width=1.5, layer=1))
    return Drawing(INNER, foot + 26, marks)


def ticks(last: float) -> list[float]:
    """Round times from 0, six to twelve of them.

    >>> [round(t, 2) for t in ticks(1.0)]
    [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
    """
    rough = 10 ** np.floor(np.log10(last / 5)) if last > 0 else 1.0
    step = float(next(rough * k for k in (1, 2, 5, 10) if last / (rough * k) <= 10.5))
    return [step * i for i in range(int(last / step + 1e-9) + 1)]


def _span(part: np.ndarray) -> str:
    low, high = f"{part.min():.0%}", f"{part.max():.0%}"
    return low if low == high else f"{low} to {high}"


def labelled(timelines: Timelines) -> list[tuple[str, Timeline]]:
    """(label, timeline) pairs.

    Raises:
        ValueError: no timeline.
    """
    given = [timelines] if isinstance(timelines, Timeline) else list(timelines)
    if not given:
        raise ValueError("a picture needs at least one timeline, got none")
    return [t if isinstance(t, tuple) else ("", t) for t in given]


def timeline(timelines: Timelines) -> Figure:
    """Draw when each rank computes, communicates and waits.

    Args:
        timelines: of `tasp_core.costs.simulate`: one, or several on one time axis, each bare or with a
            label: (label, timeline).

    Raises:
        ValueError: no timeline, or more ranks than can be drawn.
    """
    some = labelled(timelines)
    for _, t in some:
        few_enough(len(t.compute))
    last = max(t.total_s for _, t in some) or 1.0
    said = (f"{label or 'the pass'} takes {seconds(t.total_s)}" for label, t in some)
    title = "Modelled: " + "; ".join(said)
    keys = [(colour(0), "compute, in the rank's colour"), (SEND, "communication")]
    body = stack(
        [legend([*keys, (WAIT, "not computing")]), *(_panel(*s, last) for s in some)], gap=16
    )
    notes = (
        "One row per rank; time runs to the right. Times are modelled from the machine's capacities.",
    )
    facts = (f"{label or 'pass'}: ranks do not compute {_span(idle(t))} of it" for label, t in some)
    return Figure(title, notes, f"{title}. Bars of time per rank. {'; '.join(facts)}.", body)
