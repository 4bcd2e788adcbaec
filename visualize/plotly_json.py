"""Marks as plotly JSON, without plotly: with tool tips and, for frames, a slider and a play button.

Marks of one layer with the same look (shape, colours, line) are one trace. In a layer, traces are in the
order in which their looks first appear, so one look cannot be both above and below another; texts are on
top.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .colours import INK
from .marks import Drawing, Mark, head

CURVE = 5  # straight segments of an arrow's shaft
Frames = Sequence[tuple[str, Drawing]]
Trace = dict[str, Any]
PLACE = {"start": "middle right", "middle": "middle center", "end": "middle left"}


def _short(value: float) -> float:
    return round(value) if abs(value - round(value)) < 0.05 else round(value, 1)


def _outline(m: Mark) -> list[complex]:
    """The points of a line, or of a closed outline."""
    a, b = m.points[0], m.points[-1]
    if m.shape == "rect":
        return [a, complex(b.real, a.imag), b, complex(a.real, b.imag), a]
    if m.shape == "shape":
        return [*m.points, a]
    if m.shape == "line":
        return list(m.points)
    _, p, q = head(m)
    end, control = (p + q) / 2, m.points[1]
    parts = (i / CURVE for i in range(CURVE + 1))
    return [(1 - t) ** 2 * a + 2 * t * (1 - t) * control + t * t * end for t in parts]


def _strokes(paths: list[list[complex]], fill: str, stroke: str, width: float, dash: str) -> Trace:
    """One trace of lines or closed outlines, with gaps between them."""
    x: list[float | None] = []
    y: list[float | None] = []
    for path in paths:
        x += [*(_short(z.real) for z in path), None]
        y += [*(_short(z.imag) for z in path), None]
    line: dict[str, Any] = {"color": stroke, "width": width} if stroke != "none" else {"width": 0}
    if dash:
        line["dash"] = ",".join(f"{part}px" for part in dash.split())
    trace: Trace = {"x": x, "y": y, "mode": "lines", "line": line, "hoverinfo": "skip"}
    return trace if fill == "none" else {**trace, "fill": "toself", "fillcolor": fill}


def _points(marks: list[Mark]) -> Trace:
    """The position of each mark: its own point, or the middle of its outline."""
    middles = []
    for m in marks:
        path = m.points if m.shape in ("disc", "text") else _outline(m)
        middle = (path[0] + path[2]) / 2 if m.shape == "rect" else path[len(path) // 2]
        middles.append(middle)
    return {"x": [_short(z.real) for z in middles], "y": [_short(z.imag) for z in middles]}


def _discs(marks: list[Mark]) -> Trace:
    m = marks[0]
    look = {"size": 2 * _short(m.size), "color": m.fill, "opacity": 1}
    look["line"] = {"color": m.stroke, "width": m.width}
    return {**_points(marks), "mode": "markers", "marker": look, "hoverinfo": "skip"}


def _texts(marks: list[Mark]) -> Trace:
    escaped = [m.words.replace("<", "&lt;") for m in marks]
    return {
        **_points(marks),
        "mode": "text",
        "text": [f"<b>{t}</b>" if m.bold else t for m, t in zip(marks, escaped, strict=True)],
        "textposition": [PLACE[m.anchor] for m in marks],
        "textfont": {"size": [_short(m.size) for m in marks], "color": [m.fill for m in marks]},
        "hoverinfo": "skip",
    }


def _tips(marks: list[Mark]) -> Trace:
    marker = {"size": 14, "opacity": 0}
    look = {"mode": "markers", "marker": marker, "hovertemplate": "%{text}<extra></extra>"}
    return {**_points(marks), "text": [m.tip.replace("<", "&lt;") for m in marks], **look}


def traces(marks: list[Mark]) -> list[Trace]:
    """The traces of a drawing."""
    looks: dict[tuple[Any, ...], list[Mark]] = {}
    for m in sorted(marks, key=lambda m: m.layer):
        if m.shape != "text":
            size = m.size if m.shape == "disc" else 0
            closed = {"rect": "shape"}.get(m.shape, m.shape)
            key = (m.layer, closed, m.fill, m.stroke, m.width, m.dash, size)
            looks.setdefault(key, []).append(m)
    made = []
    for (_, shape, fill, stroke, width, dash, _), same in looks.items():
        if shape == "disc":
            made.append(_discs(same))
            continue
        made.append(_strokes([_outline(m) for m in same], fill, stroke, width, dash))
        if shape == "arrow":
            heads = [[*(corners := head(m)), corners[0]] for m in same]
            made.append(_strokes(heads, stroke, "none", 0, ""))
    upright = [m for m in marks if m.shape == "text" and not m.turn]
    tips = [m for m in marks if m.tip]
    made += [make(group) for make, group in ((_texts, upright), (_tips, tips)) if group]
    return [{"type": "scatter", **t} for t in made]


def _turned(m: Mark) -> dict[str, Any]:
    z = m.points[0]
    return {
        "x": _short(z.real),
        "y": _short(z.imag),
        "text": m.words,
        "textangle": m.turn,
        "showarrow": False,
        "font": {"size": _short(m.size), "color": m.fill},
    }


def _controls(names: list[str], active: int) -> dict[str, Any]:
    """A slider over the frames, and a play button."""
    at_once = {"mode": "immediate", "transition": {"duration": 0}}
    jump = {**at_once, "frame": {"duration": 0, "redraw": False}}
    play = {**at_once, "frame": {"duration": 900, "redraw": False}, "fromcurrent": True}
    steps = [{"label": n, "method": "animate", "args": [[n], jump]} for n in names]
    buttons = [
        {"label": "play", "method": "animate", "args": [None, play]},
        {"label": "stop", "method": "animate", "args": [[None], jump]},
    ]
    low = {"y": 0, "yanchor": "top", "pad": {"t": 8}}
    menu = {"type": "buttons", "direction": "left", "showactive": False, "buttons": buttons}
    return {
        "sliders": [{**low, "x": 0.14, "len": 0.84, "active": active, "steps": steps}],
        "updatemenus": [{**low, "x": 0.02, "xanchor": "left", **menu}],
    }


def figure(drawing: Drawing, title: str, frames: Frames = (), active: int = 0) -> dict[str, Any]:
    """Plotly JSON of a drawing.

    Args:
        frames: (name, drawing) pairs of the same size, of which `drawing` is number `active`.
    """
    data = traces(drawing.marks)
    width, height = round(drawing.width), round(drawing.height)
    axis = {"visible": False, "fixedrange": True}
    layout: dict[str, Any] = {
        "width": width,
        "height": height + 90 * bool(frames),
        "showlegend": False,
        "margin": {"l": 0, "r": 0, "t": 0, "b": 90 * bool(frames)},
        "xaxis": {**axis, "range": [0, width]},
        "yaxis": {**axis, "range": [height, 0]},
        "plot_bgcolor": "#FFFFFF",
        "paper_bgcolor": "#FFFFFF",
        "hovermode": "closest",
        "font": {"family": "sans-serif", "color": INK},
        "meta": {"description": title},
        "annotations": [_turned(m) for m in drawing.marks if m.turn],
    }
    made: dict[str, Any] = {"data": data, "layout": layout}
    if frames:
        named = {name: traces(d.marks) for name, d in frames}
        most = max(map(len, (data, *named.values())))
        empty = {"type": "scatter", "x": [], "y": []}
        for padded in (data, *named.values()):
            padded += [empty] * (most - len(padded))
        changing = [i for i in range(most) if any(t[i] != data[i] for t in named.values())]
        made["frames"] = [
            {"name": name, "data": [t[i] for i in changing], "traces": changing}
            for name, t in named.items()
        ]
        layout |= _controls(list(named), active)
    return made
