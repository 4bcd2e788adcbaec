"""doctor: complete, right about what is there, and a ping that fails when ranks do."""

from __future__ import annotations

import json
import re

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

import tasp_core as tasp
from tasp_core.cli.app import app
from tasp_core.lab import doctor


def test_it_prints_every_section_and_a_matrix_of_pings():
    done = CliRunner().invoke(app, ["doctor", "--ranks", "3"])
    assert done.exit_code == 0, done.output
    sections = re.findall(r"^(\w+):$", done.output, re.M)
    assert sections == [
        "machine",
        "packages",
        "runtime",
        "devices",
        "links",
        "kernels",
        "backends",
        "ranks",
    ]
    assert f"torch          {torch.__version__}" in done.output
    assert re.search(r"^  ping +ok, at most \d+ us between 3 forked gloo ranks$", done.output, re.M)
    rows = re.findall(r"^  rank \d +(\S+) +(\S+) +(\S+)$", done.output, re.M)
    assert [row.index("-") for row in rows] == [0, 1, 2]
    pairs = {(a, b): x for a, row in enumerate(rows) for b, x in enumerate(row) if a != b}
    assert all(re.fullmatch(r"\d+/\d+\.\d\d", x) for x in pairs.values())
    assert all(pairs[a, b] == pairs[b, a] for a, b in pairs)


def test_json_and_the_reason_why_a_kernel_is_missing(monkeypatch):
    monkeypatch.setattr(doctor.flash, "available", lambda kind: {"flash2": f"none on {kind}"})
    monkeypatch.setattr(doctor, "version", lambda name: "9.9" if name == "accelerate" else "1.0")
    done = CliRunner().invoke(app, ["doctor", "--json", "--ranks", "1"])
    found = json.loads(done.output)
    assert found["kernels"]["flash2"] == f"none on {'cuda' if torch.cuda.is_available() else 'cpu'}"
    assert found["packages"]["accelerate"] == "9.9"
    assert found["backends"]["gloo"] == "ok"
    assert found["ranks"]["ping"].startswith("ok")


def test_ranks_that_cannot_talk_are_a_failure(monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("no route to host")

    monkeypatch.setattr(dist, "batch_isend_irecv", broken)
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1
    assert "FAILED" in done.output
    assert "no route to host" in done.output


def test_the_ping_measures_one_pair_at_a_time():
    for found in tasp.launch(doctor.ping, 2):
        (none, (us, rate)), _ = found
        assert none is None
        assert 1 < us < 1e6
        assert 0 < rate < 1000


@pytest.mark.parametrize("tool", ["nvidia-smi", "rocm-smi"])
def test_the_vendors_link_matrix_is_shown(tmp_path, monkeypatch, tool):
    program = tmp_path / tool
    program.write_text("#!/bin/sh\nprintf 'GPU0 GPU1\\n\\nX NV18\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor._links() == {f"{tool} 0": "GPU0 GPU1", f"{tool} 1": "X NV18"}
    program.write_text("#!/bin/sh\nexit 9\n")
    assert "neither nvidia-smi" in doctor._links()["matrix"]
