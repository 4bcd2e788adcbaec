"""What the emulated runs are held to, and whether they meet it; the table of one case.

CCR is computation alone over the communication alone of the case's first method (the baseline).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

Row = dict[str, Any]
DEVICES, CORES = "a device a rank", "ranks share cores"


class Goal(NamedTuple):
    """A figure that must be at least (or at most) so much, and the worst that was found."""

    text: str
    needs: float
    found: float
    at_least: bool = True

    @property
    def met(self) -> bool:
        return self.found >= self.needs if self.at_least else self.found <= self.needs

    def __str__(self) -> str:
        sign, verdict = ">=" if self.at_least else "<=", "met" if self.met else "NOT MET"
        return f"{verdict:<8}{self.found:>7.3f} (needs {sign} {self.needs:g})  {self.text}"


def median(row: Row, name: str) -> float:
    """Median of a method's samples of that name; NaN if it was not measured."""
    return float(np.median(row["samples"].get(name, [np.nan])))


def total(row: Row, mode: str) -> float:
    """Median seconds of all passes of a mode."""
    names = [name for name in row["samples"] if name.startswith(mode)]
    return float(np.median(np.sum([row["samples"][n] for n in names], axis=0))) if names else np.nan


def ccr(case: Row) -> float:
    """Computation over communication of the baseline, all passes."""
    return total(case["methods"][0], "computation") / total(case["methods"][0], "communication")


def gaps(cases: Iterable[Row]) -> list[tuple[str, float]]:
    """(what, predicted over measured - 1) of communication and of whole passes."""
    return [
        (f"{case['title']}, {row['label']}, {name}", row["predicted"][name] / median(row, name) - 1)
        for case in cases
        for row in case["methods"]
        for name in row["samples"]
        if not name.startswith("computation")
    ]


def _over(case: Row, name: str, label: str, other: str | None = None) -> float:
    """How many times longer `other` (default: the baseline) takes than the method `label`."""
    rows = {row["label"]: row for row in case["methods"]}
    slow = rows[other] if other else case["methods"][0]
    return total(slow, name) / total(rows[label], name)


def _volume(volume: list[Row]) -> Iterable[Goal]:
    talk = [(c, row) for c in volume for row in c["methods"][1:]]
    for direction, needs in (("forward", 6.3), ("backward", 5.5)):
        name = f"communication {direction}"
        over = [median(r, name) / r["predicted"][f"bound {direction}"] for _, r in talk]
        gain = [median(c["methods"][0], name) / median(r, name) for c, r in talk]
        if direction == "forward":
            yield Goal("TASP's communication over the link bound, forward", 1.1, max(over), False)
        yield Goal(f"TASP's communication against Ring's, {direction}", needs, min(gain))


def _mesh(mesh: list[Row], where: str) -> Iterable[Goal]:
    """End to end on kernels that run as `where` says."""
    for mbit, share in ((20.0, 0.85), (50.0, 0.8)):
        here = [c for c in mesh if c["config"]["link_mbit"] == mbit]
        for label in sorted({c["methods"][1]["label"] for c in here}):
            some = [c for c in here if c["methods"][1]["label"] == label]
            gains = [(ccr(c), _over(c, "whole", label)) for c in some]
            text = f"{label} end to end, {mbit:g} Mbit/s, {where}"
            if mbit == 20.0:
                yield Goal(f"{text}, least CCR", 6.3, min(gains)[1])
            parts = [g / min(7, 1 / x) for x, g in gains if 0.05 <= x <= 1.0]
            if parts:
                yield Goal(f"{text}, of min(7, 1/CCR), CCR 0.05 to 1", share, min(parts))


def _own(case: Row) -> str:
    """On what its kernels run."""
    return DEVICES if case["config"].get("tflops") else CORES


def _packed(case: Row) -> Iterable[Goal]:
    wanted = {"Zigzag-Ring": 3.0, "Zigzag-TASP": 1.5, "Ulysses": 1.2, "all_gather": 1.2}
    for other, needs in wanted.items():
        found = _over(case, "whole", "SAP balanced", other)
        yield Goal(f"packed row, balanced SAP against {other}, {_own(case)}", needs, found)


def _nodes(case: Row) -> Iterable[Goal]:
    rows = {row["label"]: row for row in case["methods"]}
    for other in [label for label in rows if label not in ("wave", "paced")]:
        for mode in ("communication", "whole"):
            found = _over(case, mode, "wave", other)
            if mode == "whole" or _own(case) == CORES:
                on = f", {_own(case)}" * (mode == "whole")
                yield Goal(f"two nodes, wave against {other}, {mode}{on}", 1.0, found)
    worst = max(abs(gap) for _, gap in gaps([case]))
    text = f"two nodes, prediction against measurement, worst, {_own(case)}"
    yield Goal(text, 0.1, worst, False)
    if _own(case) == DEVICES:
        return
    name = "communication forward"
    over = median(rows["wave"], name) / rows["wave"]["predicted"]["bound forward"]
    yield Goal("two nodes, wave's communication over the cut bound", 1.15, over, False)


def judge(cases: list[Row]) -> list[Goal]:
    """Every goal that these results have a figure for."""
    groups: dict[str, list[Row]] = {}
    for case in cases:
        groups.setdefault(case["config"]["group"], []).append(case)
    goals = [*_volume(groups["volume"])] if "volume" in groups else []
    goals += _mesh(groups.get("devices", []), DEVICES)
    goals += _mesh(groups.get("mesh", []), CORES)
    goals += [g for c in groups.get("packed", []) for g in _packed(c)]
    goals += [g for c in groups.get("nodes", []) for g in _nodes(c)]
    for where in (DEVICES, CORES):
        errors = [abs(gap) for _, gap in gaps(c for c in cases if _own(c) == where)]
        if errors:
            text = f"prediction against measurement, {where}"
            goals.append(Goal(f"{text}, median", 0.1, float(np.median(errors)), False))
            goals.append(Goal(f"{text}, worst", 0.2, max(errors), False))
    return goals


def table(case: Row) -> str:
    """Measured medians (least..most), bound, prediction, CCR and speed-up over the first method."""
    lines = [
        f"{'':<15}{'communication s':>21} {'/bound':>7} {'predicted':>9} {'computation':>11} {'CCR':>6} "
        f"{'whole s':>21} {'predicted':>9} {'x':>6}"
    ]
    base = case["methods"][0]
    for row in case["methods"]:
        for way in ("forward", "backward"):
            talk, alone, whole = (
                f"{mode} {way}" for mode in ("communication", "computation", "whole")
            )
            if talk not in row["samples"]:
                continue
            bound = row["predicted"][f"bound {way}"] or np.nan
            cells = [
                f"{row['label']:<13} {way[0]}", f"{_span(row, talk):>21}",
                f"{median(row, talk) / bound:>7.2f}", f"{row['predicted'][talk]:>9.3f}",
                f"{median(row, alone):>11.3f}", f"{median(row, alone) / median(base, talk):>6.2f}",
                f"{_span(row, whole):>21}", f"{row['predicted'][whole]:>9.3f}",
                f"{median(base, whole) / median(row, whole):>6.2f}",
            ]  # fmt: skip
            lines.append(" ".join(cells))
    return "\n".join(lines).replace("nan", "  -")


def _span(row: Row, name: str) -> str:
    samples = row["samples"].get(name)
    return f"{np.median(samples):.3f} [{min(samples):.3f} {max(samples):.3f}]" if samples else "-"
