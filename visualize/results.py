"""Results: figures from result files, one panel per quantity; each panel is of one kind, such as measured.

    results("visualize/recorded/packed.json") -> Figure

The `kind` in a file selects its views from VIEWS. To draw another kind of file, or other quantities, pass
the views:

    results(path, [View("methods", ("label",), "wall_s", "s", "measured", "wall time")])
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from .colours import SOFT
from .figure import Figure
from .marks import INNER, Drawing, Marks, disc, fit, gridline, number, rect, small, stack, text
from .timeline import seconds, ticks

How = Literal["measured", "modelled", "quoted", "counted"]
HOWS: dict[How, tuple[str, str]] = {  # colour, meaning
    "measured": (
        "#0072B2",
        "measured: a disc is one run, the bar is the median",
    ),
    "modelled": ("#D55E00", "modelled: computed from a machine's capacities"),
    "quoted": ("#4D4D4D", "quoted: from a publication"),
    "counted": ("#009E73", "counted: exact, from the plan"),
}
SCHEMA, NAMES, ROW = 1, 330.0, 24.0


class View(NamedTuple):
    """One panel of a result file.

    Attributes:
        rows: dotted path to the list of rows.
        label: keys of a row whose values name it, or a fixed text if it has no such keys.
        value: dotted path in a row to a number or a list of numbers; "" for the row itself.
        unit: "s", "B" or "".
        how: the kind of the numbers.
        title: of the panel.
    """

    rows: str
    label: tuple[str, ...]
    value: str
    unit: str
    how: How
    title: str


VIEWS: dict[str, tuple[View, ...]] = {
    "demo": (
        View(
            "attention",
            ("label",),
            "seconds",
            "s",
            "measured",
            "forward and backward pass, slowest rank, one run",
        ),
        View(
            "attention",
            ("label",),
            "bytes_sent.forward",
            "B",
            "counted",
            "bytes sent per rank in the forward pass; a disc is one rank",
        ),
        View(
            "attention",
            ("label",),
            "work_max_mean",
            "",
            "counted",
            "work of the busiest rank / mean",
        ),
    ),
    "packed": (
        View(
            "run.methods",
            ("layout", "schedule"),
            "wall_s",
            "s",
            "measured",
            "forward and backward pass, wall time",
        ),
        View(
            "planned",
            ("distribution", "ranks", "layout", "schedule"),
            "work_max_mean",
            "",
            "counted",
            "work of the busiest rank / mean, averaged over seeds",
        ),
    ),
    "steps": (
        View(
            "tables.buffers, balanced",
            ("distribution", "machine", "varied"),
            "total_s",
            "s",
            "modelled",
            "both passes of SAP, 256K tokens, by travelling KV in multiples of a rank's own",
        ),
        View(
            "tables.steps",
            ("distribution", "machine", "varied"),
            "total_s",
            "s",
            "modelled",
            "the same with 2 shards of travelling KV, by the number of communication steps",
        ),
    ),
    "overhead": (
        View(
            "plain_cpu_s",
            ("one process, run",),
            "",
            "s",
            "measured",
            "processor time of one process, attention not split",
        ),
        View("rank_cpu_s", ("rank",), "", "s", "measured", "processor time of each rank"),
    ),
    "capstone": (
        View("cases", ("name",), "seconds", "s", "measured", "communication on emulated machines"),
        View(
            "cases",
            ("name",),
            "modelled_s",
            "s",
            "modelled",
            "communication of the same passes, simulated",
        ),
    ),
}


def find(data: Any, path: str) -> Any:
    """The value at a dotted path.

    Raises:
        ValueError: naming the key that is missing.

    >>> find({"run": {"methods": [1]}}, "run.methods")
    [1]
    """
    for key in path.split(".") if path else ():
        if not isinstance(data, dict) or key not in data:
            has = ", ".join(data) if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"there is no {key!r} of {path!r}, only {has}")
        data = data[key]
    return data


def samples(data: Any, view: View) -> list[tuple[str, list[float]]]:
    """(label, values) of each row."""
    labelled = []
    for i, row in enumerate(find(data, view.rows)):
        named = [str(row[key]) for key in view.label if isinstance(row, dict) and key in row]
        values = find(row, view.value)
        numbers = values if isinstance(values, list) else [values]
        label = ", ".join(named) if named else f"{' '.join(view.label)} {i}"
        labelled.append((label, [float(x) for x in numbers]))
    return labelled


def show(value: float, unit: str) -> str:
    """A value with its unit.

    >>> show(0.0021, "s"), show(1.5, ""), show(2e6, "B")
    ('2.1 ms', '1.5', '2 MB')
    """
    if unit == "s":
        return seconds(value)
    for size, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if unit == "B" and abs(value) >= size:
            return f"{number(value / size)} {prefix}B"
    return f"{number(value)} {unit}".rstrip()


def middle(values: list[float]) -> float:
    """The median."""
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def _look(how: How) -> dict[str, Any]:
    """Bars differ not only in colour: modelled ones are hollow and dashed, quoted ones are hollow."""
    tone = HOWS[how][0]
    dash = "4 3" if how == "modelled" else ""
    hollow = how in ("modelled", "quoted")
    return {"fill": "#FFFFFF", "stroke": tone, "dash": dash} if hollow else {"fill": tone}


def _panel(rows: list[tuple[str, list[float]]], view: View) -> Drawing:
    """One row per label: a bar to the median, a disc for each sample."""
    tone = HOWS[view.how][0]
    last = max((x for _, values in rows for x in values), default=0.0) or 1.0
    scale, foot = (INNER - NAMES - 130) / last, 40 + ROW * len(rows)
    marks: Marks = [text(8j, view.title, size=16, anchor="start", bold=True)]
    for tick in ticks(last):
        x = NAMES + tick * scale
        marks.append(gridline(complex(x, 34), complex(x, foot)))
        marks.append(small(complex(x, foot + 12), show(tick, view.unit)))
    for i, (label, values) in enumerate(rows):
        y, most = 40 + ROW * (i + 0.5), middle(values)
        marks.append(
            text(complex(NAMES - 10, y), fit(label, NAMES - 14, size=13), size=13, anchor="end")
        )
        bar, value = complex(most * scale, 8), "median " * (len(values) > 1) + show(most, view.unit)
        tip = f"{label}: {show(most, view.unit)}"
        marks.append(rect(complex(NAMES, y - 4), bar, **_look(view.how), name="bar", tip=tip))
        if len(values) > 1:
            marks += [
                disc(complex(NAMES + x * scale, y), 4, fill="#FFFFFF", stroke=tone) for x in values
            ]
        marks.append(small(complex(NAMES + max(values) * scale + 12, y), value, "start"))
    return Drawing(INNER, foot + 24, marks)


def read(path: Path) -> dict[str, Any]:
    """The content of a result file.

    Raises:
        OSError: the file cannot be read.
        ValueError: not a result file.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA or "kind" not in data:
        raise ValueError(f'{path} is not a result file: it needs "schema": {SCHEMA} and a "kind"')
    return data


def results(path: str | Path, views: Sequence[View] = ()) -> Figure:
    """Draw a result file.

    Args:
        path: a JSON file written by the lab, with `schema` and `kind`.
        views: what to draw; default: what VIEWS has for the file's kind.

    Raises:
        OSError: the file cannot be read.
        ValueError: not a result file, a kind without views, or a view whose path is not in the file.
    """
    path = Path(path)
    data = read(path)
    chosen = views or VIEWS.get(data["kind"], ())
    if not chosen:
        raise ValueError(
            f"{path} is of kind {data['kind']!r}; known are {', '.join(VIEWS)}; pass views"
        )
    parts: list[Drawing] = []
    summary = []
    for how, (_, meaning) in HOWS.items():
        views_of_kind = [v for v in chosen if v.how == how]
        if views_of_kind:
            head = [
                rect(2j, 16 + 16j, **_look(how)),
                text(24 + 10j, meaning, anchor="start", fill=SOFT),
            ]
            parts.append(Drawing(INNER, 20, head))
        for view in views_of_kind:
            rows = samples(data, view)
            parts.append(_panel(rows, view))
            shown = ", ".join(f"{label} {show(middle(x), view.unit)}" for label, x in rows)
            summary.append(f"{view.title} ({how}): {shown}")
    environment = data.get("environment", {})
    processor, cores = (
        environment.get("processor", "unknown processor"),
        environment.get("cores", "?"),
    )
    title = f"{path.name}: results of kind {data['kind']}"
    measured = any(view.how == "measured" for view in chosen)
    note = f"Measured on {processor}, {cores} cores." if measured else "Nothing here was measured."
    return Figure(
        title,
        (note,),
        f"{title}. {'. '.join(summary)}.",
        stack(parts, gap=14),
    )
