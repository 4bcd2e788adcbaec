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


def test_the_training_line_is_the_result_file():
    losses = json.loads((RESULTS / "demo.json").read_text())["training"]
    one, four = losses["losses"]["1"], losses["losses"]["4"]
    assert (
        f"loss {one[0]:.4f} -> {one[-1]:.4f} on 1 rank, {four[-1]:.4f} on 4; largest difference in "
        f"{len(one)} steps {losses['largest_difference']:.1e}" in README
    )


def test_the_packed_sequences_are_the_result_file():
    result = json.loads((RESULTS / "packed.json").read_text())
    assert result["right"]
    text = section("Packed sequences")
    assert f"{result['run']['cpu_over_plain']:.2f} x the CPU time of the plain kernel" in text
    ring, tasp, gather = (f"{x:.2f}" for x in result["run"]["speed_up_over"].values())
    assert f"Zigzag-Ring takes {ring} x its time, Zigzag-TASP {tasp} x" in text
    assert f"all-gather per document {gather} x" in text
    ring, tasp, gather = (f"{x:.2f}" for x in result["devices"]["speed_up_over"].values())
    assert f"they take {ring}, {tasp} and {gather} x its time" in text
    for row in result["planned"]:
        if row["layout"] == "balanced" and row["ranks"] in (8, 64):
            start = f"    {row['distribution']:<16} {row['ranks']:>3} "
            line = next(x for x in README.splitlines() if x.startswith(start))
            shown = [f"{row[k]:.3f}" for k in ("work_max_mean", "tokens_max_mean", "moved_percent")]
            assert line.split()[2:5] == shown
            assert line.split()[5] == f"{row['compile_ms']:.1f}"
    fixed = [row for row in result["planned"] if row["layout"] == "contiguous"]
    assert {row["ranks"] for row in fixed} == {8, 16}
    assert f"at most {max(row['worst_work_max_mean'] for row in fixed):.3f} x the mean" in text
    moved = [row["queries_percent"] for row in fixed]
    assert f"for {min(moved):.2f} to {max(moved):.2f} % of a ring's tokens" in text


def section(title: str) -> str:
    """The text below a heading of level 3, up to the next heading, on one line."""
    text = README.split(f"\n### {title}\n")[1]
    return " ".join(re.split(r"\n##+ ", text)[0].split())


class Fabric:
    """The recorded run on emulated links."""

    def __init__(self) -> None:
        result = json.loads((RESULTS / "fabric.json").read_text())
        assert result["right"]
        self.cases = result["cases"]
        self.goals = {goal["text"]: goal for goal in result["goals"]}

    def seconds(self, start: str, part: str, *, devices: bool) -> dict[str, str]:
        """Median seconds by method, of the first case whose title starts so."""
        cases = [c for c in self.cases if c["title"].startswith(start)]
        case = next(c for c in cases if bool(c["config"]["tflops"]) == devices)
        shown = {}
        for method in case["methods"]:
            runs = [v for k, v in method["samples"].items() if k.startswith(part)]
            seconds = statistics.median(map(sum, zip(*runs, strict=True)))
            shown[method["label"]] = f"{seconds:.2f}"
        return shown

    def bound(self, start: str) -> str:
        case = next(c for c in self.cases if c["title"].startswith(start))
        return f"{case['methods'][0]['predicted']['bound forward']:.2f}"

    def figure(self, text: str) -> float:
        """What was measured for the one goal with this text."""
        return self.goals[text]["found"]


def rows_of(title: str) -> list[list[str]]:
    """The cells of the tables in a section of level 3."""
    text = re.split(r"\n##+ ", README.split(f"\n### {title}\n")[1])[0]
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows]


def test_the_emulated_links_are_the_result_file():
    fabric, text = Fabric(), section("Links that are really limited")
    mesh = "devices: mesh8@20Mbit, 2240 tokens, full, heads 4:4 of 64, devices of 8"
    seconds = fabric.seconds(mesh, "whole", devices=True)
    assert f"Ring {seconds['Ring']} s, TASP {seconds['TASP']} s" in text
    assert f"the bound of the links alone is {fabric.bound(mesh)} s" in text

    rows = rows_of("Links that are really limited")
    on_devices = fabric.seconds("packed", "whole", devices=True)
    on_cores = fabric.seconds("packed", "whole", devices=False)
    assert len(on_devices) == len(on_cores) == 6
    table = {row[0].split(" (")[0]: row[1:] for row in rows if len(row) == 3}
    for label in on_devices:
        assert table[label] == [on_devices[label], on_cores[label]], label

    nodes = fabric.seconds("nodes", "communication", devices=True)
    head, _, values = (row for row in rows if len(row) == 7)
    assert dict(zip(head, values, strict=True)) == nodes
    assert f"(the bound is {fabric.bound('nodes')})" in text


def test_the_sentences_on_emulated_links_are_the_result_file():
    fabric, text = Fabric(), section("Links that are really limited")
    bound = fabric.figure("TASP's communication over the link bound, forward")
    ring = fabric.figure("TASP's communication against Ring's, forward")
    wave = fabric.figure("two nodes, wave's communication over the cut bound")
    assert (
        f"TASP {bound:.2f} x the bound, {ring:.1f} x as fast as Ring; wave {wave:.2f} x the bound"
        in text
    )

    def worst(mbit: int, where: str) -> tuple[str, str, bool]:
        """The worst part of min(7, 1 / CCR), its goal, and whether all goals are met; in percent."""
        goals = [
            fabric.goals[
                f"{method} end to end, {mbit} Mbit/s, {where}, of min(7, 1/CCR), CCR 0.05 to 1"
            ]
            for method in ("TASP", "Zigzag-TASP")
        ]
        least = min(goal["found"] for goal in goals)
        return (
            f"{100 * least:.0f} %",
            f"{100 * goals[0]['needs']:.0f} %",
            least >= goals[0]["needs"],
        )

    (at_20, goal_20, met), (at_50, goal_50, also) = (worst(n, "a device a rank") for n in (20, 50))
    assert (met, also) == (True, True)
    assert (
        f"devices {at_20} at 20 Mbit/s (goal {goal_20}) and {at_50} at 50 (goal {goal_50})" in text
    )
    (at_20, _, met), (at_50, _, also) = (worst(n, "ranks share cores") for n in (20, 50))
    assert (met, also) == (False, False)
    assert f"cores {at_20} and {at_50}, which misses both goals" in text

    off = {
        (where, which): fabric.figure(f"prediction against measurement, {where}, {which}")
        for where in ("a device a rank", "ranks share cores")
        for which in ("median", "worst")
    }
    median, most, cores, cores_most = (100 * x for x in off.values())
    assert f"{median:.1f} % off in the median and {most:.0f} % at worst with devices" in text
    assert f"on cores {cores:.1f} % and {cores_most:.0f} %" in text


def test_the_comparison_is_the_result_file():
    cases = [c for c in Fabric().cases if c["title"].startswith("peers")]
    title = "Packed sequences on several nodes: the methods compared"
    (head, _, *rows), text = rows_of(title), section(title)
    place = {"mesh4x2": "2 x 4", "mesh2x4": "4 x 2"}
    gains: dict[str, list[float]] = {"Ulysses": [], "DistFlashAttn": []}
    assert len(rows) == len(cases) == 6
    for case, row in zip(cases, rows, strict=True):
        kind, _, rest = case["title"].removeprefix("peers, ").partition(": ")
        assert row[0] == f"{kind}, {place[rest.partition('@')[0]]}"
        seconds = {
            m["label"]: sum(statistics.median(runs) for runs in m["samples"].values())
            for m in case["methods"]
        }
        assert dict(zip(head[1:], row[1:], strict=True)) == {
            label: f"{value:.2f}" for label, value in seconds.items()
        }
        for other, found in gains.items():
            found.append(seconds[other] / min(seconds["SAP"], seconds["HSAP"]))
    least, most = min(gains["Ulysses"]), max(gains["Ulysses"])
    assert f"{least:.2f} to {most:.2f} x as fast as Ulysses over all ranks" in text
    assert f"({statistics.median(gains['Ulysses']):.2f} x in the median" in text
    least, most = min(gains["DistFlashAttn"]), max(gains["DistFlashAttn"])
    assert f"{least:.2f} to {most:.2f} x as fast as DistFlashAttn" in text


def test_headings_that_are_linked_exist():
    headings = re.findall(r"^##+ (.*)$", README, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", x).lower().replace(" ", "-") for x in headings}
    assert set(re.findall(r"\]\(#([^)]+)\)", README)) <= anchors
