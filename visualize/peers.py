"""Peers: seconds of every method on every packed sequence of a comparison, one line per sequence.

    peers(table) -> Figure        table: tasp_core.lab.bench.collect

Measured medians of the forward and the backward pass together, on a logarithmic axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .colours import PALE, SOFT, colour
from .curves import Axis
from .figure import Figure
from .marks import INNER, Drawing, Marks, disc, fit, legend, line, small, stack, text
from .timeline import seconds

NAMES, RIGHT, ROW, TOP = 260.0, 250.0, 46.0, 34.0
OURS = ("SAP", "HSAP")


def totals(table: Sequence[Any]) -> dict[str, dict[str, float]]:
    """Seconds of both passes together, by case and method."""
    result: dict[str, dict[str, float]] = {}
    for r in table:
        compared = r.kind == "fabric" and r.case.startswith("peers") and r.how == "measured"
        if compared and r.quantity.startswith("whole"):
            by_method = result.setdefault(r.case, {})
            by_method[r.method] = by_method.get(r.method, 0.0) + r.median
    return result


def _named(case: str) -> str:
    """The kind of packed sequence and the machine, of a case's title.

    >>> _named("peers, sft: mesh4x2@64.3Mbit, 8192 tokens in 9 documents, causal")
    'sft, mesh4x2'
    """
    kind, _, rest = case.removeprefix("peers, ").partition(": ")
    return f"{kind}, {rest.partition('@')[0]}"


def peers(table: Sequence[Any]) -> Figure | None:
    """Draw a comparison; None where the table has none."""
    cases = totals(table)
    if not cases:
        return None
    methods = list(dict.fromkeys(m for by_method in cases.values() for m in by_method))
    tone = {m: colour(i) for i, m in enumerate(methods)}
    axis = Axis.over([x for c in cases.values() for x in c.values()], INNER - NAMES - RIGHT)
    foot = TOP + ROW * len(cases)
    marks: Marks = []
    for tick in axis.ticks():
        x = NAMES + axis.at(tick)
        marks.append(line(complex(x, TOP - 6), complex(x, foot), stroke=PALE))
        marks.append(small(complex(x, foot + 14), seconds(tick)))
    facts = []
    for i, (case, by_method) in enumerate(cases.items()):
        y = TOP + ROW * (i + 0.5)
        marks.append(text(complex(NAMES - 16, y), fit(_named(case), NAMES - 20), anchor="end"))
        ends = (complex(NAMES + axis.at(f(by_method.values())), y) for f in (min, max))
        marks.append(line(*ends, stroke=SOFT))
        for method, value in sorted(by_method.items(), key=lambda item: item[0] in OURS):
            at = complex(NAMES + axis.at(value), y)
            marks.append(disc(at, 7 + 2 * (method in OURS), fill=tone[method], name="measured"))
        ours = [value for method, value in by_method.items() if method in OURS]
        others = [value for method, value in by_method.items() if method not in OURS]
        gain = f"{min(others) / min(ours):.2f} x as fast" if ours and others else ""
        marks.append(small(complex(INNER - RIGHT + 16, y), gain, "start"))
        facts.append(
            f"{_named(case)}: " + ", ".join(f"{m} {seconds(x)}" for m, x in by_method.items())
        )
    head = small(complex(INNER - RIGHT + 16, TOP - 14), "(H)SAP, against the best other", "start")
    body = Drawing(INNER, foot + 26, [head, *marks])
    keys = legend([(tone[m], m) for m in methods])
    title = "Seconds of forward and backward pass on packed sequences, emulated nodes and devices"
    notes = ("Discs are measured medians; the axis is logarithmic.",)
    return Figure(title, notes, "; ".join(facts), stack([keys, body], gap=12))
