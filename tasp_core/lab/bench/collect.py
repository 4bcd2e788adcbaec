"""Collect result files into one table, a row for every figure, each labelled measured, modelled or bound.

Its columns are the fields of `Figure`. Raw samples stay in the files.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...errors import PlanError
from ...result_file import SCHEMA
from .emulated_cases import case_ccr


class Figure(NamedTuple):
    """One row of the table.

    Attributes:
        ccr: the case's computation-to-communication ratio, where it is known.
        quantity: e.g. "whole forward". how: measured, modelled or bound.
        unit: of median, least and most: "s".
        samples: how many there are; `median`, `least` and `most` are theirs.
    """

    file: str
    kind: str
    case: str
    method: str
    tokens: int
    ranks: int
    ccr: float | None
    quantity: str
    how: str
    unit: str
    samples: int
    median: float
    least: float
    most: float


Head = tuple[str, str, str, str, int, int, float | None]  # file to ccr


def _figures(head: Head, method: dict[str, Any]) -> Iterator[Figure]:
    """Measured samples and predictions of one method."""
    for name, values in method["samples"].items():
        middle = float(np.median(values))
        yield Figure(*head, name, "measured", "s", len(values), middle, min(values), max(values))
    for name, value in method["predicted"].items():
        if value is not None and (method["samples"] or name.startswith("bound")):
            how = "bound" if name.startswith("bound") else "modelled"
            yield Figure(*head, name, how, "s", 1, value, value, value)


def _fabric(file: str, data: dict[str, Any]) -> Iterator[Figure]:
    for case in data["cases"]:
        config = case["config"]
        tokens, ranks, ratio = sum(config["lengths"]), config["ranks"], case_ccr(case)
        known = None if np.isnan(ratio) else ratio
        for method in case["methods"]:
            head = file, "fabric", case["title"], method["label"], tokens, ranks, known
            yield from _figures(head, method)


def _attention(file: str, data: dict[str, Any]) -> Iterator[Figure]:
    config = data["config"]
    baseline = data["rows"][0]["label"]
    ratios = {row["tokens"]: row["ccr"] for row in data["rows"] if row["label"] == baseline}
    ranks, mask = config["ranks"], "causal" if config["causal"] else "full"
    case = f"{ranks} ranks, {mask}, heads {config['heads']}:{config['kv_heads']}"
    for row in data["rows"]:
        tokens = row["tokens"]
        head = file, "attention", case, row["label"], tokens, ranks, ratios[tokens]
        yield from _figures(head, row)


def _packed(file: str, data: dict[str, Any]) -> Iterator[Figure]:
    config = data["run"]["config"]
    for method in data["run"]["methods"]:
        label = f"{method['layout']} {method['schedule']}"
        head = file, "packed", "SFT row", label, config["tokens"], config["ranks"], None
        yield from _figures(head, {"samples": {"whole": method["wall_s"]}, "predicted": {}})


READERS = {"fabric": _fabric, "attention": _attention, "packed": _packed}


def collect(folder: Path) -> tuple[list[Figure], dict[str, str]]:
    """All figures of a folder's result files, and why other files were passed over.

    Raises:
        PlanError: no folder, or no result file in it.
    """
    table: list[Figure] = []
    skipped: dict[str, str] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            data = json.loads(path.read_text())
            kind = data.get("kind") if data.get("schema") == SCHEMA else None
            if kind in READERS:
                table += READERS[kind](path.name, data)
            else:
                skipped[path.name] = (
                    f"kind {kind!r} has no seconds to compare" if kind else "no result file"
                )
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            skipped[path.name] = f"cannot be read: {type(error).__name__} {error}"
    if not table:
        raise PlanError(f"no result file of kind {', '.join(READERS)} in {str(folder)!r}")
    return table, skipped


def write_csv(table: list[Figure], path: Path) -> Path:
    """Write the table; the path."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Figure._fields)
        writer.writerows(table)
    return path
