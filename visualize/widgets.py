"""Widgets: the same figures behind sliders. Needs ipywidgets; `import visualize` does not.

    explore_rings()  explore_mask()  explore_schedule()  explore_balance()  explore_machine()

Each takes the initial values of its controls as keywords. For a combination that cannot be planned, the
planner's error is shown in place of the figure. Without a kernel (GitHub, exported HTML) the figure from
the run of the cell is shown. For that, keep widget states out of the file (nbconvert:
`--ExecutePreprocessor.store_widget_state=False`): then viewers show the SVG.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from html import escape
from typing import Any

import ipywidgets as ip

import tasp_core as tasp
from tasp_core import Documents, Plan

from .balance import balance
from .compare import compare
from .figure import Figure, together
from .hops import hops
from .masks import mask
from .rings import rings
from .timeline import timeline

LENGTHS = "1904, 137, 89, 640, 700, 330"
VIEWS = ("hops", "tiles")
MACHINES = ("mi300x", "h100", "a100_pcie", "mi300xx2", "h100x2", "h100x4", "mesh4x2")
CANDIDATES = ("ring", "tasp", "wave", "all_gather")
MOST_RANKS = 16  # up to so many ranks a timeline is drawn, too


class Explorer(ip.VBox):
    """Controls above a figure: `draw` gets their values by name and returns the figure.

    Attributes:
        controls: the widgets by name; set `.value` to change one by code.
        figure: the figure that is shown, or None after an error.
        error: the error's text, or "".
    """

    def __init__(self, draw: Callable[..., Figure], controls: dict[str, Any], *extra: Any) -> None:
        self.draw, self.controls, self.area = draw, controls, ip.HTML()
        self.figure: Figure | None = None
        self.error = ""
        for control in controls.values():
            control.observe(self.update, "value")
        row = ip.HBox([*controls.values(), *extra], layout=ip.Layout(flex_flow="row wrap"))
        super().__init__([row, self.area])
        self.update()

    def update(self, change: Any = None) -> None:
        """Draw the figure for the current values of the controls."""
        try:
            self.figure = self.draw(**{name: c.value for name, c in self.controls.items()})
            self.error, self.area.value = "", self.figure.svg
        except ValueError as error:  # show the planner's error in place of the figure
            self.figure, self.error = None, str(error)
            look = "white-space: pre-wrap; border-left: 4px solid #D55E00; padding: 8px"
            self.area.value = f'<pre role="alert" style="{look}">{escape(str(error))}</pre>'

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        bundle: dict[str, Any] = dict(super()._repr_mimebundle_(**kwargs))
        if self.figure is None:
            return {**bundle, "text/plain": self.error}
        return {**bundle, "text/plain": self.figure.text, "image/svg+xml": self.figure.svg}


def _slider(name: str, value: int, low: int, high: int) -> Any:
    style = {"description_width": "initial"}
    return ip.IntSlider(value=value, min=low, max=high, description=name, style=style)


def _choice(name: str, value: Any, options: Iterable[Any]) -> Any:
    return ip.Dropdown(value=value, options=list(options), description=name)


def lengths_of(text: str) -> list[int]:
    """Lengths from a line of text, separated by commas or spaces.

    Raises:
        ValueError: a part that is not an integer.

    >>> lengths_of("4, 3 2")
    [4, 3, 2]
    """
    parts = text.replace(",", " ").split()
    bad = [p for p in parts if not p.isdecimal()]
    if bad:
        raise ValueError(f"document lengths are integers, separated by commas, got {bad[0]!r}")
    return [int(p) for p in parts]


def _plan(
    docs: Documents | Iterable[int],
    per_node: int,
    nodes: int,
    schedule: str,
    layout: str = "zigzag",
) -> Plan:
    where = f"mesh{per_node}x{nodes}" if nodes > 1 else None
    return tasp.plan(docs, per_node * nodes, schedule=schedule, layout=layout, machine=where)


def _ranks(ranks: int, nodes: int) -> dict[str, Any]:
    return {
        "ranks": _slider("ranks per node", ranks, 1, 16),
        "nodes": _slider("nodes", nodes, 1, 4),
    }


def explore_rings(*, schedule: str = "tasp", ranks: int = 8, nodes: int = 1) -> Explorer:
    """The routes of KV shares: schedule, ranks per node and nodes -> `rings`."""
    controls = {"schedule": _choice("schedule", schedule, tasp.schedules()), **_ranks(ranks, nodes)}

    def draw(schedule: str, ranks: int, nodes: int) -> Figure:
        return rings(_plan([1024], ranks, nodes, schedule), label=schedule)

    return Explorer(draw, controls)


def explore_mask(
    *,
    lengths: str = LENGTHS,
    layout: str = "zigzag",
    schedule: str = "ring",
    ranks: int = 4,
    rank: int = -1,
    step: int = -1,
) -> Explorer:
    """A packed sequence: documents, layout, ranks, one rank's steps -> `mask`; rank or step -1: all."""
    controls = {
        "lengths": ip.Text(value=lengths, description="documents", continuous_update=False),
        "window": _slider("window (0: none)", 0, 0, 1024),
        "causal": ip.Checkbox(value=True, description="causal"),
        "layout": _choice("layout", layout, tasp.layouts()),
        "schedule": _choice("schedule", schedule, tasp.schedules()),
        "ranks": _slider("ranks", ranks, 1, 16),
        "rank": _slider("rank (-1: all)", rank, -1, 15),
        "step": _slider("step (-1: all)", step, -1, 16),
    }

    def draw(
        lengths: str,
        window: int,
        causal: bool,
        layout: str,
        schedule: str,
        ranks: int,
        rank: int,
        step: int,
    ) -> Figure:
        docs = Documents.of(lengths_of(lengths), causal=causal, window=window or None)
        plan = tasp.plan(docs, ranks, schedule=schedule, layout=layout)
        one = None if rank < 0 else rank
        return mask(plan, rank=one, step=None if step < 0 else step)

    return Explorer(draw, controls)


def explore_schedule(
    *,
    schedule: str = "tasp",
    ranks: int = 5,
    nodes: int = 1,
    view: str = "hops",
    rank: int = 0,
    step: int = 0,
    lengths: str = LENGTHS,
) -> Explorer:
    """Step through a plan, or play it: its hops, or the tiles that a rank computes."""
    controls = {
        "schedule": _choice("schedule", schedule, tasp.schedules()),
        **_ranks(ranks, nodes),
        "view": _choice("show", view, VIEWS),
        "rank": _slider("tiles of rank", rank, 0, 63),
        "step": _slider("step", step, 0, 99),
    }
    play = ip.Play(value=step, min=0, max=99, interval=900, description="play the steps")
    ip.jslink((play, "value"), (controls["step"], "value"))

    def draw(schedule: str, ranks: int, nodes: int, view: str, rank: int, step: int) -> Figure:
        plan = _plan(lengths_of(lengths), ranks, nodes, schedule)
        last = max(0, plan.schedule.num_steps() - (view == "hops"))
        play.max = controls["step"].max = last  # a larger step becomes the last one
        if view == "hops":
            return hops(plan, step=min(step, last), label=schedule)
        return mask(plan, rank=rank, step=min(step, last))

    return Explorer(draw, controls, play)


def explore_balance(
    *,
    lengths: str = LENGTHS,
    schedule: str = "ring",
    ranks: int = 8,
    layout: str = "contiguous",
    other: str = "zigzag",
) -> Explorer:
    """The work of each rank: documents, ranks and two layouts -> `balance`."""
    controls = {
        "lengths": ip.Text(value=lengths, description="documents", continuous_update=False),
        "schedule": _choice("schedule", schedule, tasp.schedules()),
        "ranks": _slider("ranks", ranks, 1, 32),
        "layout": _choice("layout", layout, tasp.layouts()),
        "other": _choice("compare with", other, tasp.layouts()),
    }

    def draw(lengths: str, schedule: str, ranks: int, layout: str, other: str) -> Figure:
        docs = lengths_of(lengths)
        pairs = [
            (name, tasp.plan(docs, ranks, schedule=schedule, layout=name))
            for name in dict.fromkeys((layout, other))
        ]
        return balance(pairs)

    return Explorer(draw, controls)


def explore_machine(
    *,
    machine: str = "mi300x",
    tokens: int = 65536,
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    layout: str = "zigzag",
) -> Explorer:
    """How long attention takes: machine, tokens, heads -> `compare`, `timeline` of the fastest.

    It simulates CANDIDATES only, to redraw at once; `tasp_core.costs.select` compares all, in seconds.
    """
    sizes = [2**k for k in range(10, 23)]
    controls = {
        "machine": _choice("machine", machine, MACHINES),
        "tokens": ip.SelectionSlider(
            value=tokens, options=[(f"{n:,}", n) for n in sizes], description="tokens"
        ),
        "heads": _slider("query heads", heads, 1, 64),
        "kv_heads": _slider("KV heads", kv_heads, 1, 64),
        "head_dim": _choice("head dim", head_dim, (64, 128, 256)),
        "layout": _choice("layout", layout, tasp.layouts()),
        "backward": ip.Checkbox(value=False, description="backward pass"),
    }

    def draw(machine: str, tokens: int, layout: str, **sizes: Any) -> Figure:
        where = tasp.machine(machine)
        times = []
        for name in CANDIDATES:
            plan = tasp.plan([tokens], where.ranks, schedule=name, layout=layout, machine=where)
            label = f"{name} ({plan.schedule.limits.buffer:.3g} KV)"
            times.append((label, tasp.simulate(plan, where, **sizes)))
        best = min(times, key=lambda pair: pair[1].total_s)
        shown = [timeline([best])] if where.ranks <= MOST_RANKS else []
        return together([compare(times), *shown])

    return Explorer(draw, controls)
