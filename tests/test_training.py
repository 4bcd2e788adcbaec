"""The training run: interruptions, other numbers of ranks, checkpoints that do not fit."""

from __future__ import annotations

import os
import pickle
import shutil
import signal

import numpy as np
import pytest
import torch._dynamo  # noqa: F401 (once here, not once in every forked rank)
import torch.distributed.checkpoint as dcp

import tasp_core as tasp
from tasp_core.lab.training import checkpoint
from tasp_core.lab.training import run as training
from tasp_core.lab.training.data import Cursor
from tasp_core.lab.training.llama import SIZES, Size
from tasp_core.lab.training.metrics import read
from tasp_core.lab.training.process_groups import Stop
from tasp_core.lab.training.settings import Settings

BASE = {"tokens": 256, "rows": 2, "steps": 8, "save_every": 2, "warmup": 2}


def settings(out, **options):
    return Settings(out=out, **{**BASE, **options})


def losses(out):
    return [(line["step"], line["loss"], line["grad_norm"]) for line in read(out / "metrics.jsonl")]


def checkpoints(out):
    return sorted(p.name for p in (out / "checkpoints").iterdir())


# ---- runs that are interrupted


def work(rank, group, s, moment=""):
    """A run; at a moment this rank is killed or signalled."""
    if moment and rank == 1:
        arm(moment)
    return training.run(s)


def arm(moment):
    what, _, at = moment.partition(" ")
    number = signal.SIGUSR1 if what == "signal" else signal.SIGKILL
    real_train, real_save = training.Run.train, dcp.save

    def train(self, batch):
        if what in ("step", "signal") and self.step == int(at):
            os.kill(os.getpid(), number)
        return real_train(self, batch)

    def save(tensors, **kwargs):
        real_save(tensors, **kwargs)
        if what == "save" and kwargs["storage_writer"].path.name.startswith(at):
            os.kill(os.getpid(), number)

    training.Run.train, dcp.save = train, save


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The losses of a run of two ranks that nothing disturbs."""
    out = tmp_path_factory.mktemp("straight")
    assert tasp.launch(work, 2, settings(out)) == ["done", "done"]
    return losses(out)


def test_killed_at_any_moment_a_run_goes_on_to_the_same_losses(straight, tmp_path):
    assert [step for step, *_ in straight] == [*range(1, 9)]
    left = []
    for moment in ("step 1", "step 3", "save step-00000006", "step 7"):
        with pytest.raises(tasp.RankError, match="rank 1 died"):
            tasp.launch(work, 2, settings(tmp_path), moment)
        left.append(max(checkpoints(tmp_path) if (tmp_path / "checkpoints").exists() else [""]))
    assert left == ["", "step-00000002", "step-00000006.part", "step-00000006"]
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "step", "st')  # a line that was cut
    assert tasp.launch(work, 2, settings(tmp_path)) == ["done", "done"]
    assert losses(tmp_path) == straight  # bit for bit
    assert checkpoints(tmp_path) == ["step-00000006", "step-00000008"]
    assert tasp.launch(work, 2, settings(tmp_path)) == ["done", "done"]  # nothing is left to do
    assert losses(tmp_path) == straight


def test_a_signal_to_one_rank_saves_on_all_and_ends_well(straight, tmp_path):
    assert tasp.launch(work, 2, settings(tmp_path), "signal 2") == ["stopped", "stopped"]
    assert checkpoints(tmp_path) == ["step-00000002", "step-00000003"]
    assert tasp.launch(work, 2, settings(tmp_path)) == ["done", "done"]
    assert losses(tmp_path) == straight


def test_resumed_on_other_ranks_the_losses_are_the_same(straight, tmp_path):
    with pytest.raises(tasp.RankError):
        tasp.launch(work, 2, settings(tmp_path), "step 5")
    for ranks, options in (
        (4, {}),
        (4, {"ranks": 2}),
        (1, {"layout": "balanced", "recompute": "all"}),
    ):
        out = tmp_path / f"{ranks}{len(options)}"
        shutil.copytree(tmp_path / "checkpoints", out / "checkpoints")
        shutil.copy(tmp_path / "metrics.jsonl", out)
        tasp.launch(work, ranks, settings(out, schedule="sap" if ranks == 1 else "tasp", **options))
        found = losses(out)
        assert found[:4] == straight[:4]
        np.testing.assert_allclose(found, straight, rtol=0, atol=1e-5)


def test_without_what_a_checkpoint_holds_the_losses_differ(straight, tmp_path):
    """The comparison can fail: data from the start, or moments forgotten, are seen."""

    def forgetful(rank, group, s, what):
        real = checkpoint.load

        def load(path, model, optimizer):
            note = real(path, model, optimizer)
            if what == "moments":
                for state in optimizer.state.values():
                    state["exp_avg"].zero_()
            return {**note, "cursor": [0, 0, 0]} if what == "cursor" else note

        training.checkpoint.load = load
        return training.run(s)

    tasp.launch(work, 2, settings(tmp_path), "signal 3")
    for what in ("cursor", "moments"):
        out = tmp_path / what
        shutil.copytree(tmp_path / "checkpoints", out / "checkpoints")
        tasp.launch(forgetful, 2, settings(out), what)
        gap = np.abs(np.subtract(losses(out), straight[4:]))
        assert gap.max() > 1e-4


# ---- checkpoints that do not fit


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run's folder after two steps."""
    out = tmp_path_factory.mktemp("saved")
    tasp.launch(work, 2, settings(out, steps=2))
    return out


def test_a_checkpoint_is_tensors_and_text_and_loads_without_pickle(saved):
    def loading(rank, group):
        def refuse(*args, **kwargs):
            raise AssertionError("pickle")

        job = training.Run(settings(saved, steps=2, save_every=9), Stop())
        for name in ("load", "Unpickler"):  # what reads files; objects between ranks use loads
            setattr(pickle, name, refuse)
        note = checkpoint.load(checkpoint.latest(saved / "checkpoints"), job.model, job.optimizer)
        return note["step"], job.cursor

    assert {p.suffix for p in (saved / "checkpoints" / "step-00000002").iterdir()} == {
        ".safetensors",
        ".json",
    }
    for step, cursor in tasp.launch(loading, 2):
        assert step == 2
        assert cursor != Cursor()


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        ("cut", r"is torn: shard-00001-\S+ has \d+ of \d+ bytes; move it away"),
        ("flip", r"is damaged: shard-00001-\S+ is not what was written; move it away"),
        ("gone", "is torn or none: .*No such file"),
        ("note", "is torn or none: .*; move it away"),
        ("schema", "has schema 99, this version reads 2"),
        ("size", r"is of another run: size 'tiny' \(now '15m'\)"),
        ("data", "is of another run: data"),
        (
            "tensors",
            r"of another model: exp_avg.blocks.0.down.weight is \[64, 128\] there, \[64, 96\]",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_and_left_alone(
    saved, tmp_path, harm, message, capsys
):
    out = tmp_path / "run"
    shutil.copytree(saved, out)
    folder = out / "checkpoints" / "step-00000002"
    shard, note = min(folder.glob("*.safetensors")), folder / "note.json"
    options = {}
    if harm == "cut":
        shard.write_bytes(shard.read_bytes()[:-7])
    elif harm == "flip":
        data = bytearray(shard.read_bytes())
        data[-9] ^= 4
        shard.write_bytes(data)
    elif harm == "gone":
        shard.unlink()
    elif harm == "note":
        note.write_text(note.read_text()[:50])
    elif harm == "schema":
        note.write_text(
            note.read_text().replace('"schema": 2', '"schema": 99').replace('"files"', '"sizes"')
        )
    elif harm == "size":
        options["size"] = "15m"
    elif harm == "data":
        (tmp_path / "other.txt").write_text("other " * 99)
        options["data"] = (str(tmp_path / "other.txt"),)
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}

    def resume(rank, group):
        SIZES["tiny"] = Size(64, 2, 4, 2, 96) if harm == "tensors" else SIZES["tiny"]
        with pytest.raises(tasp.PlanError, match=message):
            training.run(settings(out, steps=2, **options))

    tasp.launch(resume, 1)
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before
