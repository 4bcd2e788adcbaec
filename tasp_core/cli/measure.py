"""Commands that measure: bench, calibrate, results, and the emulated network's fabric up/run/bench/down."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ..machines.machine import Machine
from ..machines.presets import machine as machine_named
from .options import (
    MACHINE,
    Full,
    Json,
    Ranks,
    TensorOptions,
    command,
    console,
    read_lengths,
    show_json,
)

Out = Annotated[Path | None, "Result file."]
MachineName = Annotated[str, MACHINE]
LinkMbit = Annotated[
    float, "Mbit/s of a link or port inside a node; the ratios to other rates are kept."
]
benches = typer.Typer(
    no_args_is_help=True, help="Measure; the output is compared with the reference first."
)
fabric = typer.Typer(
    no_args_is_help=True,
    help="A machine's network, built out of network namespaces: links of limited rates on one computer.",
)


def register(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    app.add_typer(benches, name="bench")
    app.add_typer(fabric, name="fabric")
    command(app)(calibrate)
    command(app)(results)


@command(benches, "attention", kv_heads=8, dtype="float32")
def bench_attention(
    tensors: TensorOptions,
    lengths: Annotated[str, "Tokens of the sequences, e.g. 2048,8192."] = "1024,4096",
    methods: Annotated[
        str, "SCHEDULE or SCHEDULE:LAYOUT, the baseline first."
    ] = "ring,tasp,all_gather",
    ranks: Ranks = 4,
    full: Full = False,
    forward: Annotated[bool, "No backward pass."] = False,
    repeats: Annotated[int, "Samples of each figure."] = 5,
    machine: Annotated[str | None, MACHINE] = None,
    peak_tflops: Annotated[
        float, "A rank's peak; a faster run fails. Default: the machine's."
    ] = 0.0,
    out: Out = None,
    json_: Json = False,
) -> None:
    """Time against length, on torchrun's ranks or local ones; guards fail the run."""
    from ..lab.bench.attention import Config, attention_bench
    from ..runtime.launch import started

    config = Config(
        lengths=tuple(read_lengths(lengths)),
        methods=tuple(methods.split(",")),
        ranks=_num_ranks(ranks),
        **vars(tensors),
        causal=not full,
        backward=not forward,
        repeats=repeats,
        peak_tflops=peak_tflops,
    )
    on = machine_named(machine) if machine else None
    quiet = json_ or (started() and os.environ["RANK"] != "0")
    result = attention_bench(_say(quiet), config, on)
    if result is not None:
        _finish("attention", result, out, json_)


@command(benches, "overhead")
def bench_overhead(out: Out = None, json_: Json = False) -> None:
    """CPU time of all ranks over the plain kernel's in one process."""
    from ..lab.bench.overhead import overhead

    _finish("overhead", overhead(_say(json_)), out, json_)


@command(benches, "packed")
def bench_packed(out: Out = None, json_: Json = False) -> None:
    """Layouts x schedules x distributions of document lengths, planned and run."""
    from ..lab.bench.packed import packed

    _finish("packed", packed(_say(json_)), out, json_)


@command(benches, "steps")
def bench_steps(out: Out = None, json_: Json = False) -> None:
    """What passes of SAP take by simulation, against their buffers and their number of steps."""
    from ..lab.bench.steps import steps

    _finish("steps", steps(_say(json_)), out, json_)


@command(fabric, "up")
def fabric_up(
    machine: MachineName = "mesh4", link_mbit: LinkMbit = 50.0, json_: Json = False
) -> None:
    """Build a machine and leave it there, under names that `ip netns` knows; needs root."""
    from ..lab.emulation.network import Fabric, down

    on = _emulated(machine, link_mbit)
    down()
    with Fabric(on) as net:
        names = net.name()
    if json_:
        show_json({"machine": on.name, "namespaces": names})
    else:
        console.print(f"{on.name}: {', '.join(names)}; try: ip netns exec {names[0]} ip route")


@command(fabric, "down")
def fabric_down(json_: Json = False) -> None:
    """Remove the network that `up` built, and end what still runs inside."""
    from ..lab.emulation.network import down

    names = down()
    if json_:
        show_json({"removed": names})
    else:
        console.print(f"removed {', '.join(names) or 'nothing: there was nothing'}")


@command(fabric, "run", context_settings={"allow_interspersed_args": False})
def fabric_run(
    command: Annotated[list[str], typer.Argument(help="Run on every rank, as torchrun would.")],
    machine: MachineName = "mesh4",
    link_mbit: LinkMbit = 50.0,
    timeout: Annotated[float, "Seconds after which all ranks are ended."] = 600.0,
    json_: Json = False,
) -> None:
    """Build a machine, run a command on every rank inside it, remove it."""
    from ..lab.emulation.network import Fabric

    with Fabric(_emulated(machine, link_mbit)) as net:
        codes = net.run(command, timeout)
    if json_:
        show_json({"exit_codes": codes})
    elif any(codes):
        console.print(f"exit codes by rank (negative: ended by that signal): {codes}")
    raise typer.Exit(1 if any(codes) else 0)


@command(fabric, "bench")
def fabric_bench(
    out: Out = None,
    quick: Annotated[bool, "One small case of each kind."] = False,
    only: Annotated[
        str | None,
        "Only cases with this in their title, e.g. packed: or mesh4x2; others of --out stay.",
    ] = None,
    json_: Json = False,
) -> None:
    """Methods in turn on emulated machines: errors first, then seconds, bound and prediction."""
    from ..lab.emulation.network import enter_rootless

    enter_rootless(sys.argv[1:])
    from ..lab.bench.emulated import bench, earlier_cases

    earlier = earlier_cases(out, quick=quick) if only is not None and out else []
    _finish("fabric", bench(_say(json_), quick=quick, only=only, earlier=earlier), out, json_)


def calibrate(
    ranks: Ranks = 4,
    node_size: Annotated[int, "Ranks per node; 0: torchrun's, else all."] = 0,
    name: Annotated[str, "What to call the machine."] = "calibrated",
    out: Annotated[Path, "Machine file; samples go beside it."] = Path("results/machine.json"),
    dtype: Annotated[str, "Of the kernels; default: float32 on a CPU, bfloat16 on a GPU."] = "",
    json_: Json = False,
) -> None:
    """Measure the ranks' links, NICs, latency and kernels into a machine file."""
    from ..lab.bench.calibrate import measure_ranks
    from ..result_file import write

    measured = measure_ranks(_num_ranks(ranks), node_size, name, dtype)
    if measured is None:
        return
    on, samples = measured
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(on.to_json() + "\n")
    config = {"ranks": on.ranks, "node_size": on.node_size, "name": name}
    write(out.with_suffix(".samples.json"), "calibration", config=config, samples=samples)
    if json_:
        sys.stdout.write(on.to_json() + "\n")
        return
    for key, value in asdict(on).items():
        if isinstance(value, float) and value:
            console.print(f"{key:<16} {value:.4g}")
    console.print(f"{on.name}: {on.ranks} ranks, {on.source}; {out}")


def results(
    folder: Annotated[Path, typer.Argument(help="Where the result files are.")],
    out: Annotated[Path | None, "Folder for CSV and plots; default: the same."] = None,
    json_: Json = False,
) -> None:
    """Collect result files into one CSV; plots of time, of speed-up against CCR, of methods compared."""
    from visualize.curves import curves
    from visualize.peers import peers

    from ..lab.bench.collect import collect, write_csv

    table, skipped = collect(folder)
    compared = peers(table)
    figures = curves(table) + ([("peers", compared)] if compared else [])
    out = out or folder
    out.mkdir(parents=True, exist_ok=True)
    files = [
        write_csv(table, out / "results.csv"),
        *(figure.save(out / f"{name}.svg") for name, figure in figures),
    ]
    if json_:
        show_json({"files": [str(x) for x in files], "rows": len(table), "skipped": skipped})
        return
    console.print(f"{len(table)} rows; {', '.join(map(str, files))}")
    for name, why in skipped.items():
        console.print(f"skipped {name}: {why}")


def _say(quiet: bool) -> Callable[[str], Any]:
    return (lambda text: None) if quiet else console.print


def _finish(kind: str, result: dict[str, Any], out: Path | None, json_: bool) -> None:
    """Write, print, and exit 1 where a result was wrong."""
    from ..result_file import write

    if out is not None:
        write(out, kind, **result)
    if json_:
        show_json(result)
    raise typer.Exit(0 if result["right"] else 1)


def _num_ranks(ranks: int) -> int:
    """The launcher's number of ranks if there is a launcher, else `ranks`."""
    from ..runtime.launch import started

    return int(os.environ["WORLD_SIZE"]) if started() else ranks


def _emulated(name: str, link_mbit: float) -> Machine:
    """The slowed-down machine, once this process may build it."""
    from ..lab.emulation.network import enter_rootless
    from ..lab.emulation.wiring import emulated

    on = emulated(machine_named(name), link_mbit=link_mbit)
    enter_rootless(sys.argv[1:])
    return on
