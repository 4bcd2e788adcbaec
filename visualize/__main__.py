"""Draw a demo result: `python -m visualize RESULT.json -o OUT.svg`.

Above, the rings of the row labelled Zigzag-TASP (or else of the first plan with schedule tasp);
below, the links of all rows. Exit code 2, with one sentence, if there is nothing to draw.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tasp_core import Plan

from .figure import Figure, together
from .links import links
from .rings import rings

SCHEMA, KIND, STAR = 1, "demo", "Zigzag-TASP"


def read(path: Path) -> list[tuple[str, Plan]]:
    """The labelled plans of a demo result.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a demo result, or one of its plans is none.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    found = (
        (data.get("schema"), data.get("kind")) if isinstance(data, dict) else type(data).__name__
    )
    if found != (SCHEMA, KIND):
        raise ValueError(
            f"{path} is not a demo result of schema {SCHEMA}: schema and kind are {found}"
        )
    rows = data.get("attention")
    if not isinstance(rows, list) or not rows:
        raise ValueError(f'{path} has no rows under "attention"')
    plans = []
    for number, row in enumerate(rows):
        if not isinstance(row, dict) or not {"label", "plan"} <= row.keys():
            raise ValueError(f'{path}: row {number} of "attention" lacks a label or a plan')
        try:
            plans.append((str(row["label"]), Plan.from_json(json.dumps(row["plan"]))))
        except ValueError as error:
            raise ValueError(f"{path}: row {row['label']!r}: {error}") from None
    return plans


def picture(plans: Sequence[tuple[str, Plan]]) -> Figure:
    """The rings of the plan to look at first, if there is one, above the links of all."""
    star = [pair for pair in plans if pair[0] == STAR]
    star += [pair for pair in plans if pair[1].schedule.name == "tasp"]
    above = [rings(plan, label=label) for label, plan in star[:1]]
    return together([*above, links(plans)])


def main(argv: Sequence[str] | None = None) -> int:
    """Read, draw, write; the exit code."""
    parser = argparse.ArgumentParser(
        "python -m visualize", description="Draw a demo result as SVG."
    )
    parser.add_argument("result", type=Path, help="JSON file written by the demo")
    parser.add_argument("-o", "--out", type=Path, required=True, help="SVG file to write")
    args = parser.parse_args(argv)
    try:
        picture(read(args.result)).save(args.out)
    except (OSError, ValueError) as error:
        print(f"nothing drawn: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
