"""The check of one GPU: kernels against the oracle, virtual ranks, and what the machinery costs; one JSON.

    python tests/gpu/check.py --out results/gpu_check.json            # under 8 minutes; exit 1: wrong
    python tests/gpu/check.py --device cpu --small --out x.json       # the same logic, no GPU

Every result is compared before anything is timed. Figures are of device time: events on the GPU's stream.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

import tasp_core as tasp
from tasp_core.kernels import flash
from tasp_core.kernels.reference import oracle
from tasp_core.kernels.resolve import resolve
from tasp_core.lab.bench.accuracy import Inputs, Reference, as_dict
from tasp_core.lab.bench.one_process import Clock, InProcessRanks, run_in_process
from tasp_core.result_file import write

DTYPES = (torch.bfloat16, torch.float16)
DIMS = (64, 96, 128, 192, 256)
DOCS = (1, 700, 0, 333, 1500, 64)  # packed, uneven, one empty
PLANS = (("tasp", "zigzag"), ("wave", "striped"), ("sap", "balanced"))
GOAL = 1.10
REPEATS = 8


def kernels(device: str) -> dict[str, str]:
    """Kernels to check by name: "ok", or why one cannot be."""
    if device == "cpu":
        return {"aten": "ok"}
    found = flash.available("cuda")
    best = flash.best("cuda")
    return {
        "aten": found["aten"],
        "flash": "ok" if best else "; ".join(f"{n}: {x}" for n, x in found.items() if n != "aten"),
    }


def on(device: str, inputs: Inputs) -> Inputs:
    return Inputs(*(x.to(device) for x in inputs.tensors()))


def exactness(
    device: str, name: str, dtype: torch.dtype, dim: int, lengths: tuple[int, ...], ranks: int
) -> dict[str, Any]:
    """Errors of one kernel, dtype and head dim: on one rank, and merged from virtual ones."""
    case: dict[str, Any] = {"kernel": name, "dtype": str(dtype)[6:], "head_dim": dim}
    try:
        for causal in (True, False):
            docs = tasp.Documents.of(lengths, causal=causal)
            inputs = on(device, Inputs.random(docs.total, 4, 2, dim, dtype=dtype))
            judge = Reference(inputs, docs, name)
            for count in (1, ranks):
                for schedule, layout in PLANS if count > 1 else PLANS[:1]:
                    plan = tasp.plan(docs, count, schedule=schedule, layout=layout)
                    errors = judge.errors(run_in_process(plan, inputs, name), plan)
                    label = f"{'causal' if causal else 'full'} {count} {schedule} x {layout}"
                    case[label] = as_dict(errors)
        case["right"] = all(x["ok"] for x in case.values() if isinstance(x, dict))
    except (
        RuntimeError,
        ValueError,
    ) as error:  # a kernel that refuses is a result, and a wrong one
        case |= {"right": False, "error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    return case


def overhead(
    device: str, tokens: int, ranks: int, heads: tuple[int, int], dim: int
) -> dict[str, Any]:
    """Device seconds of virtual ranks over those of one plain kernel call, least of REPEATS."""
    docs, dtype = tasp.Documents.of([tokens]), torch.bfloat16 if device == "cuda" else torch.float32
    inputs = on(device, Inputs.random(tokens, *heads, dim, dtype=dtype))
    plain = resolve("auto", device, dtype)
    plan = tasp.plan(docs, ranks)
    found: dict[str, Any] = {
        "tokens": tokens,
        "ranks": ranks,
        "heads": heads,
        "head_dim": dim,
        "dtype": str(dtype)[6:],
        "kernel": plain.name,
        "plan": plan.summary(),
    }
    for backward in (False, True):
        samples: dict[str, list[float]] = {"plain": [], "kernel": [], "work": [], "messages": []}
        for _ in range(REPEATS):
            clock = Clock(torch.device(device))
            q, k, v, dout = inputs.tensors()
            with clock.span("forward"):
                once = oracle(q, k, v, docs, kernel=plain)
            with clock.span("both"):
                oracle(q, k, v, docs, dout=dout, kernel=plain)
            forward, both = clock.seconds("forward"), clock.seconds("both")
            samples["plain"].append(both - forward if backward else forward)
            virtual = InProcessRanks(plan, inputs)
            results = virtual.forward()
            if backward:
                virtual.clock.spans.clear()
                virtual.backward(results)
            spent = {n: virtual.clock.seconds(n) for n in ("all", "messages", "kernel")}
            samples["kernel"].append(spent["kernel"])
            samples["messages"].append(spent["messages"])
            samples["work"].append(spent["all"] - spent["messages"])
        del once
        least = {n: min(x) for n, x in samples.items()}
        found["backward" if backward else "forward"] = {
            "samples_s": samples,
            "kernels_over_plain": least["kernel"] / least["plain"],
            "work_over_plain": least["work"] / least["plain"],
            "goal": GOAL,
            "goal_met": least["work"] <= GOAL * least["plain"],
        }
    return found


def main() -> int:
    """Run it, write the file, say what came out."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("results/gpu_check.json"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="few and short cases")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print(
            "error: torch sees no CUDA or ROCm device; --device cpu --small checks the logic",
            file=sys.stderr,
        )
        return 2
    if args.device == "cpu":
        torch.set_num_threads(1)  # or every rank's thread would bring a pool of its own
    start, cases = time.perf_counter(), []
    found = kernels(args.device)
    lengths, dims, ranks = ((1, 30, 0, 13, 20), (64, 96), 3) if args.small else (DOCS, DIMS, 8)
    for name in (n for n, state in found.items() if state == "ok"):
        for dtype in DTYPES:
            for dim in dims:
                cases.append(exactness(args.device, name, dtype, dim, lengths, ranks))
                word = "right" if cases[-1]["right"] else f"WRONG {cases[-1].get('error', '')}"
                print(
                    f"{time.perf_counter() - start:6.1f} s  {name} {dtype} {dim}: {word}",
                    flush=True,
                )
    right = bool(cases) and all(c["right"] for c in cases)
    cost = (
        overhead(args.device, 1024, 4, (4, 2), 64)
        if args.small
        else overhead(args.device, 65536, 8, (16, 4), 128)
    )
    for name in ("forward", "backward"):
        x = cost[name]
        verdict = "met" if x["goal_met"] else "NOT met"
        print(
            f"{name}: kernels {x['kernels_over_plain']:.3f} x the plain call, with merging and "
            f"gathering {x['work_over_plain']:.3f} x (goal {GOAL} x: {verdict})"
        )
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else "none: CPU, logic only"
    write(
        args.out,
        "gpu_check",
        gpu=gpu,
        kernels=found,
        right=right,
        exactness=cases,
        overhead=cost,
        seconds=time.perf_counter() - start,
    )
    print(
        f"{'all right' if right else 'WRONG'} after {time.perf_counter() - start:.0f} s; {args.out}"
    )
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
