"""Build the course from ../src, one py:percent file per unit.

    python -m tasp_course.build [--html] [UNIT ...]        a unit: "2" or "unit_02_a_schedule"; default all

    learner/UNIT.ipynb      without the cells tagged `solution`
    solved/UNIT.ipynb       without the code cells tagged `exercise` (the stubs)
    index.ipynb             src/index.py with the map of the units
    html/                   with --html: both executed, slides of the solved ones, the teacher's kit

Committed notebooks have no outputs; html/ is not committed.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import nbformat

from .sources import HERE, KINDS, ROOT, SOURCES, cells, tags, title, unit_map, units

TAGS = ("setup", "exercise", "solution", "check")
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
MAP = "<!-- units -->"


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
            {
                "cell_type": cell.cell_type,
                "id": f"cell-{number:02}",
                "source": text,
                "metadata": {"slideshow": {"slide_type": slide}}
                | ({"tags": marks} if marks else {}),
            }
            | ({"outputs": [], "execution_count": None} if cell.cell_type == "code" else {})
        )
    if source in (chain := units()):
        made.append(
            {
                "cell_type": "markdown",
                "id": "cell-next",
                "source": _next(source, chain),
                "metadata": {"slideshow": {"slide_type": "skip"}},
            }
        )
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
