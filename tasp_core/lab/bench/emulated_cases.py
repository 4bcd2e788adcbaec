"""What `fabric bench` runs on emulated machines, and the goals that its results are compared with.

A case is a packed sequence, a machine and methods; the first method is the baseline. Its CCR is the
baseline's computation over the baseline's communication, each measured alone.
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
from .document_lengths import NAMES, row_lengths
from .figures import Result, ccr, median, total
from .passes import DIRECTIONS, MODES, Mode


@dataclass(frozen=True)
class Method:
    """One plan's settings, as a result file names them."""

    label: str
    schedule: str
    layout: str
    options: tuple[tuple[str, Any], ...] = ()
    intra: int = 1

    def plan(self, docs: Documents, on: Machine) -> Plan:
        """The plan for these documents on this machine."""
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
    """One packed sequence on one emulated machine by several methods, the baseline first."""

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
    tflops: float = 0.0  # of each rank's emulated device; 0: kernels share this machine's cores

    @property
    def docs(self) -> Documents:
        """The documents of the packed sequence."""
        return Documents.of(self.lengths, causal=self.causal)

    def on(self) -> Machine:
        """The emulated machine."""
        return emulated(machine(self.machine), link_mbit=self.link_mbit)

    def config(self) -> dict[str, Any]:
        """The definition as a result file has it."""
        return asdict(self) | {"lengths": list(self.lengths), "ranks": self.on().ranks}

    def device(self) -> dict[str, Any]:
        """Fields of a Machine that emulated devices set, if there are any: messages cost them no time."""
        rates = {"tflops": self.tflops, "backward_tflops": self.tflops, "kernel_s": CALL_S}
        return rates | dict.fromkeys(("memory_gbps", *PROCESSOR), 0.0) if self.tflops else {}

    def with_ccr(self, ccr: float) -> Case:
        """The case on devices whose computation lasts `ccr` times as long as Ring's communication."""
        docs, ranks = self.docs, self.on().ranks
        pairs = float((docs.lengths.astype(float) ** 2).sum()) / (1 + self.causal)
        kv_bytes = docs.total / ranks * 2 * self.kv_heads * self.head_dim * 4
        ring_s = (ranks - 1) * kv_bytes / (self.on().link_gbps * 1e9)
        operations = FORWARD * pairs / ranks * self.heads * self.head_dim
        return replace(self, tflops=operations / (ccr * ring_s) / 1e12)

    def __str__(self) -> str:
        """The title, which tells cases apart in result files."""
        tokens = f"{sum(self.lengths)} tokens"
        tokens += f" in {len(self.lengths)} documents" if len(self.lengths) > 1 else ""
        mask, both = ("causal" if self.causal else "full"), ", forward and backward" * self.backward
        heads = f"heads {self.heads}:{self.kv_heads} of {self.head_dim}"
        device = f", devices of {self.tflops * 1e3:.3g} GFLOP/s" if self.tflops else ""
        return f"{self.group}: {self.on().name}, {tokens}, {mask}, {heads}{both}{device}"


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


def peers(node_size: int) -> tuple[Method, ...]:
    """The methods that HSAP is published against, and the others of this package, on nodes of ranks.

    USP is Ulysses inside nodes and a ring between them; HSAP is Ulysses inside nodes and SAP between them.
    """
    return (
        Method("Zigzag-Ring", "ring", "zigzag"),
        Method("Zigzag-TASP", "tasp", "zigzag"),
        Method("all-gather", "all_gather", "per_document"),
        Method("DistFlashAttn", "helper", "contiguous"),
        Method("Ulysses", "ring", "balanced", intra=8),
        Method("USP", "ring", "zigzag", intra=node_size),
        Method("SAP", "sap", "balanced"),
        Method("HSAP", "sap", "balanced", intra=node_size),
    )


# packed sequences of 256K tokens, every document a sixteenth as long, on devices that are as much slower as
# to keep what an H100 computes (640 TFLOP/s) while its NIC (50 GB/s) carries a document's KV
PEER_TOKENS, SHORTER, PEER_TFLOPS = 1 << 18, 16, 0.005
# a few long documents, each followed by many short ones, as where images stand among texts
LONG_AND_SHORT = (2500, *[32] * 20) * 5


def peer_cases() -> list[Case]:
    """Every kind of packed sequence on two nodes of four ranks, and one on four nodes of two."""
    rows = {
        n: tuple(np.maximum(1, row_lengths(n, PEER_TOKENS, 0) // SHORTER).tolist()) for n in NAMES
    }
    rows["long and short"] = LONG_AND_SHORT
    places = [("mesh4x2", 4, name) for name in rows]
    places += [("mesh2x4", 2, "sft")]
    modes: tuple[Mode, ...] = ("whole",)
    return [
        Case(
            f"peers, {name}",
            machine,
            64.3,
            rows[name],
            peers(node_size),
            heads=8,
            kv_heads=8,
            backward=True,
            modes=modes,
            repeats=1,
            tflops=PEER_TFLOPS,
        )
        for machine, node_size, name in places
    ]


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
    communication: tuple[Mode, ...] = ("communication",)
    volume = [
        Case(
            "volume",
            "mesh8",
            50.0,
            (tokens,),
            FULL,
            False,
            backward=True,
            modes=communication,
            repeats=n,
        )
        for tokens, n in ((2240, 4), (4480, 3), (8960, 2))
    ]
    lengths = tuple(row_lengths("sft", 16384, 1000).tolist())
    packed = Case(
        "packed", "mesh8", 50.0, lengths, PACKED, heads=8, kv_heads=2, backward=True, repeats=3
    )
    nodes = Case("nodes", "mesh4x2", 64.3, (2048,), NODES, False, 16, 16, repeats=5)
    on_devices = [replace(case, tflops=CORE_TFLOPS) for case in (packed, nodes)]
    if quick:
        return [mesh[2], devices[3], volume[0], replace(on_devices[1], lengths=(512,), repeats=2)]
    return [*mesh, *devices, *volume, packed, nodes, *on_devices, *peer_cases()]


DEVICES, CORES = "a device a rank", "ranks share cores"


class Goal(NamedTuple):
    """A bound of a figure, and the worst value that was measured (`found`, as in result files)."""

    text: str
    needs: float
    found: float
    at_least: bool = True

    @property
    def met(self) -> bool:
        """Whether the worst value is within the bound (NaN is not)."""
        return self.found >= self.needs if self.at_least else self.found <= self.needs

    def __str__(self) -> str:
        sign, verdict = ">=" if self.at_least else "<=", "met" if self.met else "NOT MET"
        return f"{verdict:<8}{self.found:>7.3f} (needs {sign} {self.needs:g})  {self.text}"


def goals_of(cases: list[Result]) -> list[Goal]:
    """Every goal that these results have a figure for."""
    groups: dict[str, list[Result]] = {}
    for case in cases:
        groups.setdefault(case["config"]["group"], []).append(case)
    goals = [*_volume(groups["volume"])] if "volume" in groups else []
    goals += _mesh(groups.get("devices", []), DEVICES)
    goals += _mesh(groups.get("mesh", []), CORES)
    goals += [goal for case in groups.get("packed", []) for goal in _packed(case)]
    goals += [goal for case in groups.get("nodes", []) for goal in _nodes(case)]
    goals += _peers([case for name in groups if name.startswith("peers") for case in groups[name]])
    for where in (DEVICES, CORES):
        errors = [abs(gap) for _, gap in gaps(c for c in cases if _kernels_on(c) == where)]
        if errors:
            text = f"prediction against measurement, {where}"
            goals.append(Goal(f"{text}, median", 0.1, float(np.median(errors)), False))
            goals.append(Goal(f"{text}, worst", 0.2, max(errors), False))
    return goals


def _volume(cases: list[Result]) -> Iterable[Goal]:
    pairs = [(case["methods"][0], tasp) for case in cases for tasp in case["methods"][1:]]
    for direction, needs in (("forward", 6.3), ("backward", 5.5)):
        name = f"communication {direction}"
        if direction == "forward":
            over = [median(tasp, name) / tasp["predicted"]["bound forward"] for _, tasp in pairs]
            yield Goal("TASP's communication over the link bound, forward", 1.1, max(over), False)
        gain = min(median(ring, name) / median(tasp, name) for ring, tasp in pairs)
        yield Goal(f"TASP's communication against Ring's, {direction}", needs, gain)


def _mesh(cases: list[Result], where: str) -> Iterable[Goal]:
    """Whole passes of TASP against Ring, with kernels that run as `where` says."""
    for mbit, part in ((20.0, 0.85), (50.0, 0.8)):
        at_rate = [case for case in cases if case["config"]["link_mbit"] == mbit]
        for label in sorted({case["methods"][1]["label"] for case in at_rate}):
            gains = [
                (case_ccr(case), _gain(case, "whole", label))
                for case in at_rate
                if case["methods"][1]["label"] == label
            ]
            text = f"{label} end to end, {mbit:g} Mbit/s, {where}"
            if mbit == 20.0:
                yield Goal(f"{text}, least CCR", 6.3, min(gains)[1])
            parts = [gain / min(7, 1 / ccr) for ccr, gain in gains if 0.05 <= ccr <= 1.0]
            if parts:
                yield Goal(f"{text}, of min(7, 1/CCR), CCR 0.05 to 1", part, min(parts))


def _packed(case: Result) -> Iterable[Goal]:
    needed = {"Zigzag-Ring": 3.0, "Zigzag-TASP": 1.5, "Ulysses": 1.2, "all_gather": 1.2}
    for other, needs in needed.items():
        text = f"packed row, balanced SAP against {other}, {_kernels_on(case)}"
        yield Goal(text, needs, _gain(case, "whole", "SAP balanced", other))


def _nodes(case: Result) -> Iterable[Goal]:
    methods, where = {m["label"]: m for m in case["methods"]}, _kernels_on(case)
    for other in [label for label in methods if label not in ("wave", "paced")]:
        if where == CORES:
            gain = _gain(case, "communication", "wave", other)
            yield Goal(f"two nodes, wave against {other}, communication", 1.0, gain)
        gain = _gain(case, "whole", "wave", other)
        yield Goal(f"two nodes, wave against {other}, whole, {where}", 1.0, gain)
    worst = max(abs(gap) for _, gap in gaps([case]))
    yield Goal(f"two nodes, prediction against measurement, worst, {where}", 0.1, worst, False)
    if where == CORES:
        name = "communication forward"
        over = median(methods["wave"], name) / methods["wave"]["predicted"]["bound forward"]
        yield Goal("two nodes, wave's communication over the cut bound", 1.15, over, False)


def _peers(cases: list[Result]) -> Iterable[Goal]:
    """HSAP against its published competitors, over all their cases; SAP where that is quicker."""
    for other in ("Ulysses", "DistFlashAttn", "USP") if cases else ():
        gains = [
            max(_gain(case, "whole", ours, other) for ours in ("HSAP", "SAP")) for case in cases
        ]
        yield Goal(f"HSAP or SAP against {other}, packed sequences on nodes", 1.0, min(gains))


def _kernels_on(case: Result) -> str:
    return DEVICES if case["config"].get("tflops") else CORES


def _gain(case: Result, mode: str, label: str, other: str | None = None) -> float:
    """How many times longer `other` (default: the baseline) takes than the method `label`."""
    methods = {m["label"]: m for m in case["methods"]}
    slow = methods[other] if other else case["methods"][0]
    return total(slow, mode) / total(methods[label], mode)


def case_ccr(case: Result) -> float:
    """The CCR of a case: that of its baseline."""
    return ccr(case["methods"][0], case["methods"][0])


def gaps(cases: Iterable[Result]) -> list[tuple[str, float]]:
    """(what, predicted over measured - 1) of communication and of whole passes."""
    return [
        (f"{case['title']}, {m['label']}, {name}", m["predicted"][name] / median(m, name) - 1)
        for case in cases
        for m in case["methods"]
        for name in m["samples"]
        if not name.startswith("computation")
    ]


def table(case: Result) -> str:
    """Measured medians [least most], bound, prediction, CCR and speed-up over the baseline."""
    lines = [
        f"{'':<15}{'communication s':>21} {'/bound':>7} {'predicted':>9} {'computation':>11} {'CCR':>6} "
        f"{'whole s':>21} {'predicted':>9} {'x':>6}"
    ]
    baseline = case["methods"][0]
    for method in case["methods"]:
        for direction in DIRECTIONS:
            communication, computation, both = (f"{mode} {direction}" for mode in MODES)
            if both in method["samples"] and communication not in method["samples"]:
                gain = median(baseline, both) / median(method, both)
                lines.append(
                    f"{method['label']:<13} {direction[0]} {'':>46} {_span(method, both):>21} "
                    f"{method['predicted'][both]:>9.3f} {gain:>6.2f}"
                )
            if communication not in method["samples"]:
                continue
            measured = {name: median(method, name) for name in (communication, computation, both)}
            bound = method["predicted"][f"bound {direction}"] or np.nan
            cells = [
                f"{method['label']:<13} {direction[0]}",
                f"{_span(method, communication):>21}",
                f"{measured[communication] / bound:>7.2f}",
                f"{method['predicted'][communication]:>9.3f}",
                f"{measured[computation]:>11.3f}",
                f"{measured[computation] / median(baseline, communication):>6.2f}",
                f"{_span(method, both):>21}",
                f"{method['predicted'][both]:>9.3f}",
                f"{median(baseline, both) / measured[both]:>6.2f}",
            ]
            lines.append(" ".join(cells))
    return "\n".join(lines).replace("nan", "  -")


def _span(method: Result, name: str) -> str:
    samples = method["samples"].get(name)
    return f"{np.median(samples):.3f} [{min(samples):.3f} {max(samples):.3f}]" if samples else "-"
