"""The commands that predict: simulate; nothing is run."""

from __future__ import annotations

from typing import Any

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
    plan_from,
    show,
)  # fmt: skip
from .simulate import simulate
from .topology import machine as find_machine


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
