"""Versions: declared bounds agree, a wrong torch is refused by name, and the oldest and the newest work.

The tests marked `versions` (`make test-versions`) build a wheel, install it into fresh environments and
run tests there; none sees this repository's packages. What the machine lacks is a skip that says what.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version
from typer.testing import CliRunner

import tasp_core as tasp
from tasp_core import torch_required
from tasp_core.cli import app as cli

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
DECLARED = [*map(Requirement, PROJECT["dependencies"]), *map(Requirement, chain(*EXTRAS.values()))]
PIN = re.compile(r"^ *- *([A-Za-z0-9._-]+)==([^ ]+)", re.MULTILINE)
PINS = {name: Version(text) for name, text in PIN.findall((ROOT / "environment.yml").read_text())}


def bound(requirement: Requirement) -> str:
    """The one lower bound that a requirement declares."""
    (only,) = requirement.specifier
    assert only.operator == ">=", f"{requirement}: bounds are lower bounds alone"
    return only.version


OLDEST = {x.name: bound(x) for x in DECLARED}


# --- what the files say -------------------------------------------------------------------------


@pytest.mark.parametrize("requirement", DECLARED, ids=str)
def test_every_pin_satisfies_its_bound(requirement):
    if requirement.name == "flash-attn":  # needs a GPU, which environment.yml does not ask for
        assert "flash-attn" not in PINS
    else:
        assert PINS[requirement.name] in requirement.specifier


def test_torch_has_one_bound_everywhere():
    wanted = ".".join(map(str, torch_required.OLDEST))
    assert OLDEST["torch"] == wanted
    assert f"torch {wanted}" in (ROOT / "README.md").read_text()


def test_python_has_one_bound_everywhere():
    oldest = PROJECT["requires-python"].removeprefix(">=")
    tried = [case.python for case in CASES]
    said = [x.rpartition(" ")[2] for x in PROJECT["classifiers"] if "Python :: 3." in x]
    assert said == tried
    assert tried[0] == oldest
    assert f"python={oldest}" in (ROOT / "environment.yml").read_text()
    assert f"Python {tried[0]} to {tried[-1]}" in (ROOT / "README.md").read_text()


def test_make_tries_the_oldest_transformers():
    older = re.search(
        r"^OLDER := transformers==(\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    assert older is not None
    assert older[1] == OLDEST["transformers"]


# --- a torch that is missing or wrong is named --------------------------------------------------


@pytest.mark.parametrize(
    "found", ["2.8.0+cu128", "2.9.0", "2.9", "1.13.1", "2.8.0a0+34c6371d24.nv25.08"]
)
def test_an_older_torch_is_refused(monkeypatch, found):
    monkeypatch.setattr(torch, "__version__", found)
    with pytest.raises(ImportError, match=re.escape(f"torch {found} is older than 2.9.1")) as error:
        torch_required.require_torch()
    assert "pip install 'torch>=2.9.1'" in str(error.value)


@pytest.mark.parametrize(
    "found", ["2.9.1", "2.9.1+cu128", "2.10.0", "2.13.0+cpu", "2.15.0.dev20261101", "10.0", "3"]
)
def test_newer_ones_are_not(monkeypatch, found):
    monkeypatch.setattr(torch, "__version__", found)
    if found == "3":
        with pytest.raises(ImportError, match="no release number"):
            torch_required.require_torch()
    else:
        torch_required.require_torch()


DOORS = [
    "tasp.attention(1, 2, 3, plan)",
    "tasp.shard",
    "tasp.token_loss",
    "tasp.launch(print, 2)",
    "import tasp_core.kernels",
    "import tasp_core.lab.bench.accuracy",
]
FAKES = {
    "older": "import torch; torch.__version__ = '2.8.0'",
    "missing": "import sys; sys.modules['torch'] = None",
}


def process(*command: str | Path, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**os.environ, **env},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )


@pytest.mark.parametrize("fake", FAKES)
def test_every_door_names_it_and_planning_goes_on(fake):
    attempts = "".join(
        f"try:\n    {door}\n    print('let in')\nexcept ImportError as error:\n    print(error)\n"
        for door in DOORS
    )
    program = (
        f"{FAKES[fake]}\nimport tasp_core as tasp\nplan = tasp.plan([600, 90], 3)\n"
        "tasp.check(plan)\ntasp.simulate(plan, tasp.machine('mesh3'), heads=8, kv_heads=2, head_dim=64)\n"
    )
    done = process(sys.executable, "-c", program + attempts)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout
    assert len(lines) == len(DOORS)
    for door, line in zip(DOORS, lines, strict=True):
        if fake == "older":
            assert line.startswith("torch 2.8.0 is older than 2.9.1"), door
        elif "import" in door:  # modules on tensors say it in Python's words
            assert "torch" in line, door
        else:
            assert line.startswith("torch is not installed"), door


@pytest.mark.parametrize(
    ("fake", "words"),
    [
        ("older", "run --docs 100 --ranks 2"),
        ("missing", "run --docs 100 --ranks 2"),
        ("missing", "demo"),
        ("missing", "doctor"),
        ("missing", "bench overhead"),
    ],
)
def test_the_command_line_says_so_with_exit_code_2(fake, words):
    program = f"from tasp_core.cli.app import main\nsys.argv[1:] = {words.split()}\nmain()"
    done = process(sys.executable, "-c", f"import sys\n{FAKES[fake]}\n{program}")
    assert done.returncode == 2, done.stdout
    assert done.stdout.startswith("error: torch"), done.stdout
    assert "pip install 'torch>=2.9.1'" in done.stdout


def test_other_missing_modules_are_not_blamed_on_torch(monkeypatch):
    def broken():
        raise ModuleNotFoundError("No module named 'elsewhere'", name="elsewhere")

    monkeypatch.setattr(cli, "app", broken)
    with pytest.raises(ModuleNotFoundError, match="elsewhere"):
        cli.main()


def test_every_command_has_its_help():
    names = [x.name or x.callback.__name__ for x in cli.app.registered_commands]
    for words in [[], *([name] for name in names)]:
        done = CliRunner().invoke(cli.app, [*words, "--help"])
        assert done.exit_code == 0, (words, done.output, done.exception)


# --- the oldest and the newest, installed -------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """An interpreter, what is installed beside the wheel, and the tests that run there."""

    python: str
    oldest: bool
    torch: bool
    tests: tuple[str, ...]


PLANNING = (
    "test_plan.py",
    "test_check.py",
    "test_documents.py",
    "test_rings.py",
    "test_simulate_limits.py",
)
TENSORS = (
    "test_kernels.py",
    "test_handshake.py",
    "test_identity.py",
    "test_exact.py::test_sampled_matrix[2]",
)
CASES = [
    Case("3.11", oldest=True, torch=True, tests=PLANNING + TENSORS),
    Case("3.12", oldest=False, torch=False, tests=PLANNING),
    Case("3.13", oldest=False, torch=True, tests=TENSORS),
]
DISK_GB = 16  # torch with its CUDA libraries takes 7, and pip as much again while it unpacks
OFFLINE = re.compile(
    r"ConnectionError|NewConnection|Connection broken|timed out|name resolution|MaxRetry"
)
RUNNERS = ["pytest", "pytest-timeout", "hypothesis"]


def interpreter(version: str) -> str | None:
    """An executable of that Python version: on PATH, or one that pyenv keeps off it."""
    kept = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [
        sys.executable,
        shutil.which(f"python{version}"),
        *kept.glob(f"{version}.*/bin/python"),
    ]
    code = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
    for candidate in filter(None, found):
        if process(candidate, "-c", code).stdout.strip() == version:
            return str(candidate)
    return None


def install(python: Path, *what: str | Path) -> None:
    """pip install; a machine without the network is a skip, versions that do not exist are a failure."""
    done = process(python, "-m", "pip", "install", "-q", "--no-compile", "--retries", "1", *what)
    if done.returncode and OFFLINE.search(done.stdout):
        pytest.skip(f"no package registry: {done.stdout.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    done = process(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        folder,
        ROOT,
    )
    assert done.returncode == 0, done.stdout
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.versions
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "case", CASES, ids=lambda c: f"{c.python}-{'oldest' if c.oldest else 'newest'}"
)
def test_a_wheel_in_a_fresh_environment(case, wheel, capsys):
    base = interpreter(case.python)
    if base is None:
        pytest.skip(f"no Python {case.python} with venv and pip on this machine")
    with tempfile.TemporaryDirectory(prefix="tasp-versions-") as name:
        folder = Path(name)
        if case.torch and shutil.disk_usage(folder).free < DISK_GB * 1e9:
            pytest.skip(f"torch with CUDA needs {DISK_GB} GB free in {folder.parent}")
        assert process(base, "-m", "venv", folder / "env").returncode == 0
        python = folder / "env" / "bin" / "python"
        names = [Requirement(x).name for x in PROJECT["dependencies"]]
        names = [x for x in names if x != "torch"] + RUNNERS
        wanted = [f"{x}=={OLDEST[x]}" if case.oldest else x for x in names]
        install(python, *wanted)
        install(python, "--no-deps", wheel)
        check_planning(python, folder)
        if case.torch:
            install(python, f"torch=={OLDEST['torch']}" if case.oldest else "torch", *wanted)
            done = process(python, "-m", "pip", "check")
            assert done.returncode == 0, done.stdout
        shutil.copytree(ROOT / "tests", folder / "tests")
        shutil.copy(ROOT / "pyproject.toml", folder)
        with capsys.disabled():
            print(f"\n{case.python}: {versions(python)}")
        done = process(
            python,
            "-P",
            "-m",
            "pytest",
            "-q",
            "-o",
            "addopts=",
            "-m",
            "not full and not slow",
            *(f"tests/{x}" for x in case.tests),
            cwd=folder,
        )
        assert done.returncode == 0, done.stdout
        with capsys.disabled():
            print(f"{case.python}: {done.stdout.strip().splitlines()[-1]}")


def versions(python: Path) -> str:
    """What is installed, as the log of a run should say it."""
    found = process(python, "-m", "pip", "list", "--format=freeze").stdout.split()
    shown = {*(x.name for x in DECLARED), "click"}
    return " ".join(x for x in found if x.partition("==")[0] in shown)


def check_planning(python: Path, folder: Path) -> None:
    """Plan, prove, simulate and ask for attention where torch is not installed."""
    program = (
        "import tasp_core as tasp\n"
        f"assert tasp.__file__.startswith({str(folder)!r}), tasp.__file__\n"
        "plan = tasp.plan([600, 90, 334], ranks=5, schedule='tasp', layout='zigzag')\n"
        "print(tasp.check(plan).max_load)\n"
        "tasp.simulate(plan, tasp.machine('mesh5'), heads=8, kv_heads=2, head_dim=64)\n"
        "try:\n    tasp.attention(0, 0, 0, plan)\nexcept ImportError as error:\n    print(error)\n"
    )
    done = process(python, "-P", "-c", program, cwd=folder)
    load, *error = done.stdout.splitlines()
    here = tasp.plan([600, 90, 334], ranks=5, schedule="tasp", layout="zigzag")
    assert load == str(tasp.check(here).max_load), done.stdout
    assert len(error) == 1, done.stdout
    assert error[0].startswith("torch is not installed"), done.stdout
    for words, code in (
        (["plan", "--docs", "600,90", "--ranks", "3"], 0),
        (["--help"], 0),
        (["plan", "--help"], 0),
        (["run", "--docs", "9"], 2),
    ):
        done = process(python, "-P", "-m", "tasp_core", *words, cwd=folder)
        assert done.returncode == code, (words, done.stdout)
