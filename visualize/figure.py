"""Figure: one picture in the three forms in which it is shown.

    fig = rings(plan);  fig.save("rings.svg");  fig.svg, fig.text, fig.plotly

In a notebook a figure shows itself: plain text, SVG and plotly JSON in one bundle, no HTML, so that
Jupyter, GitHub, nbviewer and exported HTML all have a picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tasp_core import Plan

from . import plotly_json, svg
from .marks import MARGIN, Drawing, gridline, lines, stack

MOST_RANKS = 128
CELL = 920  # px: a cell beside JupyterLab's side bar in a window of 1,366 px
Plans = Plan | Sequence[Plan | tuple[str, Plan]]


def named(plans: Plans) -> list[tuple[str, Plan]]:
    """(label, plan) pairs; a bare plan is called by its schedule and layout.

    Raises:
        ValueError: no plan.
    """
    some = [plans] if isinstance(plans, Plan) else list(plans)
    if not some:
        raise ValueError("a picture needs at least one plan, got none")
    return [(f"{p.schedule.name}, {p.layout.name}", p) if isinstance(p, Plan) else p for p in some]


def few_enough(ranks: int) -> None:
    """Refuse more ranks than can be told apart.

    Raises:
        ValueError: more than 128 ranks.
    """
    if ranks > MOST_RANKS:
        raise ValueError(f"a picture of {ranks} ranks cannot be read; draw at most {MOST_RANKS}")


@dataclass(frozen=True, eq=False)
class Figure:
    """A drawing with the sentence it shows, notes on how to read it, and its text alternative.

    Attributes:
        title: what the picture shows, as a sentence.
        notes: how to read it.
        desc: what a reader who cannot see it needs to know.
        drawing: the marks.
        frames: (name, drawing) of the states of an animation; plotly plays them.
        active: which of the frames is `drawing`.
        headed: whether title and notes are to be written above the drawing.
    """

    title: str
    notes: tuple[str, ...]
    desc: str
    drawing: Drawing
    frames: tuple[tuple[str, Drawing], ...] = ()
    active: int = 0
    headed: bool = True

    def page(self, drawing: Drawing) -> Drawing:
        """A drawing of the figure under its title and notes."""
        if not self.headed:
            return drawing
        wide = max(720.0, self.drawing.width)
        heading = [lines(self.title, wide, size=20, bold=True)]
        heading += [lines(note, wide) for note in self.notes]
        shift = (wide - drawing.width) / 2
        body = Drawing(wide, drawing.height, [m.moved(shift) for m in drawing.marks])
        return stack([stack(heading), body], gap=18)

    @cached_property
    def svg(self) -> str:
        """SVG text, with title and alt text."""
        return svg.document(_framed(self.page(self.drawing)), self.title, self.desc)

    @property
    def text(self) -> str:
        """The figure in words."""
        return "\n".join((self.title, *self.notes, self.desc))

    @cached_property
    def plotly(self) -> dict[str, Any]:
        """Plotly JSON, at most as wide as a notebook's cell: plotly does not fit itself in, SVG does.

        `plotly.io.from_json(json.dumps(fig.plotly))` reads it.
        """
        whole = _framed(self.page(self.drawing))
        by = min(1.0, CELL / whole.width)
        frames = [(name, _framed(self.page(d)).scaled(by)) for name, d in self.frames]
        return plotly_json.figure(whole.scaled(by), self.title, frames, self.active)

    def save(self, path: str | Path) -> Path:
        """Write the SVG; the path, for the next command.

        Raises:
            ValueError: another suffix than .svg.
        """
        path = Path(path)
        if path.suffix != ".svg":
            raise ValueError(f"figures are saved as .svg, got {path.name!r}")
        path.write_text(self.svg, encoding="utf-8")
        return path

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {
            "text/plain": self.text,
            "image/svg+xml": self.svg,
            "application/vnd.plotly.v1+json": self.plotly,
        }


def _framed(page: Drawing) -> Drawing:
    """A page with its margins."""
    marks = [m.moved(complex(MARGIN, MARGIN)) for m in page.marks]
    return Drawing(page.width + 2 * MARGIN, page.height + 2 * MARGIN, marks)


def together(figures: Sequence[Figure]) -> Figure:
    """One figure of several, below each other, each under its own title and notes."""
    parts: list[Drawing] = []
    wide = max(720.0, *(f.drawing.width for f in figures))
    for figure in figures:
        if parts:
            parts.append(Drawing(wide, 16, [gridline(12j, complex(wide, 12))]))
        parts.append(figure.page(figure.drawing))
    title, desc = "; ".join(f.title for f in figures), " ".join(f.desc for f in figures)
    notes = tuple(note for f in figures for note in f.notes)
    return Figure(title, notes, desc, stack(parts, gap=18), headed=False)
