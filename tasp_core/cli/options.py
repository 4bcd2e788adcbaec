"""Options that commands share, and how their text becomes a plan."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from ..errors import PlanError
from ..planner import plan as make_plan
from ..planning.plan import Plan
from ..schedules import schedules
from ..sequence.documents import Documents
from ..sequence.layouts import layouts

Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
Ranks = Annotated[int, typer.Option(help="Degree of sequence parallelism.")]
Docs = Annotated[str, typer.Option(help="Document lengths in tokens, e.g. 137,2041,89 or 512x8.")]
ScheduleName = Annotated[str, typer.Option("--schedule", help=", ".join(schedules()))]
LayoutName = Annotated[str, typer.Option("--layout", help=", ".join(layouts()))]
MachineName = Annotated[
    str | None,
    typer.Option(help="mi300x, h100, a100_pcie, meshN, each with xU for U nodes, or a file."),
]
Options = Annotated[
    str, typer.Option("--options", help="Schedule options, e.g. blocks=15,twins=14.")
]
Intra = Annotated[int, typer.Option(help="Ranks a Ulysses group: heads are divided inside it.")]
Heads = Annotated[int, typer.Option(help="Query heads.")]
KvHeads = Annotated[int, typer.Option(help="Key/value heads.")]
HeadDim = Annotated[int, typer.Option(help="Head dim of q, k and v.")]
Dtype = Annotated[str, typer.Option(help="Of the tensors, for bytes.")]
Full = Annotated[bool, typer.Option("--full", help="Full mask instead of causal.")]
Window = Annotated[
    int | None, typer.Option(help="Sliding window in tokens, a token's own one too.")
]


def lengths(text: str) -> list[int]:
    """Document lengths from "137,2041,89" or "512x8" (eight of 512).

    >>> lengths("3,2x2")
    [3, 2, 2]
    """
    result: list[int] = []
    for item in filter(None, text.replace(" ", "").split(",")):
        size, _, times = item.partition("x")
        if not (size.isdigit() and (times.isdigit() or "x" not in item)):
            raise PlanError(f"cannot read document length {item!r}; write 137 or 512x8")
        result += [int(size)] * int(times or 1)
    return result


def read_options(text: str) -> dict[str, Any]:
    pairs = (item.partition("=") for item in filter(None, text.replace(" ", "").split(",")))
    words = {"true": True, "false": False}
    return {
        key: int(value) if value.isdigit() else words.get(value.lower(), value)
        for key, _, value in pairs
    }


def plan_from(
    docs: str,
    ranks: int,
    schedule: str,
    layout: str,
    machine: str | None,
    options: str,
    full: bool,
    window: int | None,
    intra: int,
) -> Plan:
    row = Documents.of(lengths(docs), causal=not full, window=window)
    return make_plan(
        row,
        ranks,
        schedule=schedule,
        layout=layout,
        machine=machine,
        intra=intra,
        schedule_options=read_options(options),
    )


def show(data: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(data) + "\n")
