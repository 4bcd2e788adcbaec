"""slurm/train.py under torchrun, killed and stopped from outside: what Slurm and an operator do to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tasp_core.lab.training.metrics import read

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parent.parent
OPTIONS = ["--tokens=512", "--rows=2", "--steps=20", "--save-every=4", "--warmup=4", "--lr=1e-3"]


def start(out, ranks, *options):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        "slurm/train.py",
        "--out",
        str(out),
        *OPTIONS,
        *options,
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process):
    said, _ = process.communicate(timeout=300)
    return process.returncode, said


def losses(out):
    return [(x["step"], x["loss"], x["grad_norm"]) for x in read(out / "metrics.jsonl")]


def wait_for(out, step):
    """Until a run has written this step."""
    for _ in range(1200):
        if (out / "metrics.jsonl").exists() and any(x[0] >= step for x in losses(out)):
            return
        time.sleep(0.1)
    raise TimeoutError(f"{out} never came to step {step}")


def workers(process):
    """Process ids of torchrun's ranks, by rank."""
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    found = []
    for child in map(int, path.read_text().split()):
        environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        found += [(int(x[5:]), child) for x in environment if x.startswith(b"RANK=")]
    return [child for _, child in sorted(found)]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    out = tmp_path_factory.mktemp("straight")
    code, said = finish(start(out, 2))
    assert code == 0, said
    return losses(out)


def test_killed_twice_then_resumed_the_losses_are_bit_equal(straight, tmp_path):
    for step, rank in ((6, 1), (13, 0)):
        process = start(tmp_path, 2)
        wait_for(tmp_path, step)
        os.kill(workers(process)[rank], signal.SIGKILL)
        code, said = finish(process)
        assert code == 1, said
        saved = max(p.name for p in (tmp_path / "checkpoints").iterdir() if p.suffix != ".part")
        assert (
            int(saved[5:]) >= step // 4 * 4
        )  # nothing but the steps since the last checkpoint is lost
    code, said = finish(start(tmp_path, 2))
    assert code == 0, said
    assert "going on after step" in said
    assert losses(tmp_path) == straight


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_told_to_stop_it_saves_and_goes_on_with_four_ranks(straight, tmp_path, number):
    process = start(tmp_path, 2)
    wait_for(tmp_path, 5)
    if number == signal.SIGUSR1:
        for pid in workers(process):  # as Slurm does; slurm/node.sh keeps torchrun itself out of it
            os.kill(pid, number)
    else:  # an operator ends torchrun, which passes it on
        process.send_signal(number)
    code, said = finish(process)
    assert "stopped by a signal: step" in said, said
    assert (code == 0) == (number == signal.SIGUSR1)
    last = losses(tmp_path)[-1][0]
    assert (tmp_path / "checkpoints" / f"step-{last:08d}").is_dir()
    code, said = finish(start(tmp_path, 4))
    assert code == 0, said
    assert f"going on after step {last} of 20" in said
    assert losses(tmp_path)[:last] == straight[:last]
    np.testing.assert_allclose(losses(tmp_path), straight, rtol=1e-6, atol=1e-5)


def test_a_wrong_question_ends_all_ranks_with_one_line_each(tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe broken" * 99)
    code, said = finish(start(tmp_path / "out", 2, "--data", str(tmp_path / "bad.txt")))
    assert code == 1
    assert "is not UTF-8 text: byte 0xff at 0" in said
    assert said.count("error: rank") <= 2
    assert "Traceback (most recent call last)" not in said.split("error: rank")[0]
    assert not (tmp_path / "out" / "checkpoints").exists()
