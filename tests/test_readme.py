"""The README is true: its snippets run, its commands work, its figures are those of result files."""

from __future__ import annotations

import json
import re
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
COMMANDS = re.findall(r"^    (python -m tasp_core .*)$", README, flags=re.MULTILINE)
RESULTS = ROOT / "visualize" / "recorded"


def run(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_commands(command):
    done = run(*shlex.split(command)[1:])
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_script_for_two_processes(tmp_path):
    (tmp_path / "hello.py").write_text(SNIPPETS[0])
    assert len(SNIPPETS[0].splitlines()) <= 20
    done = run(
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "hello.py",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"\[1065, 8, 64\] \[2130, 8, 64\] \d\.\d{4}", done.stdout.strip())


@pytest.mark.parametrize("snippet", SNIPPETS[1:])
def test_other_snippets(snippet, tmp_path):
    (tmp_path / "snippet.py").write_text(snippet)
    done = run("snippet.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_demo_block_is_the_result_files():
    rows = json.loads((RESULTS / "demo.json").read_text())["attention"]
    assert len(rows) == 10
    for row in rows:
        line = next(x for x in README.splitlines() if x.startswith(f"    {row['label']:<12} "))
        errors = row["errors"]
        grads = max(errors["ours"][n] for n in ("dq", "dk", "dv"))
        shown = (
            f"{errors['ours']['out']:.1e}",
            f"{grads:.1e}",
            f"{errors['ratio']:.2f}x",
            f"{max(row['bytes_sent']['forward']) / 1e6:.2f}",
            f"{max(row['bytes_sent']['backward']) / 1e6:.2f}",
            f"{row['links_busy']:.1%}",
            f"{row['work_max_mean']:.3f}",
        )
        at = -1
        for text in shown:  # in this order
            at = line.find(text, at + 1)
            assert at >= 0, (line, text)


def test_the_overhead_is_the_result_file():
    result = json.loads((RESULTS / "overhead.json").read_text())
    assert result["errors"]["ok"]
    assert f"{result['ratio']:.2f} x" in README
    assert f"{result['least_ratio']:.2f} x" in README


def test_the_packed_rows_are_the_result_file():
    result = json.loads((RESULTS / "packed.json").read_text())
    assert result["right"]
    assert f"{result['run']['cpu_over_plain']:.2f} x the CPU time" in " ".join(README.split())
    for ratio in result["run"]["speed_up_over"].values():
        assert f"{ratio:.2f} x" in README
    devices = ", ".join(f"{x:.2f}" for x in result["devices"]["speed_up_over"].values())
    assert f"On a device a rank (below): {devices} x." in README
    assert f"{result['run']['cpu_over_plain']:.2f} x the CPU time of the plain kernel" in README
    for row in result["planned"]:
        if row["layout"] == "balanced" and row["ranks"] in (8, 64):
            start = f"    {row['distribution']:<16} {row['ranks']:>3} "
            line = next(x for x in README.splitlines() if x.startswith(start))
            shown = [f"{row[k]:.3f}" for k in ("work_max_mean", "tokens_max_mean", "moved_percent")]
            assert line.split()[2:5] == shown
            assert line.split()[5] == f"{row['compile_ms']:.1f}"


def test_the_emulated_links_are_the_result_file():
    result = json.loads((RESULTS / "fabric.json").read_text())
    assert result["right"]

    def shown(start, part, devices=True):
        found = [c for c in result["cases"] if c["title"].startswith(start)]
        case = next(c for c in found if bool(c["config"]["tflops"]) == devices)
        for method in case["methods"]:
            runs = [v for k, v in method["samples"].items() if k.startswith(part)]
            seconds = statistics.median(map(sum, zip(*runs, strict=True)))
            yield f"{method['label']} {seconds:.2f}"

    lines = README[README.index("## Links that are really limited") :]
    found = [
        *shown("devices: mesh8@20Mbit, 2240 tokens, full, heads 4:4 of 64, devices of 8", "whole")
    ]
    found += [*shown("packed", "whole"), *shown("nodes", "communication")]
    found += shown("packed", "whole", devices=False)
    assert len(found) == 21
    for text in found:
        assert text in lines or text.startswith("TASP rails"), text
    goals = {g["text"]: g["found"] for g in result["goals"]}
    worst = min(
        goals[f"{m} end to end, 20 Mbit/s, a device a rank, of min(7, 1/CCR), CCR 0.05 to 1"]
        for m in ("TASP", "Zigzag-TASP")
    )
    text = " ".join(lines.split())
    assert f"End to end {100 * worst:.0f} % of min(7, 1 / CCR) at 20 Mbit/s" in text
    shares = {
        (where, mbit): min(v for k, v in goals.items() if f"{mbit} Mbit/s, {where}, of min" in k)
        for where in ("a device a rank", "ranks share cores")
        for mbit in (20, 50)
    }
    (_, at_50), cores = list(shares.values())[:2], list(shares.values())[2:]
    assert f"(goal 85), {100 * at_50:.0f} % at 50" in text
    assert f"{100 * cores[0]:.0f} % and {100 * cores[1]:.0f} %. The simulator" in text
    assert (
        f"{100 * goals['prediction against measurement, a device a rank, median']:.1f} % off"
        in text
    )
    for where, said in (
        ("a device a rank", "in the median, {} % at worst"),
        ("ranks share cores", "on cores, {} % at worst"),
    ):
        worst = goals[f"prediction against measurement, {where}, worst"]
        assert said.format(round(100 * worst)) in text
