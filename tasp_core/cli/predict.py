"""The commands that predict, simulate and select; nothing is run."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..costs.select import select
from ..costs.simulate import simulate
from ..machines.presets import machine as find_machine
from ..sequence.documents import Documents
from .options import (
    Docs,
    Dtype,
    Full,
    HeadDim,
    Heads,
    Intra,
    Json,
    KvHeads,
    LayoutName,
    MachineName,
    Options,
    Ranks,
    ScheduleName,
    Window,
    lengths,
    plan_from,
    show,
)


def simulate_command(
    docs: Docs = "4096",
    ranks: Ranks = 4,
    schedule: ScheduleName = "tasp",
    layout: LayoutName = "zigzag",
    machine: MachineName = None,
    options: Options = "",
    full: Full = False,
    window: Window = None,
    intra: Intra = 1,
    heads: Heads = 8,
    kv_heads: KvHeads = 2,
    head_dim: HeadDim = 64,
    dtype: Dtype = "bfloat16",
    json_: Json = False,
) -> None:
    """Predict a plan's seconds and bytes on a machine, forward and backward; nothing is run."""
    p = plan_from(docs, ranks, schedule, layout, machine, options, full, window, intra)
    sizes: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    on = find_machine(machine) if machine else None
    passes = {
        name: simulate(p, on, **sizes, dtype=dtype, backward=backward)
        for name, backward in (("forward", False), ("backward", True))
    }
    if json_:
        show({name: timeline.as_dict() for name, timeline in passes.items()})
    else:
        print("\n\n".join(map(str, passes.values())))


def select_command(
    docs: Docs = "4096",
    machine: Annotated[str, typer.Option(help="As for simulate.")] = "mesh4",
    full: Full = False,
    heads: Heads = 8,
    kv_heads: KvHeads = 2,
    head_dim: HeadDim = 64,
    dtype: Dtype = "bfloat16",
    backward: Annotated[bool, typer.Option("--backward", help="Forward and backward.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Show all candidates.")] = False,
    json_: Json = False,
) -> None:
    """Choose schedule, layout and Ulysses degree for a row on a machine by simulating all."""
    sizes: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    row = Documents.of(lengths(docs), causal=not full)
    choice = select(row, find_machine(machine), **sizes, dtype=dtype, backward=backward)
    if json_:
        show(choice.as_dict())
    else:
        print(choice)
        if explain:
            print("\n" + choice.explain())
