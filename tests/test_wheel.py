"""The wheel: what is in it, and that a user without torch and without this repository can plan with it.

`make test-wheel`; not part of `make test`: it builds, and installs numpy, networkx, typer and rich anew.
"""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path

import pytest

from tests.test_versions import PROJECT, Requirement, install, process, wheel  # noqa: F401

ROOT = Path(__file__).parent.parent
pytestmark = [pytest.mark.wheel, pytest.mark.timeout(300)]


def files_of(package: str) -> set[str]:
    """Python files that git would ship."""
    return {str(x.relative_to(ROOT)) for x in (ROOT / package).rglob("*.py")}


def test_what_is_in_it(wheel):  # noqa: F811
    names = set(zipfile.ZipFile(wheel).namelist())
    code = {x for x in names if ".dist-info/" not in x}
    typed = {"tasp_core/py.typed", "visualize/py.typed"}
    assert code == files_of("tasp_core") | files_of("visualize") | typed
    assert {x.rpartition("/")[2] for x in names - code} == {
        "METADATA",
        "WHEEL",
        "RECORD",
        "LICENSE",
        "entry_points.txt",
    }


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):  # noqa: F811
    """A fresh environment's bin/ with the wheel and its dependencies, but no torch."""
    folder = tmp_path_factory.mktemp("fresh")
    assert process(sys.executable, "-m", "venv", folder / "env").returncode == 0
    bin = folder / "env" / "bin"
    names = [Requirement(x).name for x in PROJECT["dependencies"]]
    install(bin / "python", *(x for x in names if x != "torch"))
    install(bin / "python", "--no-deps", wheel)
    assert process(bin / "python", "-c", "import torch").returncode == 1
    return bin


PROGRAM = """
import tasp_core as tasp, visualize
assert tasp.__file__.startswith(PREFIX) and visualize.__file__.startswith(PREFIX), tasp.__file__
machine = tasp.machine("h100x2")
plan = tasp.plan([600, 90, 334], ranks=16, schedule="wave", machine=machine)
print(tasp.check(plan).pairs)
sizes = dict(heads=32, kv_heads=8, head_dim=128)
print(tasp.simulate(plan, machine, **sizes).total_s > 0)
print(tasp.select(tasp.Documents.of([8192]), tasp.machine("mesh4"), **sizes).plan.ranks)
print(len(tasp.explain(plan).ranks), tasp.Plan.from_json(tasp.Plan.to_json(plan)) == plan)
print(visualize.rings(plan).svg.startswith("<svg"))
try:
    tasp.attention(0, 0, 0, plan)
except ImportError as error:
    print(error)
"""


def test_it_plans_proves_predicts_and_chooses_without_torch(environment, tmp_path):
    program = f"PREFIX = {str(environment.parent)!r}\n{PROGRAM}"
    done = process(environment / "python", "-P", "-c", program, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    *lines, error = done.stdout.splitlines()
    pairs = sum(n * (n + 1) // 2 for n in (600, 90, 334))
    assert lines == [str(pairs), "True", "4", "16 True", "True"], done.stdout
    assert error.startswith(
        "torch is not installed; attention and all that handles tensors need it"
    )


def test_its_command_plans_and_proves_without_torch(environment, tmp_path):
    command = environment / "tasp_core"
    done = process(command, "plan", "--docs", "600,90", "--ranks", "3", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    (tmp_path / "plan.json").write_text(done.stdout)
    done = process(command, "check", "--file", "plan.json", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    report = json.loads(done.stdout)
    assert report["ok"]
    assert report["pairs"] == 600 * 601 // 2 + 90 * 91 // 2

    done = process(command, "run", "--docs", "600", "--ranks", "2", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout.startswith("error: torch is not installed"), done.stdout


def test_its_types_are_seen_where_it_is_installed(environment, tmp_path):
    (tmp_path / "user.py").write_text(
        "import tasp_core as tasp\nplan = tasp.plan([8], ranks=2)\nreveal_type(plan.ranks)\n"
        "tasp.plan([8], ranks='two')\n"
    )
    done = process(
        *(sys.executable, "-m", "mypy", "--python-executable", environment / "python", "user.py"),
        cwd=tmp_path,
    )
    assert 'Revealed type is "int"' in done.stdout.replace("builtins.", ""), done.stdout
    assert 'has incompatible type "str"; expected "int"' in done.stdout, done.stdout
