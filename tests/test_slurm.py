"""The jobs of slurm/ on a real Slurm: slurm/local_cluster.sh with six nodes, ranks joined by gloo.

All jobs are submitted at once and then looked at one by one. Where a job's own program needs minutes,
its file is submitted with `slurm_probe.py` in the program's place: everything else is the real file.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from tasp_core import machine
from tasp_core.lab.training.metrics import read

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]
ROOT = Path(__file__).parent.parent
CLUSTER = ROOT / "slurm" / "local_cluster.sh"
CALL = re.compile(r"^(?:ranks|bench) .*", re.M)
PROBE = "tests/slurm_probe.py"
SMALL = ("--dtype", "float32", "--repeats", "2", "--forward")
TRAIN = ("--steps", "30", "--tokens", "256", "--save-every", "4", "--lr", "1e-3")
OVER = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "OUT_OF_MEMORY")


class Cluster(NamedTuple):
    """A running cluster: the environment in which sbatch finds it, and a folder for results."""

    env: dict[str, str]
    folder: Path

    def call(self, *command: str) -> str:
        done = subprocess.run(
            command, cwd=ROOT, env=self.env, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def submit(
        self, job: str, *arguments: str, options: str = "", probe: bool = False, **settings: str
    ) -> Job:
        """Submit a job's file; with `probe` its program is replaced by the probe."""
        path = ROOT / "slurm" / job
        if probe:
            text, times = re.subn(CALL, f'ranks {PROBE} "$@"', path.read_text())
            assert times == 1
            path = self.folder / job
            path.write_text(text)
        words = ["sbatch", "--parsable", f"--output={self.folder}/%x-%j.log", *shlex.split(options)]
        cluster = self._replace(env=self.env | settings)
        number = cluster.call(*words, str(path), *arguments).strip()
        return Job(cluster, number, job.removesuffix(".sbatch"))


class Job(NamedTuple):
    cluster: Cluster
    number: str
    name: str

    def shown(self) -> dict[str, str]:
        """What Slurm says; of an array, of the element that is furthest from a good end."""
        text = self.cluster.call("scontrol", "show", "job", "-o", self.number).strip()
        rows = [
            dict(word.split("=", 1) for word in line.split() if "=" in word)
            for line in text.splitlines()
        ]
        return min(rows, key=lambda row: (row["JobState"] in OVER, row["ExitCode"] == "0:0"))

    def end(self, within_s: float) -> dict[str, str]:
        """What Slurm says of the job once it is over."""
        end = time.monotonic() + within_s
        while (shown := self.shown())["JobState"] not in OVER:
            assert time.monotonic() < end, f"{shown['JobState']} after {within_s} s\n{self.log()}"
            time.sleep(1)
        return shown

    def log(self) -> str:
        path = self.cluster.folder / f"{self.name}-{self.number}.log"
        return path.read_text() if path.exists() else ""

    def until(self, happens: Callable[[], bool], within_s: float) -> None:
        """Wait for it, and fail where the job ends first."""
        end = time.monotonic() + within_s
        while not happens():
            assert self.shown()["JobState"] not in OVER, self.log()
            assert time.monotonic() < end, self.log()
            time.sleep(0.2)

    def steps(self) -> list[tuple[float, float]]:
        """Loss and gradient norm of a training's steps."""
        return [(x["loss"], x["grad_norm"]) for x in read(self.result() / "metrics.jsonl")]

    def result(self) -> Path:
        return self.cluster.folder / f"{self.name}-{self.number}"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    env = os.environ | {"XDG_STATE_HOME": str(folder), "TASP_RESULTS": str(folder)}
    env |= {"PYTHONPATH": str(ROOT)}
    up = subprocess.run([CLUSTER, "up", "6"], env=env, capture_output=True, text=True, check=False)
    assert up.returncode == 0, up.stderr
    env |= dict(word.split("=", 1) for word in shlex.split(up.stdout.removeprefix("export ")))
    try:
        yield Cluster(env, folder)
    finally:
        subprocess.run([CLUSTER, "down"], env=env, check=True, timeout=100)
        assert not (folder / "tasp-cluster").exists()


@pytest.fixture(scope="module")
def jobs(cluster: Cluster) -> dict[str, Job]:
    """All at once: three run side by side, the longest first."""
    saved = str(cluster.folder / "saved")
    return {
        "limit": cluster.submit(
            "train.sbatch", "save", saved, probe=True, options="--time=2 --signal=B:USR1@45"
        ),
        "meet": cluster.submit("bench_h100_multinode.sbatch", "meet", "a b", "c", probe=True),
        "unset": cluster.submit("bench_mi300x.sbatch", TASP_DEVICE=""),
        "blind": cluster.submit("bench_mi300x.sbatch", TASP_DEVICE="rocm", SLURM_GPUS_ON_NODE="2"),
        "refuses": cluster.submit("bench_mi300x.sbatch", "refuse", "3 is odd", probe=True),
        "killed": cluster.submit("bench_h100_multinode.sbatch", "die", "3", probe=True),
        "dry": cluster.submit("calibrate.sbatch", "--dry-run"),
        "bench": cluster.submit(
            "bench_h100_multinode.sbatch",
            *SMALL,
            "--machine",
            "mesh2x2",
            "--lengths",
            "256",
            "--methods",
            "ring,tasp",
        ),
        "calibrate": cluster.submit("calibrate.sbatch"),
        "sweep": cluster.submit(
            "array_sweep.sbatch", *SMALL, options="--array=0-1", SCHEDULES="tasp", LENGTHS="256 512"
        ),
        "straight": cluster.submit("train.sbatch", *TRAIN),
        "requeued": cluster.submit("train.sbatch", *TRAIN),
    }


def test_status_lists_the_nodes(cluster):
    assert re.findall(r"\bn\d\b", cluster.call(str(CLUSTER), "status")) == [
        f"n{i}" for i in range(6)
    ]


def test_ranks_meet_and_are_where_the_map_says(jobs):
    """Case G9."""
    job = jobs["meet"]
    assert job.end(150)["ExitCode"] == "0:0", job.log()
    said = [json.loads(line) for line in re.findall(r"^\[rank \d\] (\{.*\})$", job.log(), re.M)]
    said.sort(key=lambda who: who["rank"])
    assert [who["rank"] for who in said] == [0, 1, 2, 3]
    assert {who["total"] for who in said} == {6.0}
    assert all(who["words"] == ["a b", "c"] and who["threads"] == "1" for who in said)
    assert len({who["node"] for who in said}) == 2
    shown = [f"rank {who['rank']} -> node {who['node']} -> cpu" for who in said]
    assert (job.result() / "ranks.txt").read_text().splitlines() == shown
    assert "\n".join(shown) in job.log()
    for who in said:
        logs = job.result() / "logs" / who["node"]
        (own,) = logs.glob(f"{job.number}_*/attempt_0/{who['local_rank']}/stdout.log")
        assert json.loads(own.read_text().splitlines()[-1])["rank"] == who["rank"]
        assert (job.result() / "topology" / f"{who['node']}.txt").read_text()


def test_missing_settings_end_the_job_in_one_line(jobs):
    job = jobs["unset"]
    assert job.end(60)["ExitCode"] == "2:0"
    assert job.log() == "tasp: TASP_DEVICE is '', not cuda, rocm or cpu: edit slurm/site.sh\n"
    assert not job.result().exists()


def test_too_few_devices_end_the_job_before_its_ranks_start(jobs):
    job = jobs["blind"]
    assert job.end(100)["ExitCode"] == "1:0"
    said = r"^tasp: node n\d: torch \S+ sees 0 rocm devices, 2 ranks need one each$"
    assert re.search(said, job.log(), re.M), job.log()
    assert "torch.distributed.run" not in job.log()


def test_a_dry_run_as_a_job_runs_nothing(jobs):
    job = jobs["dry"]
    assert job.end(100)["ExitCode"] == "0:0"
    assert "+ srun --nodes=2 " in job.log()
    assert not job.result().exists()


def test_a_killed_rank_ends_the_job_and_is_named(jobs):
    job = jobs["killed"]
    shown = job.end(200)
    assert (shown["JobState"], shown["ExitCode"]) == ("FAILED", "1:0")
    killed = re.search(r"^\[rank 3\] killed at ([\d.]+)$", job.log(), re.M)
    assert killed is not None
    ended = time.mktime(time.strptime(shown["EndTime"], "%Y-%m-%dT%H:%M:%S"))
    assert ended - float(killed[1]) < 60
    assert re.search(r"rank +: 3 \(local_rank: 1\)\s+exitcode +: -9 ", job.log())
    assert "tasp: the ranks failed; " in job.log()


def test_what_every_rank_refuses_ends_in_one_line(jobs):
    job = jobs["refuses"]
    assert job.end(200)["ExitCode"] == "1:0"
    # the first rank's end may end the other before it has spoken
    assert re.fullmatch(r"[12] ValueError: 3 is odd", job.log().splitlines()[-1].strip())


def test_a_benchmark_leaves_its_result(jobs):
    job = jobs["bench"]
    assert job.end(300)["ExitCode"] == "0:0", job.log()
    found = json.loads((job.result() / "bench.json").read_text())
    assert found["right"]
    assert found["config"]["ranks"] == 4


def test_a_sweep_ends_in_one_table_and_plot(jobs):
    job = jobs["sweep"]
    assert job.end(300)["ExitCode"] == "0:0"
    table = (job.result() / "results.csv").read_text()
    assert {"tasp-256.json", "tasp-512.json"} <= set(re.findall(r"^[\w-]+\.json", table, re.M))
    assert "<svg" in (job.result() / "time.svg").read_text()


def test_calibration_leaves_a_machine(jobs):
    job = jobs["calibrate"]
    assert job.end(300)["ExitCode"] == "0:0", job.log()
    found = machine(job.result() / "machine.json")
    assert (found.ranks, found.node_size) == (4, 2)


def test_a_training_that_is_killed_and_queued_again_has_the_same_losses(jobs):
    job = jobs["requeued"]
    job.until(lambda: len(job.steps()) > 5, 200)
    job.cluster.call("scontrol", "requeue", job.number)
    assert job.end(200)["Restarts"] == "1"
    assert re.search(r"going on after step \d+ of 30$", job.log(), re.M), job.log()
    assert jobs["straight"].end(200)["ExitCode"] == "0:0", jobs["straight"].log()
    assert len(job.steps()) == 30
    assert job.steps() == jobs["straight"].steps()  # bit for bit


def test_a_training_goes_on_with_twice_the_ranks(cluster, jobs):
    job = cluster.submit("train.sbatch", *TRAIN, options="--nodes=1")
    job.until(lambda: len(job.steps()) > 5, 200)
    job.cluster.call("scancel", job.number)
    job.end(100)
    assert len(job.steps()) < 30
    arguments = (*TRAIN, "--out", str(job.result()))
    wider = job.cluster.submit("train.sbatch", *arguments, options="--nodes=2")
    assert wider.end(200)["ExitCode"] == "0:0", wider.log()
    assert re.search(r"going on after step \d+ of 30$", wider.log(), re.M), wider.log()
    found, straight = (np.array(x.steps())[:, 0] for x in (job, jobs["straight"]))
    assert np.abs(found - straight).max() < 1e-5


def test_the_time_limit_saves_and_queues_the_job_again(jobs):
    job = jobs["limit"]
    shown = job.end(280)
    assert (shown["JobState"], shown["Restarts"]) == ("COMPLETED", "1"), job.log()
    for rank in range(4):
        assert (job.cluster.folder / f"saved.{rank}").read_text() == "saved"
        waits = job.log().index(f"rank {rank} waits")
        assert waits < job.log().index(f"rank {rank} goes on from what it saved")
    assert f"+ scontrol requeue {job.number}" in job.log()
    assert len((job.result() / "ranks.txt").read_text().splitlines()) == 4
