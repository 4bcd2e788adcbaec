"""The files of slurm/ without a cluster: what dry runs print, refusals, marks, shellcheck."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SLURM = ROOT / "slurm"
JOBS = sorted(path.name for path in SLURM.glob("*.sbatch"))
SITE = {
    "SBATCH_PARTITION": "gpu",
    "SBATCH_GPUS_PER_NODE": "h100:8",
    "TASP_DEVICE": "cuda",
    "TASP_INTERFACE": "ib0",
    "TASP_RENDEZVOUS": "%n-ib0",
}
IN_A_JOB = {
    "SLURM_JOB_ID": "41234",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_GPUS_ON_NODE": "8",
    "SLURM_CPUS_ON_NODE": "96",
    "SLURMD_NODENAME": "a17",
    "SLURM_JOB_NAME": "night",
}


def bash(
    job: str, *arguments: str, settings: dict[str, str], cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """The job's file run by bash, with these settings and no others."""
    ours = ("SLURM", "SBATCH", "TASP", "SCHEDULES", "LENGTHS")
    env = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    return subprocess.run(
        ["bash", f"slurm/{job}", *arguments],
        cwd=cwd,
        env=env | settings,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def commands(job: str, *arguments: str, settings: dict[str, str]) -> list[list[str]]:
    """The words of every command that a dry run prints."""
    done = bash(job, "--dry-run", *arguments, settings=settings)
    assert done.returncode == 0, done.stderr
    assert all(line.startswith("+ ") for line in done.stdout.splitlines())
    return [shlex.split(line[2:]) for line in done.stdout.splitlines()]


def torchrun(printed: list[list[str]]) -> tuple[dict[str, str], list[str]]:
    """torchrun's options and what stands after them: the program and its arguments."""
    found = [words for words in printed if "torch.distributed.run" in words]
    assert len(found) == 1
    words = found[0]
    assert words[0] == "srun"
    tail = words[words.index("torch.distributed.run") + 1 :]
    options = [word for word in tail if word.startswith("--") and tail.index(word) < 7]
    return dict(w[2:].split("=", 1) for w in options), tail[len(options) :]


def said(program: list[str], option: str) -> str:
    """The value that counts: the last."""
    return dict(pairwise(program))[option]


def test_the_jobs_are_all_here():
    stems = "array_sweep bench_h100_1node bench_h100_multinode bench_mi300x calibrate train"
    assert [f"{stem}.sbatch" for stem in stems.split()] == JOBS


@pytest.mark.parametrize("job", JOBS)
def test_a_dry_run_in_a_job_counts_by_slurm(job):
    printed = commands(job, "--last", "a b", settings=SITE | IN_A_JOB)
    options, program = torchrun(printed)
    assert options == {
        "nnodes": "4",
        "nproc-per-node": "8",
        "max-restarts": "0",
        "tee": "3",
        "rdzv-backend": "static",
        "rdzv-id": "41234",
        "rdzv-endpoint": "a17-ib0:11234",
    }
    assert program[-2:] == ["--last", "a b"]  # passed through, quoted, after the job's own
    for step in (words for words in printed if words[0] == "srun"):
        assert {"--nodes=4", "--ntasks=4", "--ntasks-per-node=1", "--kill-on-bad-exit=1"} < {*step}
    result = said(program, "--out")
    assert result.startswith("results/slurm/night-41234")


@pytest.mark.parametrize("job", JOBS)
def test_a_dry_run_without_slurm_reads_the_job_file(job):
    nodes = re.search(r"^#SBATCH --nodes=(\d+)$", (SLURM / job).read_text(), flags=re.MULTILINE)
    options, _ = torchrun(commands(job, settings=SITE))
    assert nodes is not None
    assert (options["nnodes"], options["nproc-per-node"]) == (nodes[1], "8")


def test_one_script_serves_every_device():
    rocm = commands("train.sbatch", settings=SITE | IN_A_JOB | {"TASP_DEVICE": "rocm"})
    cuda = commands("train.sbatch", settings=SITE | IN_A_JOB)
    assert [[w.replace("rocm", "cuda") for w in words] for words in rocm] == cuda
    options, _ = torchrun(
        commands("train.sbatch", settings=SITE | IN_A_JOB | {"TASP_DEVICE": "cpu"})
    )
    assert options["nproc-per-node"] == "96"


def test_modules_and_a_container_are_words():
    here = {"TASP_MODULES": "cuda/12.4 nccl", "TASP_PYTHON": "apptainer exec --nv a.sif python"}
    printed = commands("train.sbatch", settings=SITE | IN_A_JOB | here)
    assert printed[0] == ["module", "load", "cuda/12.4", "nccl"]
    assert printed[-1][8:15] == [*here["TASP_PYTHON"].split(), "-m", "torch.distributed.run"]


def test_a_dry_run_leaves_nothing(tmp_path):
    settings = SITE | IN_A_JOB | {"TASP_RESULTS": str(tmp_path / "out")}
    assert torchrun(commands("train.sbatch", settings=settings))[1][-1].startswith(str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_sweep_runs_every_case_once():
    cases = []
    for task in range(12):
        array = {"SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": str(task)}
        _, program = torchrun(commands("array_sweep.sbatch", settings=SITE | IN_A_JOB | array))
        case = (said(program, "--methods"), said(program, "--lengths"))
        assert said(program, "--out") == f"results/slurm/night-9/{'-'.join(case)}.json"
        cases.append(case)
    assert len(set(cases)) == 12
    beyond = SITE | IN_A_JOB | {"SLURM_ARRAY_TASK_ID": "12"}
    done = bash("array_sweep.sbatch", "--dry-run", settings=beyond)
    assert done.returncode == 2
    assert done.stderr == "tasp: no case 12: --array=0-11 covers all\n"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "SBATCH_PARTITION is not set"),
        (SITE | {"TASP_DEVICE": ""}, "TASP_DEVICE is '', not cuda, rocm or cpu"),
        (SITE | {"TASP_DEVICE": "gpu"}, "TASP_DEVICE is 'gpu', not cuda, rocm or cpu"),
        (SITE | {"TASP_INTERFACE": ""}, "TASP_INTERFACE is not set, and 2 nodes need one"),
        (SITE | {"SBATCH_GPUS_PER_NODE": ""}, "no cuda device in this job"),
        (SITE | IN_A_JOB | {"SLURM_GPUS_ON_NODE": ""}, "no cuda device in this job"),
        (
            SITE | {"SBATCH_GPUS_PER_NODE": "8 H100"},
            "a node's devices are '8 H100', which is no number",
        ),
    ],
)
def test_a_missing_setting_is_one_line(settings, message):
    done = bash("train.sbatch", "--dry-run", settings=settings)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"tasp: {message}")
    assert "slurm/site.sh" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_job_outside_slurm_says_how():
    done = bash("train.sbatch", settings=SITE)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("tasp: this is a job: sbatch slurm/train.sbatch")


@pytest.mark.parametrize("job", JOBS)
def test_elsewhere_than_in_the_root_is_one_line(job, tmp_path):
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / job).write_text((SLURM / job).read_text())
    done = bash(job, "--dry-run", settings=SITE, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r".*slurm/common.sh: No such file or directory\n", done.stderr)


def test_a_program_that_is_not_there_is_one_line():
    settings = SITE | IN_A_JOB | {"TASP_PYTHON": "no/such/python"}
    done = bash("train.sbatch", settings=settings)
    assert done.returncode == 2
    assert done.stderr.startswith("tasp: TASP_PYTHON: no program no/such/python on ")


def spaced(text: str) -> list[str]:
    """Lines that look like Slurm's directives and are comments to it."""
    return re.findall(r"^\s*#\s+SBATCH.*|^\s+#SBATCH.*", text, flags=re.MULTILINE)


@pytest.mark.parametrize("path", sorted((ROOT / "slurm").rglob("*.s*")), ids=lambda p: p.name)
def test_no_directive_is_a_comment(path):
    assert not spaced(path.read_text())


def test_the_search_for_them_finds_them():
    assert (
        len(spaced("# SBATCH --nodes=2\n#SBATCH --time=1\n  #SBATCH --mem=0\n#\tSBATCH -p x")) == 3
    )


@pytest.mark.parametrize("job", JOBS)
def test_a_job_is_directives_and_a_few_lines(job):
    lines = (SLURM / job).read_text().splitlines()
    directives = [line for line in lines if line.startswith("#SBATCH ")]
    code = [line for line in lines if line and not line.startswith("#")]
    assert "#SBATCH --ntasks-per-node=1" in directives
    assert f"#SBATCH --job-name={job.removesuffix('.sbatch')}" in directives
    first = lines.index(code[0])
    assert not any(
        line.startswith("#SBATCH") for line in lines[first:]
    )  # Slurm stops reading there
    assert len(code) <= (2 if job != "array_sweep.sbatch" else 10)


def test_only_the_site_file_asks_to_be_edited():
    marked = [p.name for p in SLURM.rglob("*") if p.is_file() and "# EDIT" in p.read_text()]
    assert marked == ["site.sh"]


def test_the_site_file_alone_sets_what_jobs_read():
    settings = set(
        re.findall(r'^: "\$\{(\w+)=', (SLURM / "site.sh").read_text(), flags=re.MULTILINE)
    )
    read = set(re.findall(r"\bTASP_[A-Z]+", (SLURM / "common.sh").read_text()))
    assert read <= settings
    assert len(settings) == 9


def test_shellcheck_is_clean():
    scripts = [*sorted(SLURM.glob("*.sh")), *sorted(SLURM.glob("*.sbatch")), ROOT / ".ci" / "run"]
    tool = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([tool, *scripts], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_a_cluster_in_a_box_refuses_in_one_line():
    for arguments in ((), ("up", "none"), ("up", "2", "3"), ("sideways",)):
        command = [SLURM / "local_cluster.sh", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (2, ""), arguments
        assert done.stderr.startswith("local_cluster: ")
        assert done.stderr.count("\n") == 1


def test_a_node_says_which_ranks_it_has(tmp_path):
    env = os.environ | {"SLURMD_NODENAME": "a18", "SLURM_NODEID": "1"}
    command = [sys.executable, SLURM / "facts.py", "cpu", "2", tmp_path]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "rank 2 -> node a18 -> cpu\nrank 3 -> node a18 -> cpu\n"
    assert (tmp_path / "a18.txt").read_text() == "no topology tool for cpu\n"


def test_a_node_records_its_links_or_why_not(tmp_path, monkeypatch):
    topology = runpy.run_path(str(SLURM / "facts.py"))["topology"]
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\necho "links of $*"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert topology("cuda") == "links of topo -m\n"
    assert topology("rocm").startswith("rocm-smi --showtopo: ")
