"""The command line: demo, rings, plan, check, simulate, select, run, bench, doctor; every one takes --json.

Exit codes: 0 fine, 1 a result is wrong, 2 the question was. Commands that need tensors import them
when they run, so that planning works and stays quick on machines without torch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from ..cli import measure as cli_lab
from ..cli import predict
from ..costs.explain import explain
from ..errors import PlanError
from ..planning.check import Report
from ..planning.check import check as prove
from ..planning.plan import Plan
from ..schedules.hamiltonian import decompose
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
)

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Sequence-parallel attention as data: plan it, prove it, run it.",
)
console = Console(highlight=False, soft_wrap=True)


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


@app.command()
def rings(
    n: Annotated[int, typer.Argument(help="Ranks.")],
    json_: Json = False,
) -> None:
    """Split the complete digraph on N ranks into Hamiltonian cycles, and prove it."""
    found = decompose(n).verify()
    if json_:
        show({"n": n, "fold": found.fold, "cycles": found.cycles})
        return
    console.print(
        f"{len(found)} rings on {n} ranks use each of {n * (n - 1)} links "
        f"{'once' if found.fold == 1 else 'twice'} (proved)"
    )
    for i, cycle in enumerate(found.cycles):
        console.print(f"ring {i}: {' > '.join(map(str, cycle))} > {cycle[0]}")


@app.command("plan")
def plan_command(
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
    backward: Annotated[bool, typer.Option("--backward", help="Show the backward table.")] = False,
    json_: Json = False,
) -> None:
    """Print a plan: its table of hops and what it costs each rank, or with --json the plan itself."""
    p = plan_from(docs, ranks, schedule, layout, machine, options, full, window, intra)
    if json_:
        sys.stdout.write(p.to_json() + "\n")
        return
    cost = explain(p, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    console.print(p.summary())
    console.print(p.table(backward=backward) + "\n")
    console.print(str(cost).split("\n", 1)[1])
    console.print(f"fingerprint {p.fingerprint()[:16]}")


@app.command()
def check(
    docs: Docs = "4096",
    ranks: Ranks = 4,
    schedule: ScheduleName = "tasp",
    layout: LayoutName = "zigzag",
    machine: MachineName = None,
    options: Options = "",
    full: Full = False,
    window: Window = None,
    intra: Intra = 1,
    file: Annotated[
        Path | None, typer.Option(help="A plan's JSON file instead of options.")
    ] = None,
    json_: Json = False,
) -> None:
    """Prove a plan right; exit 1 and show the step at fault when it is wrong."""
    if file is not None:
        if not file.is_file():
            raise PlanError(f"no plan file {str(file)!r}; write one with: plan --json > FILE")
        p = Plan.from_json(file.read_text())
    else:
        p = plan_from(docs, ranks, schedule, layout, machine, options, full, window, intra)
    try:
        report = prove(p)
    except PlanError as error:
        if json_:
            show({"ok": False, "error": str(error)})
        else:
            console.print(f"WRONG: {error}")
        raise typer.Exit(1) from None
    if json_:
        show({"ok": True, **_report(report)})
    else:
        console.print(f"{p.summary()}\n{report}")


@app.command()
def run(
    docs: Docs = "137,2041,89",
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
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")] = "float32",
    kernel: Annotated[str, typer.Option(help="auto, math, aten or flash.")] = "auto",
    json_: Json = False,
) -> None:
    """Run a plan on real ranks of this machine, forward and backward, against the float64 oracle."""
    import torch

    from ..lab.bench.accuracy import Inputs, as_dict, sent_bytes, verify

    kind = getattr(torch, dtype, None)
    if kind not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise PlanError(f"dtype {dtype!r} is not one of float32, bfloat16, float16, float64")
    p = plan_from(docs, ranks, schedule, layout, machine, options, full, window, intra)
    inputs = Inputs.random(p.docs.total, heads, kv_heads, head_dim, dtype=kind)
    errors, seconds = verify(p, inputs, kernel=kernel)
    sent = sent_bytes(p, heads, kv_heads, head_dim, kind)
    if json_:
        show({**as_dict(errors), "seconds": seconds, "bytes_sent": sent})
    else:
        console.print(p.summary())
        for name, error in errors.ours.items():
            plain = errors.plain[name]
            console.print(f"{name:>4}: error {error:.2e} (plain kernel {plain:.2e})")
        for name, totals in sent.items():
            console.print(f"{name}: at most {max(totals):,} bytes sent by a rank")
        verdict = "right" if errors.ok else "WRONG"
        console.print(f"{verdict}; slowest rank {max(seconds):.3f} s, forward and backward")
    raise typer.Exit(0 if errors.ok else 1)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Result file.")] = Path("results/demo.json"),
    tokens: Annotated[int, typer.Option(help="Tokens of the packed row.")] = 4096,
    ranks: Ranks = 8,
    steps: Annotated[int, typer.Option(help="Training steps.")] = 30,
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


@app.command()
def doctor(
    ranks: Annotated[int, typer.Option(help="Ranks to fork and ping; under torchrun its own.")] = 2,
    json_: Json = False,
) -> None:
    """Versions, devices, links, kernels found and why others were not, and a ping between real ranks."""
    from ..lab.doctor import end, examine, start

    first = start()
    found = examine(ranks)
    end()
    if json_ and first:
        show(found)
    elif first:
        for key, value in found.items():
            console.print(f"{key}:")
            for name, text in value.items():
                console.print(f"  {name:<14} {text}", markup=False)
    raise typer.Exit(0 if found["ranks"]["ping"].startswith("ok") else 1)


app.command("simulate")(predict.simulate_command)
app.command("select")(predict.select_command)
cli_lab.register(app)


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
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"error: {reason}", markup=False)
    sys.exit(2)
