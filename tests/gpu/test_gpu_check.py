"""The logic of the GPU check, on a CPU with small cases: it can be right, and wrong."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tasp_core as tasp
from tasp_core.kernels.aten import AtenCpu
from tasp_core.lab.bench import one_process as virtual
from tasp_core.lab.bench.accuracy import Inputs, Reference

CHECK = str(Path(__file__).parent / "check.py")
DOCS = tasp.Documents.of([37, 81, 0, 2, 60])


def check(monkeypatch, *options):
    monkeypatch.setattr(sys, "argv", [CHECK, *options])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(CHECK, run_name="__main__")
    return end.value.code


def test_it_runs_and_writes_what_it_found(monkeypatch, tmp_path, capsys):
    out = tmp_path / "x.json"
    assert check(monkeypatch, "--device", "cpu", "--small", "--out", str(out)) == 0
    found = json.loads(out.read_text())
    assert found["right"]
    assert found["gpu"] == "none: CPU, logic only"
    cases = {(c["kernel"], c["dtype"], c["head_dim"]) for c in found["exactness"]}
    assert cases == {("aten", d, n) for d in ("bfloat16", "float16") for n in (64, 96)}
    assert all(len(c) == 4 + 8 for c in found["exactness"])  # two masks, four plans
    for name in ("forward", "backward"):
        cost = found["overhead"][name]
        assert len(cost["samples_s"]["plain"]) == 8
        assert cost["work_over_plain"] >= cost["kernels_over_plain"] > 0
    assert "all right after" in capsys.readouterr().out


def test_a_kernel_that_is_wrong_is_an_error(monkeypatch, tmp_path, capsys):
    real = AtenCpu.forward

    def wrong(self, q, k, v, call, scale):
        out, lse = real(self, q, k, v, call, scale)
        return out, lse + (0.05 if q.dtype == torch.float32 else 0)  # in partial results only

    monkeypatch.setattr(AtenCpu, "forward", wrong)
    assert check(monkeypatch, "--device", "cpu", "--small", "--out", str(tmp_path / "x.json")) == 1
    assert "WRONG" in capsys.readouterr().out


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="a GPU is here: slurm/gpu_check.sh runs on it"
)
def test_without_a_gpu_the_script_says_so(tmp_path):
    script = Path(__file__).parents[2] / "slurm" / "gpu_check.sh"
    done = subprocess.run(
        [script, tmp_path / "x.json"],
        capture_output=True,
        text=True,
        check=False,
        env={
            "TASP_PYTHON": sys.executable,
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": str(script.parents[1]),
        },
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: torch sees no CUDA or ROCm device")
    assert not (tmp_path / "x.json").exists()


@pytest.mark.parametrize("schedule", [s for s in tasp.schedules() if s not in ("all_gather",)])
def test_virtual_ranks_compute_what_real_ones_do(schedule):
    if not tasp.supports(DOCS, 4, schedule=schedule):
        schedule = "ring"
    inputs = Inputs.random(DOCS.total, 4, 2, 8)
    p = tasp.plan(DOCS, 4, schedule=schedule)
    assert Reference(inputs, DOCS).errors(virtual.run_in_process(p, inputs), p).ok


def test_a_virtual_rank_that_fails_ends_the_others(monkeypatch):
    monkeypatch.setattr(virtual, "TIMEOUT_S", 0.5)
    inputs, p = Inputs.random(DOCS.total, 4, 2, 8), tasp.plan(DOCS, 4)
    ranks = virtual.InProcessRanks(p, inputs)
    ranks.shards[2][1] = ranks.shards[2][1][:, :1]  # a head is missing
    with pytest.raises((RuntimeError, tasp.TransportError)):
        ranks.forward()
    for wrong in (tasp.plan(DOCS, 4, schedule="all_gather"), tasp.plan(DOCS, 4, intra=2)):
        with pytest.raises(tasp.PlanError, match="single messages only"):
            virtual.InProcessRanks(wrong, inputs)
