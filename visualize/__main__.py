"""Draw a demo result: `python -m visualize RESULT.json -o OUT.svg`.

Above are the rings of the plan labelled Zigzag-TASP (or else of the first plan with schedule tasp), below
the link use of all plans. If the file cannot be drawn, one sentence says why, and the exit code is 2.
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

SCHEMA, KIND, RINGS_OF = 1, "demo", "Zigzag-TASP"


def read(path: Path) -> list[tuple[str, Plan]]:
    """The labelled plans of a demo result.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a demo result, or one of its plans is not valid.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    kind = (data.get("schema"), data.get("kind")) if isinstance(data, dict) else type(data).__name__
    if kind != (SCHEMA, KIND):
        raise ValueError(
            f"{path} is not a demo result of schema {SCHEMA}: schema and kind are {kind}"
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
    """The rings of the labelled or first tasp plan, if there is one, above the links of all plans."""
    tasp = [pair for pair in plans if pair[0] == RINGS_OF]
    tasp += [pair for pair in plans if pair[1].schedule.name == "tasp"]
    above = [rings(plan, label=label) for label, plan in tasp[:1]]
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
