"""The sources of the course, ../src/unit_NN_title.py in py:percent: cells, tags, titles, minutes, index.

Minutes are in headings: "## Play (8 min)". This module is below build, export and kit, which import it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jupytext

HERE = Path(__file__).resolve().parents[1]
ROOT = HERE.parent
SOURCES = HERE / "src"
KINDS = ("learner", "solved")
MINUTES = re.compile(r"^#+ .*\((\d+) min\)\s*$", re.MULTILINE)


def units(names: list[str] | None = None) -> list[Path]:
    """Sources of all units, or of those with these numbers or stems.

    Raises:
        ValueError: a name that is not a unit.
    """
    course = sorted(SOURCES.glob("unit_[0-9][0-9]_*.py"))
    if not names:
        return course
    chosen = {n: [p for p in course if n == p.stem or n.zfill(2) == p.stem[5:7]] for n in names}
    if missing := [name for name, paths in chosen.items() if not paths]:
        raise ValueError(f"no unit {missing[0]!r}; there are {', '.join(p.stem for p in course)}")
    return [path for paths in chosen.values() for path in paths]


def cells(source: Path) -> list[Any]:
    """All cells of a source, exercises and solutions."""
    return list(jupytext.read(source, fmt="py:percent").cells)


def tags(cell: Any) -> list[str]:
    """The tags of a cell."""
    return list(cell.metadata.get("tags", []))


def minutes(source: Path) -> int:
    """Minutes of a unit, added up over its headings."""
    prose = "\n".join(c.source for c in cells(source) if c.cell_type == "markdown")
    return sum(map(int, MINUTES.findall(prose)))


def title(source: Path) -> str:
    """The unit's title, "2. A schedule is a table"."""
    return cells(source)[0].source.splitlines()[0].removeprefix("# ")


def unit_table() -> str:
    """The table of the index: unit, minutes, what a learner can do afterwards, what it needs.

    Raises:
        ValueError: a unit whose first cell lacks "Afterwards you can ..." or "Needs ...".
    """
    rows = ["| unit | minutes | afterwards you can | needs |", "|---|---|---|---|"]
    for source in units():
        prose = " ".join(cells(source)[0].source.split())
        after = re.search(r"Afterwards you can (.*?)\.( |$)", prose)
        needs = re.search(r"Needs (.*?)\.( |$)", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", prose))
        if not (after and needs):
            raise ValueError(
                f"{source.name} must say 'Afterwards you can ...' and 'Needs ...' first"
            )
        link = f"[{title(source)}](learner/{source.stem}.ipynb)"
        rows.append(f"| {link} | {minutes(source)} | {after[1]} | {needs[1]} |")
    return "\n".join(rows)
