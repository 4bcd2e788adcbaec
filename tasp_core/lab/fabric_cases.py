"""What `fabric bench` runs on emulated machines: rows, machines, methods."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from ..documents import Documents
from ..formulas import FORWARD
from ..plan import Plan, plan
from ..topology import Machine, machine
from .devices import CALL_S, CORE_TFLOPS
from .lengths import row_lengths
from .passes import MODES, Mode
from .wiring import PROCESSOR, emulated


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
    tflops: float = 0.0  # of each rank's own emulated device; 0: kernels share this machine's cores

    @property
    def docs(self) -> Documents:
        """Its documents."""
        return Documents.of(self.lengths, causal=self.causal)

    def on(self) -> Machine:
        """The emulated machine."""
        return emulated(machine(self.machine), link_mbit=self.link_mbit)

    def config(self) -> dict[str, Any]:
        """Its definition as a result file holds it."""
        return asdict(self) | {"lengths": list(self.lengths), "ranks": self.on().ranks}

    def device(self) -> dict[str, Any]:
        """What the simulator knows of emulated devices, if any: messages and merges go on beside them."""
        rates = {"tflops": self.tflops, "backward_tflops": self.tflops, "kernel_s": CALL_S}
        return rates | dict.fromkeys(("memory_gbps", *PROCESSOR), 0.0) if self.tflops else {}

    def with_ccr(self, ccr: float) -> Case:
        """The case on devices that compute `ccr` times as long as Ring's messages keep a link busy."""
        docs, ranks = self.docs, self.on().ranks
        pairs = float((docs.lengths.astype(float) ** 2).sum()) / (1 + self.causal)
        kv_bytes = docs.total / ranks * 2 * self.kv_heads * self.head_dim * 4
        ring_s = (ranks - 1) * kv_bytes / (self.on().link_gbps * 1e9)
        operations = FORWARD * pairs / ranks * self.heads * self.head_dim
        return replace(self, tflops=operations / (ccr * ring_s) / 1e12)

    def __str__(self) -> str:
        row = f"{sum(self.lengths)} tokens"
        row += f" in {len(self.lengths)} documents" if len(self.lengths) > 1 else ""
        mask, both = ("causal" if self.causal else "full"), ", forward and backward" * self.backward
        heads = f"heads {self.heads}:{self.kv_heads} of {self.head_dim}"
        device = f", devices of {self.tflops * 1e3:.3g} GFLOP/s" if self.tflops else ""
        return f"{self.group}: {self.on().name}, {row}, {mask}, {heads}{both}{device}"


FULL = (Method("Ring", "ring", "contiguous"), Method("TASP", "tasp", "contiguous"))
CAUSAL = (Method("Zigzag-Ring", "ring", "zigzag"), Method("Zigzag-TASP", "tasp", "zigzag"))
PACKED = (
    Method("Zigzag-Ring", "ring", "zigzag"),
    Method("Zigzag-TASP", "tasp", "zigzag"),
    Method("all_gather", "all_gather", "per_document"),
    Method("Ulysses", "ring", "balanced", intra=8),
    Method("SAP straight", "sap", "balanced", (("buffer_tokens", 4096),)),
    Method("SAP balanced", "sap", "balanced", (("buffer_tokens", 4096), ("relay", 6))),
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
    masks = ((False, FULL), (True, CAUSAL))
    mesh = [
        Case("mesh", "mesh8", mbit, (2240,), methods, causal, heads * (1 + causal), repeats=reps)
        for causal, methods in masks
        for mbit, heads, reps in ((20.0, 4, 3), (20.0, 16, 3), (50.0, 4, 5), (50.0, 16, 5))
    ]
    devices = [
        Case("devices", "mesh8", mbit, (2240,), methods, causal, 4, repeats=reps).with_ccr(ccr)
        for causal, methods in masks
        for mbit, reps, ccrs in ((20.0, 3, (0.05, 0.14, 0.5)), (50.0, 5, (0.14, 0.5, 1.0)))
        for ccr in ccrs
    ]
    talk = [
        Case("volume", "mesh8", 50.0, (tokens,), FULL, False, backward=True, modes=TALK, repeats=n)
        for tokens, n in ((2240, 4), (4480, 3), (8960, 2))
    ]
    row = tuple(row_lengths("sft", 16384, 1000).tolist())
    packed = Case(
        "packed", "mesh8", 50.0, row, PACKED, heads=8, kv_heads=2, backward=True, repeats=3
    )
    nodes = Case("nodes", "mesh4x2", 64.3, (2048,), NODES, False, 16, 16, repeats=5)
    own = [replace(case, tflops=CORE_TFLOPS) for case in (packed, nodes)]
    if quick:
        return [mesh[2], devices[3], talk[0], replace(own[1], lengths=(512,), repeats=2)]
    return [*mesh, *devices, *talk, packed, nodes, *own]
