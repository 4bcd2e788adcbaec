"""Commands that measure: bench, calibrate, results, and the emulated network's fabric up/run/bench/down."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..machines.machine import Machine
from ..machines.presets import machine as machine_named
from .options import Dtype, Full, HeadDim, Heads, Json, KvHeads, MachineName, Ranks, show
from .options import lengths as read_lengths

console = Console(highlight=False, soft_wrap=True)
Out = Annotated[Path | None, typer.Option(help="Result file.")]
OnMachine = Annotated[
    str, typer.Option("--machine", help="meshN, h100, mi300x, with xU, or a file.")
]
LinkMbit = Annotated[
    float,
    typer.Option(help="Mbit/s of a link or port inside a node; other rates keep their ratio."),
]
fabric = typer.Typer(
    no_args_is_help=True,
    help="A Machine built for real out of network namespaces: genuinely limited links on one computer.",
)


benches = typer.Typer(
    no_args_is_help=True, help="Measure; the output is compared with the oracle first."
)


def _say(quiet: bool) -> Any:
    return (lambda text: None) if quiet else console.print


def _finish(kind: str, result: dict[str, Any], out: Path | None, json_: bool) -> None:
    """Write, print, and exit 1 where a result was wrong."""
    from ..result_file import write

    if out is not None:
        write(out, kind, **result)
    if json_:
        show(result)
    raise typer.Exit(0 if result["right"] else 1)


def _emulated(name: str, link_mbit: float) -> Machine:
    from ..lab.emulation.network import enter_rootless
    from ..lab.emulation.wiring import emulated

    found = emulated(machine_named(name), link_mbit=link_mbit)
    enter_rootless(sys.argv[1:])
    return found


@fabric.command("up")
def up(machine: OnMachine = "mesh4", link_mbit: LinkMbit = 50.0, json_: Json = False) -> None:
    """Build a machine and leave it there, under names that `ip netns` knows; needs root."""
    from ..lab.emulation.network import Fabric, down

    on = _emulated(machine, link_mbit)
    down()
    with Fabric(on) as net:
        names = net.name()
    if json_:
        show({"machine": on.name, "namespaces": names})
    else:
        console.print(f"{on.name}: {', '.join(names)}; try: ip netns exec {names[0]} ip route")


@fabric.command("down")
def down_command(json_: Json = False) -> None:
    """Remove what `up` left, whoever left it, and end what still runs inside."""
    from ..lab.emulation.network import down

    names = down()
    if json_:
        show({"removed": names})
    else:
        console.print(f"removed {', '.join(names) or 'nothing: there was nothing'}")


@fabric.command("run", context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[list[str], typer.Argument(help="Run once a rank, as torchrun would.")],
    machine: OnMachine = "mesh4",
    link_mbit: LinkMbit = 50.0,
    timeout: Annotated[
        float, typer.Option(help="Seconds after which all ranks are ended.")
    ] = 600.0,
    json_: Json = False,
) -> None:
    """Build a machine, run a command on every rank inside it, remove it."""
    from ..lab.emulation.network import Fabric

    with Fabric(_emulated(machine, link_mbit)) as net:
        codes = net.run(command, timeout)
    if json_:
        show({"exit_codes": codes})
    elif any(codes):
        console.print(f"exit codes by rank (negative: ended by that signal): {codes}")
    raise typer.Exit(1 if any(codes) else 0)


@fabric.command("bench")
def fabric_bench(
    out: Out = None,
    quick: Annotated[bool, typer.Option("--quick", help="One small case of each kind.")] = False,
    only: Annotated[
        str | None,
        typer.Option(
            help="Only cases with this in their title, e.g. packed: or mesh4x2; others of --out stay."
        ),
    ] = None,
    json_: Json = False,
) -> None:
    """Methods in turn on emulated machines: oracle first, then seconds, bound and prediction."""
    from ..lab.emulation.network import enter_rootless

    enter_rootless(sys.argv[1:])
    from ..lab.bench.emulated import bench, earlier_cases

    earlier = earlier_cases(out, quick=quick) if only is not None and out else []
    _finish("fabric", bench(_say(json_), quick=quick, only=only, earlier=earlier), out, json_)


@benches.command("overhead")
def bench_overhead(out: Out = None, json_: Json = False) -> None:
    """CPU time of all ranks over the plain kernel's on one process."""
    from ..lab.bench.overhead import overhead

    _finish("overhead", overhead(_say(json_)), out, json_)


@benches.command("packed")
def bench_packed(out: Out = None, json_: Json = False) -> None:
    """Layouts x schedules x distributions of document lengths, planned and run."""
    from ..lab.bench.packed import packed

    _finish("packed", packed(_say(json_)), out, json_)


@benches.command("attention")
def bench_attention(
    lengths: Annotated[str, typer.Option(help="Tokens of the rows, e.g. 2048,8192.")] = "1024,4096",
    methods: Annotated[
        str, typer.Option(help="SCHEDULE or SCHEDULE:LAYOUT, the baseline first.")
    ] = "ring,tasp,all_gather",
    ranks: Ranks = 4,
    heads: Heads = 8,
    kv_heads: KvHeads = 8,
    head_dim: HeadDim = 64,
    dtype: Dtype = "float32",
    full: Full = False,
    forward: Annotated[bool, typer.Option("--forward", help="No backward pass.")] = False,
    repeats: Annotated[int, typer.Option(help="Samples of each figure.")] = 5,
    machine: MachineName = None,
    peak_tflops: Annotated[
        float, typer.Option(help="A rank's peak; a faster run fails. Default: the machine's.")
    ] = 0.0,
    out: Out = None,
    json_: Json = False,
) -> None:
    """Time against length, on torchrun's ranks or local ones; guards fail the run."""
    from ..lab.bench.attention import Config, attention_bench
    from ..runtime.launch import started

    config = Config(
        tuple(read_lengths(lengths)),
        tuple(methods.split(",")),
        _world(ranks),
        heads,
        kv_heads,
        head_dim,
        dtype,
        not full,
        not forward,
        repeats,
        peak_tflops,
    )
    on = machine_named(machine) if machine else None
    result = attention_bench(_say(json_ or (started() and os.environ["RANK"] != "0")), config, on)
    if result is not None:
        _finish("attention", result, out, json_)


def _world(ranks: int) -> int:
    """A launcher's number of ranks, else the given one."""
    from ..runtime.launch import started

    return int(os.environ["WORLD_SIZE"]) if started() else ranks


def calibrate(
    ranks: Ranks = 4,
    node_size: Annotated[int, typer.Option(help="Ranks a node; 0: torchrun's, else all.")] = 0,
    name: Annotated[str, typer.Option(help="What to call the machine.")] = "calibrated",
    out: Annotated[Path, typer.Option(help="Machine file; samples go beside it.")] = Path(
        "results/machine.json"
    ),
    dtype: Dtype = "",
    json_: Json = False,
) -> None:
    """Measure the ranks' links, NICs, latency and kernels into a machine file."""
    from ..lab.bench.calibrate import measure_ranks
    from ..result_file import write

    found = measure_ranks(_world(ranks), node_size, name, dtype)
    if found is None:
        return
    on, samples = found
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
    out: Annotated[
        Path | None, typer.Option(help="Folder for CSV and plots; default: the same.")
    ] = None,
    json_: Json = False,
) -> None:
    """Collect result files into one CSV; plots of time against length, speed-up against CCR."""
    from visualize.curves import curves

    from ..lab.bench.collect import collect, write_csv

    table, skipped = collect(folder)
    out = out or folder
    out.mkdir(parents=True, exist_ok=True)
    made = [
        write_csv(table, out / "results.csv"),
        *(f.save(out / f"{n}.svg") for n, f in curves(table)),
    ]
    if json_:
        show({"files": [str(x) for x in made], "rows": len(table), "skipped": skipped})
        return
    console.print(f"{len(table)} rows; {', '.join(map(str, made))}")
    for name, why in skipped.items():
        console.print(f"skipped {name}: {why}")


def register(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    app.add_typer(benches, name="bench")
    app.add_typer(fabric, name="fabric")
    app.command("calibrate")(calibrate)
    app.command("results")(results)
