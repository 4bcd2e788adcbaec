"""Some cases of `fabric bench` measured again, put among the others of an earlier result file.

A case carries the time, the environment and the calibrated rates it was measured and predicted with
(`stamp`), so that a file says of each case which run it is of. A case of an earlier file is kept where
`cases()` still defines it as it was then: the same row, machine and methods under the same title.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..errors import PlanError
from .fabric_cases import Case
from .results import environment, read

Row = dict[str, Any]


def stamp(rates: dict[str, Any]) -> Row:
    """When, where and with which calibrated rates a case is measured."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"measured_at": now, "environment": environment(), "rates": rates}


def chosen(every: list[Case], text: str) -> list[Case]:
    """The cases whose title has `text` in it, in capitals or not.

    Raises:
        PlanError: there is none; the groups that titles start with are named.
    """
    found = [case for case in every if text.lower() in str(case).lower()]
    if not found:
        groups = ", ".join(f"{group}:" for group in dict.fromkeys(case.group for case in every))
        raise PlanError(
            f"no case has {text!r} in its title; titles start with {groups} a whole one is "
            f"{str(every[0])!r}"
        )
    return found


def earlier_cases(path: Path, *, quick: bool) -> list[Row]:
    """The cases of a result file, stamped; none where there is no file yet.

    Files from before cases had stamps were measured in one run: its environment and rates are theirs.

    Raises:
        PlanError: no result file of `fabric bench`, or one of other cases (quick ones or all).
    """
    if not path.exists():
        return []
    data = read(path, "fabric")
    try:
        was_quick = data["config"]["quick"]
        run = {
            "measured_at": None, "environment": data["environment"], "rates": data["config"]["rates"],
        }  # fmt: skip
        found = [run | case for case in data["cases"]]
    except (KeyError, TypeError) as error:
        raise PlanError(f"{path} is not a whole result file: {error!r}") from None
    if was_quick != quick:
        kinds = ("all cases", "the quick cases")
        raise PlanError(f"{path} is of {kinds[was_quick]}, asked was for some of {kinds[quick]}")
    return found


def still_defined(every: list[Case], earlier: Iterable[Row]) -> dict[str, Row]:
    """Those of earlier cases that are defined now as they were then, by title."""
    now = {str(case): json.loads(json.dumps(case.config())) for case in every}
    return {row["title"]: row for row in earlier if now.get(row["title"]) == row["config"]}
