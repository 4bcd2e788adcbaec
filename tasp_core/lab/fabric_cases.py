"""What `fabric bench` runs on emulated machines: rows, machines, methods."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..documents import Documents
from ..plan import Plan, plan
from ..topology import Machine, machine
from .lengths import row_lengths
from .passes import MODES, Mode
from .wiring import emulated


@dataclass(frozen=True)
class Method:
    """One way to compute a row."""

    label: str
    schedule: str
    layout: str
    options: tuple[tuple[str, Any], ...] = ()
    intra: int = 1

    def plan(self, docs: Documents, on: Machine) -> Plan:
        """Its plan."""
        return plan(
            docs, on.ranks, schedule=self.schedule, layout=self.layout, machine=on,
            intra=self.intra, schedule_options=dict(self.options),
        )  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One row on one emulated machine by several methods; the first is what the others are held to."""

    group: str  # a goal is about all cases of a group
    machine: str
    link_mbit: float
    lengths: tuple[int, ...]
    methods: tuple[Method, ...]
    causal: bool = True
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 64
    backward: bool = False
    modes: tuple[Mode, ...] = MODES
    repeats: int = 5

    @property
    def docs(self) -> Documents:
        """Its documents."""
        return Documents.of(self.lengths, causal=self.causal)

    def on(self) -> Machine:
        """The emulated machine."""
        return emulated(machine(self.machine), link_mbit=self.link_mbit)

    def __str__(self) -> str:
        row = f"{sum(self.lengths)} tokens"
        row += f" in {len(self.lengths)} documents" if len(self.lengths) > 1 else ""
        mask, both = ("causal" if self.causal else "full"), ", forward and backward" * self.backward
        heads = f"heads {self.heads}:{self.kv_heads} of {self.head_dim}"
        return f"{self.group}: {self.on().name}, {row}, {mask}, {heads}{both}"


FULL = (Method("Ring", "ring", "contiguous"), Method("TASP", "tasp", "contiguous"))
CAUSAL = (Method("Zigzag-Ring", "ring", "zigzag"), Method("Zigzag-TASP", "tasp", "zigzag"))
PACKED = (
    Method("Zigzag-Ring", "ring", "zigzag"),
    Method("Zigzag-TASP", "tasp", "zigzag"),
    Method("all_gather", "all_gather", "per_document"),
    Method("Ulysses", "ring", "balanced", intra=8),
    Method("SAP balanced", "sap", "balanced", (("buffer_tokens", 4096),)),
)
NODES = (
    Method("Ring", "ring", "contiguous"),
    Method("TASP K_mxu", "tasp", "contiguous"),
    Method("TASP paths", "tasp_paths", "contiguous"),
    Method("TASP rails", "tasp_rails", "contiguous"),
    Method("double ring", "double_ring", "contiguous"),
    Method("wave", "wave", "contiguous"),
    Method("paced", "paced", "contiguous"),
)
TALK: tuple[Mode, ...] = ("communication",)


def cases(*, quick: bool = False) -> list[Case]:
    """All cases, or one small one of each kind."""
    mesh = [
        Case("mesh", "mesh8", mbit, (2240,), methods, causal, heads * (1 + causal), repeats=reps)
        for causal, methods in ((False, FULL), (True, CAUSAL))
        for mbit, all_heads, reps in ((20.0, (4, 16), 3), (50.0, (4, 8, 32), 5))
        for heads in all_heads
    ]
    talk = [
        Case(
            "volume", "mesh8", 50.0, (tokens,), FULL, False, backward=True, modes=TALK, repeats=reps
        )
        for tokens, reps in ((2240, 4), (4480, 3), (8960, 2))
    ]
    packed = Case(
        "packed", "mesh8", 50.0, tuple(row_lengths("sft", 16384, 1000).tolist()), PACKED, heads=8,
        kv_heads=2, backward=True, repeats=3,
    )  # fmt: skip
    nodes = Case("nodes", "mesh4x2", 64.3, (2048,), NODES, False, 16, 16, repeats=5)
    if quick:
        return [mesh[2], talk[0], replace(nodes, lengths=(512,), repeats=2)]
    return [*mesh, *talk, packed, nodes]
