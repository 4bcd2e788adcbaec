"""What `fabric bench` runs on emulated machines (rows, machines, methods), and the goals it is held to.

CCR is computation alone over the communication alone of the case's first method (the baseline).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ...costs.bytes import FORWARD
from ...machines.machine import Machine
from ...machines.presets import machine
from ...planner import plan
from ...planning.plan import Plan
from ...sequence.documents import Documents
from ..emulation.device import CALL_S, CORE_TFLOPS
from ..emulation.wiring import PROCESSOR, emulated
from .document_lengths import row_lengths
from .passes import MODES, Mode


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
            docs,
            on.ranks,
            schedule=self.schedule,
            layout=self.layout,
            machine=on,
            intra=self.intra,
            schedule_options=dict(self.options),
        )


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


Row = dict[str, Any]
DEVICES, CORES = "a device a rank", "ranks share cores"


class Goal(NamedTuple):
    """A figure that must be at least (or at most) so much, and the worst that was found."""

    text: str
    needs: float
    found: float
    at_least: bool = True

    @property
    def met(self) -> bool:
        return self.found >= self.needs if self.at_least else self.found <= self.needs

    def __str__(self) -> str:
        sign, verdict = ">=" if self.at_least else "<=", "met" if self.met else "NOT MET"
        return f"{verdict:<8}{self.found:>7.3f} (needs {sign} {self.needs:g})  {self.text}"


def median(row: Row, name: str) -> float:
    """Median of a method's samples of that name; NaN if it was not measured."""
    return float(np.median(row["samples"].get(name, [np.nan])))


def total(row: Row, mode: str) -> float:
    """Median seconds of all passes of a mode."""
    names = [name for name in row["samples"] if name.startswith(mode)]
    return float(np.median(np.sum([row["samples"][n] for n in names], axis=0))) if names else np.nan


def ccr(case: Row) -> float:
    """Computation over communication of the baseline, all passes."""
    return total(case["methods"][0], "computation") / total(case["methods"][0], "communication")


def gaps(cases: Iterable[Row]) -> list[tuple[str, float]]:
    """(what, predicted over measured - 1) of communication and of whole passes."""
    return [
        (f"{case['title']}, {row['label']}, {name}", row["predicted"][name] / median(row, name) - 1)
        for case in cases
        for row in case["methods"]
        for name in row["samples"]
        if not name.startswith("computation")
    ]


def _over(case: Row, name: str, label: str, other: str | None = None) -> float:
    """How many times longer `other` (default: the baseline) takes than the method `label`."""
    rows = {row["label"]: row for row in case["methods"]}
    slow = rows[other] if other else case["methods"][0]
    return total(slow, name) / total(rows[label], name)


def _volume(volume: list[Row]) -> Iterable[Goal]:
    talk = [(c, row) for c in volume for row in c["methods"][1:]]
    for direction, needs in (("forward", 6.3), ("backward", 5.5)):
        name = f"communication {direction}"
        over = [median(r, name) / r["predicted"][f"bound {direction}"] for _, r in talk]
        gain = [median(c["methods"][0], name) / median(r, name) for c, r in talk]
        if direction == "forward":
            yield Goal("TASP's communication over the link bound, forward", 1.1, max(over), False)
        yield Goal(f"TASP's communication against Ring's, {direction}", needs, min(gain))


def _mesh(mesh: list[Row], where: str) -> Iterable[Goal]:
    """End to end on kernels that run as `where` says."""
    for mbit, share in ((20.0, 0.85), (50.0, 0.8)):
        here = [c for c in mesh if c["config"]["link_mbit"] == mbit]
        for label in sorted({c["methods"][1]["label"] for c in here}):
            some = [c for c in here if c["methods"][1]["label"] == label]
            gains = [(ccr(c), _over(c, "whole", label)) for c in some]
            text = f"{label} end to end, {mbit:g} Mbit/s, {where}"
            if mbit == 20.0:
                yield Goal(f"{text}, least CCR", 6.3, min(gains)[1])
            parts = [g / min(7, 1 / x) for x, g in gains if 0.05 <= x <= 1.0]
            if parts:
                yield Goal(f"{text}, of min(7, 1/CCR), CCR 0.05 to 1", share, min(parts))


def _own(case: Row) -> str:
    """On what its kernels run."""
    return DEVICES if case["config"].get("tflops") else CORES


def _packed(case: Row) -> Iterable[Goal]:
    wanted = {"Zigzag-Ring": 3.0, "Zigzag-TASP": 1.5, "Ulysses": 1.2, "all_gather": 1.2}
    for other, needs in wanted.items():
        found = _over(case, "whole", "SAP balanced", other)
        yield Goal(f"packed row, balanced SAP against {other}, {_own(case)}", needs, found)


def _nodes(case: Row) -> Iterable[Goal]:
    rows = {row["label"]: row for row in case["methods"]}
    for other in [label for label in rows if label not in ("wave", "paced")]:
        for mode in ("communication", "whole"):
            found = _over(case, mode, "wave", other)
            if mode == "whole" or _own(case) == CORES:
                on = f", {_own(case)}" * (mode == "whole")
                yield Goal(f"two nodes, wave against {other}, {mode}{on}", 1.0, found)
    worst = max(abs(gap) for _, gap in gaps([case]))
    text = f"two nodes, prediction against measurement, worst, {_own(case)}"
    yield Goal(text, 0.1, worst, False)
    if _own(case) == DEVICES:
        return
    name = "communication forward"
    over = median(rows["wave"], name) / rows["wave"]["predicted"]["bound forward"]
    yield Goal("two nodes, wave's communication over the cut bound", 1.15, over, False)


def judge(cases: list[Row]) -> list[Goal]:
    """Every goal that these results have a figure for."""
    groups: dict[str, list[Row]] = {}
    for case in cases:
        groups.setdefault(case["config"]["group"], []).append(case)
    goals = [*_volume(groups["volume"])] if "volume" in groups else []
    goals += _mesh(groups.get("devices", []), DEVICES)
    goals += _mesh(groups.get("mesh", []), CORES)
    goals += [g for c in groups.get("packed", []) for g in _packed(c)]
    goals += [g for c in groups.get("nodes", []) for g in _nodes(c)]
    for where in (DEVICES, CORES):
        errors = [abs(gap) for _, gap in gaps(c for c in cases if _own(c) == where)]
        if errors:
            text = f"prediction against measurement, {where}"
            goals.append(Goal(f"{text}, median", 0.1, float(np.median(errors)), False))
            goals.append(Goal(f"{text}, worst", 0.2, max(errors), False))
    return goals


def table(case: Row) -> str:
    """Measured medians (least..most), bound, prediction, CCR and speed-up over the first method."""
    lines = [
        f"{'':<15}{'communication s':>21} {'/bound':>7} {'predicted':>9} {'computation':>11} {'CCR':>6} "
        f"{'whole s':>21} {'predicted':>9} {'x':>6}"
    ]
    base = case["methods"][0]
    for row in case["methods"]:
        for way in ("forward", "backward"):
            talk, alone, whole = (
                f"{mode} {way}" for mode in ("communication", "computation", "whole")
            )
            if talk not in row["samples"]:
                continue
            bound = row["predicted"][f"bound {way}"] or np.nan
            cells = [
                f"{row['label']:<13} {way[0]}",
                f"{_span(row, talk):>21}",
                f"{median(row, talk) / bound:>7.2f}",
                f"{row['predicted'][talk]:>9.3f}",
                f"{median(row, alone):>11.3f}",
                f"{median(row, alone) / median(base, talk):>6.2f}",
                f"{_span(row, whole):>21}",
                f"{row['predicted'][whole]:>9.3f}",
                f"{median(base, whole) / median(row, whole):>6.2f}",
            ]
            lines.append(" ".join(cells))
    return "\n".join(lines).replace("nan", "  -")


def _span(row: Row, name: str) -> str:
    samples = row["samples"].get(name)
    return f"{np.median(samples):.3f} [{min(samples):.3f} {max(samples):.3f}]" if samples else "-"
