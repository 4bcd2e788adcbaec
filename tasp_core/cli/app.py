"""The command line: demo, rings, plan, check, simulate, select, run, doctor, and those of measure.py.

Exit codes: 0 fine, 1 a result is wrong, 2 wrong usage. Every command takes --json. Commands that need
tensors import them when they run, so that planning works, and stays quick, on machines without torch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from ..costs.explain import explain as costs_of
from ..costs.select import select as select_plan
from ..costs.simulate import simulate as simulate_pass
from ..errors import PlanError
from ..machines.presets import machine as machine_named
from ..planning.check import Report
from ..planning.check import check as check_plan
from ..planning.plan import Plan
from ..schedules.hamiltonian import decompose
from . import measure
from .options import (
    MACHINE,
    DocumentOptions,
    Json,
    KernelName,
    PlanOptions,
    Ranks,
    TensorOptions,
    command,
    console,
    show_json,
)

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Sequence-parallel attention as data: plan it, prove it, run it.",
)


@command(app)
def rings(n: Annotated[int, typer.Argument(help="Ranks.")], json_: Json = False) -> None:
    """Split the complete digraph on N ranks into Hamiltonian cycles, and prove it."""
    decomposition = decompose(n).verify()
    if json_:
        show_json({"n": n, "fold": decomposition.fold, "cycles": decomposition.cycles})
        return
    console.print(
        f"{len(decomposition)} rings on {n} ranks use each of {n * (n - 1)} links "
        f"{'once' if decomposition.fold == 1 else 'twice'} (proved)"
    )
    for i, cycle in enumerate(decomposition.cycles):
        console.print(f"ring {i}: {' > '.join(map(str, cycle))} > {cycle[0]}")


@command(app)
def plan(
    plan_options: PlanOptions,
    tensors: TensorOptions,
    backward: Annotated[bool, "Show the backward table."] = False,
    json_: Json = False,
) -> None:
    """Print a plan: its table of hops and what it costs each rank, or with --json the plan itself."""
    p = plan_options.plan()
    if json_:
        sys.stdout.write(p.to_json() + "\n")
        return
    cost = costs_of(p, **vars(tensors))
    console.print(p.summary())
    console.print(p.table(backward=backward) + "\n")
    console.print(str(cost).split("\n", 1)[1])
    console.print(f"fingerprint {p.fingerprint()[:16]}")


@command(app)
def check(
    plan_options: PlanOptions,
    file: Annotated[Path | None, "A plan's JSON file instead of options."] = None,
    json_: Json = False,
) -> None:
    """Prove a plan right; exit 1 and show the step at fault when it is wrong."""
    if file is None:
        p = plan_options.plan()
    elif file.is_file():
        p = Plan.from_json(file.read_text())
    else:
        raise PlanError(f"no plan file {str(file)!r}; write one with: plan --json > FILE")
    try:
        report = check_plan(p)
    except PlanError as error:
        if json_:
            show_json({"ok": False, "error": str(error)})
        else:
            console.print(f"WRONG: {error}")
        raise typer.Exit(1) from None
    if json_:
        show_json({"ok": True, **_report(report)})
    else:
        console.print(f"{p.summary()}\n{report}")


def _report(report: Report) -> dict[str, Any]:
    return {
        "max_load": report.max_load,
        "min_load": report.min_load,
        "links_busy": report.busy,
        "pairs": report.pairs,
        "peak_travelling_kv": report.peak_shards,
        "messages": report.messages,
        "tokens_sent": report.tokens_sent.tolist(),
        "work_max_mean": report.balance,
        "work_max_mean_worst_step": report.step_balance,
    }


@command(app, docs="137,2041,89", dtype="float32")
def run(
    plan_options: PlanOptions,
    tensors: TensorOptions,
    kernel: KernelName = "auto",
    json_: Json = False,
) -> None:
    """Run a plan on real ranks of this machine, forward and backward, against the float64 reference."""
    import torch

    from ..lab.bench.accuracy import Inputs, as_dict, sent_bytes, verify

    dtype = getattr(torch, tensors.dtype, None)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise PlanError(
            f"dtype {tensors.dtype!r} is not one of float32, bfloat16, float16, float64"
        )
    p = plan_options.plan()
    sizes = tensors.heads, tensors.kv_heads, tensors.head_dim
    inputs = Inputs.random(p.docs.total, *sizes, dtype=dtype)
    errors, seconds = verify(p, inputs, kernel=kernel)
    sent = sent_bytes(p, *sizes, dtype)
    if json_:
        show_json({**as_dict(errors), "seconds": seconds, "bytes_sent": sent})
    else:
        console.print(p.summary())
        for name, error in errors.ours.items():
            console.print(f"{name:>4}: error {error:.2e} (plain kernel {errors.plain[name]:.2e})")
        for name, totals in sent.items():
            console.print(f"{name}: at most {max(totals):,} bytes sent by a rank")
        verdict = "right" if errors.ok else "WRONG"
        console.print(f"{verdict}; slowest rank {max(seconds):.3f} s, forward and backward")
    raise typer.Exit(0 if errors.ok else 1)


@command(app)
def demo(
    out: Annotated[Path, "Result file."] = Path("results/demo.json"),
    tokens: Annotated[int, "Tokens of the packed sequence."] = 4096,
    ranks: Ranks = 8,
    steps: Annotated[int, "Training steps."] = 30,
    json_: Json = False,
) -> None:
    """The main job: real text, every schedule on real ranks, the proof, the errors, training."""
    from ..lab.demo import demo as run_demo

    right = run_demo(
        out, Console(quiet=True) if json_ else console, tokens=tokens, ranks=ranks, steps=steps
    )
    if json_:
        sys.stdout.write(out.read_text())
    raise typer.Exit(0 if right else 1)


@command(app)
def doctor(
    ranks: Annotated[int, "Ranks to fork and ping; under torchrun its own."] = 2,
    json_: Json = False,
) -> None:
    """Versions, devices, links, kernels found and why others were not, and a ping between real ranks."""
    from ..lab.doctor import end, examine, start

    first = start()
    sections = examine(ranks)
    end()
    if json_ and first:
        show_json(sections)
    elif first:
        for title, lines in sections.items():
            console.print(f"{title}:")
            for name, text in lines.items():
                console.print(f"  {name:<14} {text}", markup=False)
    raise typer.Exit(0 if sections["ranks"]["ping"].startswith("ok") else 1)


@command(app)
def simulate(
    plan_options: PlanOptions,
    tensors: TensorOptions,
    json_: Json = False,
) -> None:
    """Predict a plan's seconds and bytes on a machine, forward and backward; nothing is run."""
    p, name = plan_options.plan(), plan_options.machine
    on = machine_named(name) if name else None
    passes = {
        direction: simulate_pass(p, on, **vars(tensors), backward=direction == "backward")
        for direction in ("forward", "backward")
    }
    if json_:
        show_json({direction: timeline.as_dict() for direction, timeline in passes.items()})
    else:
        print("\n\n".join(map(str, passes.values())))


@command(app)
def select(
    documents: DocumentOptions,
    tensors: TensorOptions,
    machine: Annotated[str, MACHINE] = "mesh4",
    backward: Annotated[bool, "Forward and backward."] = False,
    explain: Annotated[bool, "Show all candidates."] = False,
    json_: Json = False,
) -> None:
    """Choose schedule, layout and Ulysses degree for documents on a machine by simulating all."""
    choice = select_plan(
        documents.documents(), machine_named(machine), **vars(tensors), backward=backward
    )
    if json_:
        show_json(choice.as_dict())
    else:
        print(choice)
        if explain:
            print("\n" + choice.explain())


measure.register(app)


def main() -> None:
    """Run the command line; errors a user can cause end in one message and exit code 2."""
    try:
        app()
    except (ValueError, MemoryError) as error:  # MemoryError: a plan for too many ranks
        _refuse(str(error))
    except ImportError as error:  # a command for tensors where torch is missing or too old
        if error.name != "torch":
            raise
        try:
            from .. import torch_required  # noqa: F401
        except ImportError as named:
            _refuse(str(named))
        raise


def _refuse(reason: str) -> NoReturn:
    stderr = Console(stderr=True, highlight=False, soft_wrap=True)
    stderr.print(f"error: {reason}", markup=False)
    sys.exit(2)
