"""Build the course from ../src, one py:percent file a unit.

    python -m tasp_course.build [--html] [UNIT ...]        a unit: "2" or "unit_02_a_schedule"; default all

    learner/UNIT.ipynb      without the cells tagged `solution`
    solved/UNIT.ipynb       without the code cells tagged `exercise` (the stubs)
    index.ipynb             src/index.py with the map of the units
    html/                   with --html: both executed, slides of the solved ones, the teacher's kit

Committed notebooks have no outputs; html/ is not committed. Minutes stand in headings: "## Play (8 min)".
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import jupytext
import nbformat

HERE = Path(__file__).resolve().parents[1]
ROOT = HERE.parent
SOURCES = HERE / "src"
KINDS = ("learner", "solved")
TAGS = ("setup", "exercise", "solution", "check")
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
MAP = "<!-- units -->"
MINUTES = re.compile(r"^#+ .*\((\d+) min\)\s*$", re.MULTILINE)


def units(names: list[str] | None = None) -> list[Path]:
    """Sources of the units, or of those named by number or stem.

    Raises:
        ValueError: a name that is no unit's.
    """
    found = sorted(SOURCES.glob("unit_[0-9][0-9]_*.py"))
    if not names:
        return found
    chosen = {n: [p for p in found if n == p.stem or n.zfill(2) == p.stem[5:7]] for n in names}
    if missing := [name for name, paths in chosen.items() if not paths]:
        raise ValueError(f"no unit {missing[0]!r}; there are {', '.join(p.stem for p in found)}")
    return [path for paths in chosen.values() for path in paths]


def cells(source: Path) -> list[Any]:
    """The source's cells, all of them."""
    return list(jupytext.read(source, fmt="py:percent").cells)


def tags(cell: Any) -> list[str]:
    """Tags of a cell."""
    return list(cell.metadata.get("tags", []))


def minutes(source: Path) -> int:
    """Minutes of a unit, added up over its headings."""
    prose = "\n".join(c.source for c in cells(source) if c.cell_type == "markdown")
    return sum(map(int, MINUTES.findall(prose)))


def title(source: Path) -> str:
    """The unit's title, "2. A schedule is a table"."""
    return cells(source)[0].source.splitlines()[0].removeprefix("# ")


def unit_map() -> str:
    """The table of the index: unit, minutes, what one can do afterwards, what one needs."""
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


def _next(source: Path, chain: list[Path]) -> str:
    """Where a learner goes from here."""
    after = chain[chain.index(source) + 1 :]
    link = f"Next: [{title(after[0])}]({after[0].stem}.ipynb). " if after else ""
    return f"{link}[All units](../index.ipynb)"


def notebook(source: Path, kind: str) -> Any:
    """The learner's or solved notebook of a source, without outputs; the same for the same source."""
    dropped = "solution" if kind == "learner" else "exercise"
    kept = [c for c in cells(source) if dropped not in tags(c) or c.cell_type == "markdown"]
    made = []
    for number, cell in enumerate(kept):
        marks = [t for t in tags(cell) if t in TAGS]
        if kind == "learner" and cell.cell_type == "code":
            marks.append("raises-exception")  # a learner's error does not stop the run
        text = cell.source.replace(MAP, unit_map()) if MAP in cell.source else cell.source
        head = cell.cell_type == "markdown" and text.startswith("#")
        alone = {"exercise", "solution"} & set(marks) or re.search(
            r"visualize\.\w+\(|explore_\w+\(", text
        )
        slide = "slide" if head else "subslide" if cell.cell_type == "code" and alone else "-"
        made.append(
            {"cell_type": cell.cell_type, "id": f"cell-{number:02}", "source": text,
             "metadata": {"slideshow": {"slide_type": slide}} | ({"tags": marks} if marks else {})}
            | ({"outputs": [], "execution_count": None} if cell.cell_type == "code" else {})
        )  # fmt: skip
    if source in (chain := units()):
        made.append(
            {"cell_type": "markdown", "id": "cell-next", "source": _next(source, chain),
             "metadata": {"slideshow": {"slide_type": "skip"}}}
        )  # fmt: skip
    whole = {"cells": made, "metadata": {"kernelspec": KERNEL, "language_info": {"name": "python"}}}
    return nbformat.from_dict({**whole, "nbformat": 4, "nbformat_minor": 5})


def outputs(names: list[str] | None = None) -> dict[Path, str]:
    """The committed notebooks' paths and texts."""
    made = {
        HERE / kind / f"{source.stem}.ipynb": notebook(source, kind)
        for source in units(names)
        for kind in KINDS
    }
    made[HERE / "index.ipynb"] = notebook(SOURCES / "index.py", "learner")
    return {path: nbformat.writes(nb) + "\n" for path, nb in made.items()}


def main() -> None:
    """Build what the command line asks for."""
    ask = argparse.ArgumentParser(description="Build the course's notebooks from their sources.")
    ask.add_argument("units", nargs="*", help="numbers or names; default: all")
    ask.add_argument(
        "--html", action="store_true", help="execute; write HTML, slides, teacher's kit"
    )
    given = ask.parse_args()
    try:
        made = outputs(given.units)
    except ValueError as error:
        ask.exit(2, f"{error}\n")
    for path, text in made.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        sys.stdout.write(f"{path.relative_to(ROOT)}\n")
    if given.html:
        from .export import export

        for path in export([source.stem for source in units(given.units)]):
            sys.stdout.write(f"{path.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
