"""The teacher's kit: run sheets with minutes, and common wrong answers with the hints of the checks.

The wrong answers are those of the tests, ../../tests/course_answers/unit_NN.py. There, `WRONG` maps the
name of a check to {what is wrong: answer}.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from .sources import MINUTES, ROOT, cells, minutes, title

Answers = dict[str, dict[str, Any]]


def wrong_answers(source: Path) -> Answers:
    """Wrong answers of a unit, by check.

    Raises:
        FileNotFoundError: this installation does not have the tests.
    """
    path = ROOT / "tests" / "course_answers" / f"{source.stem[:7]}.py"
    spec = spec_from_file_location(f"course_answers_{source.stem[5:7]}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"{path} lists a unit's wrong answers; it is missing")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return dict(module.WRONG)


def checks(source: Path) -> Any:
    """The module with the checks of a unit."""
    return import_module(f"tasp_course.{source.stem[:7]}")


def teachers_kit(sources: list[Path]) -> str:
    """Markdown: for each source its headings with minutes, and common wrong answers with the hints."""
    parts = ["# Teacher's kit", "Start times are minutes from the start of the unit."]
    for source in sources:
        parts.append(f"## {title(source)}: {minutes(source)} minutes")
        start, rows = 0, ["| start | minutes | part |", "|---|---|---|"]
        for cell in cells(source):
            for line in cell.source.splitlines() if cell.cell_type == "markdown" else ():
                if heading := MINUTES.match(line):
                    name = line.lstrip("# ").rpartition(" (")[0]
                    rows.append(f"| {start} | {heading[1]} | {name} |")
                    start += int(heading[1])
        parts.append("\n".join(rows))
        hints = []
        for name, answers in wrong_answers(source).items():
            check = getattr(checks(source), name)
            hints += [
                f"- `{name}`, {label}: {check(answer)!r}" for label, answer in answers.items()
            ]
        parts.append("Common wrong answers, and what the check says:\n\n" + "\n".join(hints))
    return "\n\n".join(parts) + "\n"
