"""Commands that measure: bench, calibrate, results, and the emulated network's fabric up/run/bench/down."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from .errors import PlanError
from .options import Json, show
from .topology import Machine, machine

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


def _say(json_: bool) -> Any:
    return (lambda text: None) if json_ else console.print


def _finish(kind: str, result: dict[str, Any], out: Path | None, json_: bool) -> None:
    """Write, print, and exit 1 where a result was wrong."""
    from .lab.results import write

    if out is not None:
        write(out, kind, **result)
    if json_:
        show(result)
    raise typer.Exit(0 if result["right"] else 1)


def _emulated(name: str, link_mbit: float) -> Machine:
    from .lab.fabric import enter_rootless
    from .lab.wiring import emulated

    found = emulated(machine(name), link_mbit=link_mbit)
    enter_rootless(sys.argv[1:])
    return found


@fabric.command("up")
def up(machine: OnMachine = "mesh4", link_mbit: LinkMbit = 50.0, json_: Json = False) -> None:
    """Build a machine and leave it there, under names that `ip netns` knows; needs root."""
    from .lab.fabric import Fabric, down

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
    from .lab.fabric import down

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
    from .lab.fabric import Fabric

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
    json_: Json = False,
) -> None:
    """Methods in turn on emulated machines: oracle first, then seconds, bound and prediction."""
    from .lab.fabric import enter_rootless

    enter_rootless(sys.argv[1:])
    from .lab.fabric_bench import bench

    _finish("fabric", bench(_say(json_), quick=quick), out, json_)


def bench(
    what: Annotated[str, typer.Argument(help="overhead, packed or attention")],
    out: Out = None,
    json_: Json = False,
) -> None:
    """Measure; the output is compared with the oracle first."""
    from .lab.bench import overhead
    from .lab.packed import packed

    known: dict[str, Callable[[Any], dict[str, Any]]] = {"overhead": overhead, "packed": packed}
    if what not in known:
        raise PlanError(f"no benchmark {what!r}; known are {', '.join(known)}")
    _finish(what, known[what](_say(json_)), out, json_)


def register(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    app.command("bench")(bench)
    app.add_typer(fabric, name="fabric")
