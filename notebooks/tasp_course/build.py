"""Build the course from ../src, one py:percent file per unit.

    python -m tasp_course.build [--html] [UNIT ...]        a unit: "2" or "unit_02_a_schedule"; default all

    learner/UNIT.ipynb      without the cells tagged `solution`
    solved/UNIT.ipynb       without the code cells tagged `exercise` (the stubs)
    index.ipynb             src/index.py with the table of the units
    html/                   only with --html: learner and solved notebooks executed, as pages; the solved
                            ones as slides; the teacher's kit

Notebooks are committed without outputs; html/ is not committed.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import nbformat

from .sources import HERE, KINDS, ROOT, SOURCES, cells, tags, title, unit_table, units

TAGS = ("setup", "exercise", "solution", "check")
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
UNITS = "<!-- units -->"  # where the index has the table of the units


def _links(source: Path, course: list[Path]) -> str:
    """The links below a unit: to the next unit, and to the index."""
    after = course[course.index(source) + 1 :]
    link = f"Next: [{title(after[0])}]({after[0].stem}.ipynb). " if after else ""
    return f"{link}[All units](../index.ipynb)"


def notebook(source: Path, kind: str) -> Any:
    """The learner's or the solved notebook of a source, without outputs.

    Deterministic: cell ids are numbers. `kind` is one of KINDS.
    """
    dropped = "solution" if kind == "learner" else "exercise"
    kept = [c for c in cells(source) if dropped not in tags(c) or c.cell_type == "markdown"]
    made = []
    for number, cell in enumerate(kept):
        marks = [t for t in tags(cell) if t in TAGS]
        if kind == "learner" and cell.cell_type == "code":
            marks.append("raises-exception")  # a learner's error does not stop the run
        text = cell.source.replace(UNITS, unit_table()) if UNITS in cell.source else cell.source
        is_heading = cell.cell_type == "markdown" and text.startswith("#")
        on_its_own = {"exercise", "solution"} & set(marks) or re.search(
            r"visualize\.\w+\(|explore_\w+\(", text
        )
        below = "subslide" if cell.cell_type == "code" and on_its_own else "-"
        slide = "slide" if is_heading else below
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
    if source in (course := units()):
        made.append(
            {
                "cell_type": "markdown",
                "id": "cell-next",
                "source": _links(source, course),
                "metadata": {"slideshow": {"slide_type": "skip"}},
            }
        )
    metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    return nbformat.from_dict(
        {"cells": made, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    )


def outputs(names: list[str] | None = None) -> dict[Path, str]:
    """Paths and contents of the notebooks of these units (default: all), and of the index.

    Raises:
        ValueError: a name that is not a unit.
    """
    notebooks = {
        HERE / kind / f"{source.stem}.ipynb": notebook(source, kind)
        for source in units(names)
        for kind in KINDS
    }
    notebooks[HERE / "index.ipynb"] = notebook(SOURCES / "index.py", "learner")
    return {path: nbformat.writes(nb) + "\n" for path, nb in notebooks.items()}


def main() -> None:
    """Build what the command line asks for."""
    parser = argparse.ArgumentParser(description="Build the course's notebooks from their sources.")
    parser.add_argument("units", nargs="*", help="numbers or names; default: all")
    parser.add_argument(
        "--html", action="store_true", help="execute; write HTML, slides, teacher's kit"
    )
    args = parser.parse_args()
    try:
        texts = outputs(args.units)
    except ValueError as error:
        parser.exit(2, f"{error}\n")
    for path, text in texts.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        sys.stdout.write(f"{path.relative_to(ROOT)}\n")
    if args.html:
        from .export import export

        for path in export([source.stem for source in units(args.units)]):
            sys.stdout.write(f"{path.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
