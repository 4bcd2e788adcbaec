"""Cases of training: S5-S8; memory; worlds, options and data a run cannot have.

S2 and G5 are in test_fsdp.py, I2 is in test_transformers.py.
"""

from __future__ import annotations

import json
import runpy
import sys
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
import torch
import torch._dynamo  # once here, not once in every forked rank
import torch.distributed as dist

import tasp_core as tasp
from tasp_core.lab.training import memory
from tasp_core.lab.training import run as training
from tasp_core.lab.training.data import IGNORE, Corpus, Cursor
from tasp_core.lab.training.llama import SIZES, Size, TinyLlama
from tasp_core.lab.training.metrics import bucket_loss, read
from tasp_core.lab.training.process_groups import Stop
from tasp_core.lab.training.settings import Settings

TRAIN = str(Path(__file__).parent.parent / "slurm" / "train.py")


def main(*options):
    """slurm/train.py as a process runs it."""
    argv, sys.argv = sys.argv, [TRAIN, *map(str, options)]
    try:
        runpy.run_path(TRAIN, run_name="__main__")
    except SystemExit as end:
        return end.code or 0
    finally:
        sys.argv = argv
        if dist.is_initialized():
            dist.destroy_process_group()


def work(rank, group, settings):
    return training.run(settings)


# ---- S5-S8


def test_s5_prompts_are_masked_and_it_trains(tmp_path):
    chats = [{"prompt": f"what is {n}? ", "response": "a number " * (n % 5 + 1)} for n in range(60)]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    out, data = tmp_path / "out", (str(tmp_path / "chats.jsonl"),)
    s = Settings(out=out, data=data, sft=True, steps=25, tokens=512, lr=1e-2)
    tasp.launch(work, 2, s)
    lines = read(out / "metrics.jsonl")
    assert lines[-1]["loss"] < 1.0 < 5 < lines[0]["loss"]
    assert all(line["targets"] < 0.8 * line["tokens"] for line in lines)


def test_s6_a_tiny_model_overfits_to_one_text():
    def overfit(rank, group, p, text):
        torch.manual_seed(0)
        net = TinyLlama()
        optimizer = torch.optim.AdamW(net.parameters(), lr=8e-3)
        labels = tasp.shard(tasp.next_token_labels(text, p.docs), p, rank)
        ids, positions = tasp.shard(text, p, rank), torch.from_numpy(p.positions(rank))
        for _ in range(60):
            logits = net(ids, positions, lambda q, k, v: tasp.attention(q, k, v, p, group))
            total, count = tasp.token_loss(logits, labels, group)
            optimizer.zero_grad()
            (total / count).backward()
            for w in net.parameters():
                dist.all_reduce(w.grad)
            optimizer.step()
        dist.all_reduce(total.detach_())
        return float(total / count)

    data, _ = Corpus.of().read(5)
    text = torch.tensor(list(data[:512]))
    assert max(tasp.launch(overfit, 2, tasp.plan([512], 2), text)) < 0.1


def test_s7_s8_counts_lengths_and_held_out_losses_do_not_depend_on_ranks(tmp_path):
    found = []
    for ranks in (1, 2):
        out = tmp_path / str(ranks)
        s = Settings(out=out, tokens=700, rows=2, steps=2, eval_every=1, eval_rows=2)
        tasp.launch(work, ranks, s)
        found.append((read(out / "metrics.jsonl"), read(out / "metrics.jsonl", "eval")))
    for one, two in zip(*(steps for steps, _ in found), strict=True):
        for name in ("tokens", "targets", "documents", "mean_length"):
            assert one[name] == two[name]
        assert one["mean_length"] == one["tokens"] / one["documents"]
    for one, two in zip(*(evals for _, evals in found), strict=True):
        assert [*one["buckets"]] == [*two["buckets"]] == ["all", "0+", "64+", "256+"]
        for a, b in zip(one["buckets"].values(), two["buckets"].values(), strict=True):
            assert a["targets"] == b["targets"]
            assert a["loss"] == pytest.approx(b["loss"], abs=1e-6)
        parts = [one["buckets"][k] for k in ("0+", "64+", "256+")]
        assert sum(x["targets"] for x in parts) == one["buckets"]["all"]["targets"]


def test_a_step_without_targets_has_no_loss(tmp_path, capfd):
    """One-byte documents have no next byte; the others do."""
    for name, texts in (("none", ["a"] * 64), ("some", ["a", "bcd"] * 32)):
        out, data = tmp_path / name, tmp_path / f"{name}.jsonl"
        lines = [json.dumps({"prompt": text, "response": ""}) for text in texts]
        data.write_text("\n".join(lines))
        s = Settings(out=out, data=(str(data),), sft=True, steps=2, tokens=16, eval_every=0)
        tasp.launch(work, 2, s)
        found = read(out / "metrics.jsonl")
        assert [line["targets"] for line in found] == [0, 0]
        assert [line["loss"] for line in found] == [None, None]
        assert [line["grad_norm"] for line in found] == [0.0, 0.0]
        assert "no targets" in capfd.readouterr().out
        assert "NaN" not in (out / "metrics.jsonl").read_text()


def test_buckets_hold_the_losses_of_their_positions():
    class Row:
        positions = torch.tensor([0, 63, 64, 300, 70, 5]).numpy()
        labels = torch.tensor([0, 0, 1, 1, IGNORE, 1]).numpy()

    logits = torch.tensor([0.0, 3.0]).expand(6, 2)
    right, wrong = (float(-logits[0].log_softmax(0)[i]) for i in (1, 0))
    found = bucket_loss([Row()], lambda _: logits, lambda values: [float(v) for v in values])
    assert {k: v["targets"] for k, v in found.items()} == {"all": 5, "0+": 3, "64+": 1, "256+": 1}
    assert found["0+"]["loss"] == pytest.approx((2 * wrong + right) / 3)
    assert found["64+"]["loss"] == found["256+"]["loss"] == pytest.approx(right)


# ---- memory


def peak(rank, group, settings, keep=False):
    """A rank's most bytes in a step after the first, when the optimiser has its states.

    The least of three steps: FSDP gives gathered weights back some time after their last use.
    """
    training.attention = partial(tasp.attention, keep_kv=keep)  # in this forked rank alone
    job = training.Run(settings, Stop())
    stream = iter(job.batches(job.corpus, settings.rows, Cursor()))
    job.train(next(stream))
    most = []
    for batch in islice(stream, 3):
        job.optimizer.zero_grad()
        most.append(memory.measure_cpu(partial(job.train, batch)))
    return memory.state_bytes(job.model, job.optimizer) + min(most)


def test_memory_falls_with_the_ranks_as_the_model_says(tmp_path):
    SIZES["test"] = Size(128, 3, 8, 4, 256)
    found, said = [], []
    for ranks in (1, 2, 4):
        s = Settings(out=tmp_path, tokens=1024, size="test")
        found.append(max(tasp.launch(peak, ranks, s)))
        said.append(memory.predict(SIZES["test"], 1024 // ranks, ranks, s.recompute).total)
    assert found == pytest.approx(said, rel=0.15)
    assert found[0] > 1.6 * found[1] > 2.2 * found[2]
    del SIZES["test"]
    with pytest.raises(tasp.PlanError, match="must be none, kept, all, got 'some'"):
        memory.predict(SIZES["tiny"], 9, 1, "some")


SLOW = [pytest.param(x, marks=pytest.mark.slow) for x in ("none", "all")]


@pytest.mark.parametrize("recompute", ["kept", *SLOW])
def test_memory_of_kept_keys_and_of_what_runs_again(tmp_path, monkeypatch, recompute):
    size = Size(128, 5, 8, 4, 256)
    monkeypatch.setitem(SIZES, "test", size)
    s = Settings(out=tmp_path, tokens=1024, size="test", recompute=recompute)
    p = tasp.plan([1024], 4, schedule=s.schedule, layout=s.layout)
    rows = 256 + tasp.lower(p, 0, keep_kv=True).kv_buffer_rows  # all keys of the row
    found = [max(tasp.launch(peak, 4, s, keep)) for keep in (False, True)]
    said = [memory.predict(size, 256, 4, recompute, kept_rows=kept).total for kept in (0, rows)]
    assert found == pytest.approx(said, rel=0.15)
    # less buffers at the peak that keeping saves, give or take a block that FSDP still gathers
    one = rows * 128 * 4
    blocks, least = (0, -2.5) if recompute == "all" else (5, 2)
    assert said[1] - said[0] == blocks * one
    assert least * one < found[1] - found[0] < (blocks + 1.5) * one


# ---- what a run cannot have


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--size", "9b"], "no model size '9b'; known are tiny,"),
        (["--ranks", 2], "1 processes are no whole number of groups of 2; set --ranks"),
        (["--schedule", "no"], "no schedule 'no'"),
        (["--machine", "mesh8"], "machine 'mesh8' has 8 ranks"),
        (["--dtype", "float16"], "dtype must be one of float32, bfloat16"),
        (["--recompute", "some"], "recompute must be none, kept or all"),
        (["--tokens", 0], "tokens must be at least 1, got 0"),
        (["--data", "/nowhere.txt"], "no data file or folder '/nowhere.txt'"),
        (["--kernel", "flash"], "kernel 'flash' on cpu takes fp16 and bf16"),
    ],
)
def test_a_question_without_an_answer_is_one_line_and_code_2(tmp_path, capsys, options, message):
    assert main("--out", tmp_path / "out", *options) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"error: rank 0: {message}")
    assert said.err.count("\n") == 1
    assert not list(tmp_path.glob("out/checkpoints/*"))


def test_a_run_from_the_command_line(tmp_path, capsys):
    """Alone, without torchrun; its roofline and MFU are arithmetic on what it measured."""
    options = ("--out", tmp_path, "--tokens", 64, "--steps", 2, "--peak-tflops", 0.5)
    assert main(*options) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("step 1/2  loss 5.")
    assert shown[-1].startswith("roofline of a rank's step: ")
    steps, (line,) = read(tmp_path / "metrics.jsonl"), read(tmp_path / "metrics.jsonl", "roofline")
    size = SIZES["tiny"]
    least = 6 * (size.parameters - 256 * 64) * 64  # and more by attention
    assert least < line["flop"] < 1.5 * least
    assert (line["peak_is"], line["bytes_sent"], line["bound"]) == ("given", 0, "computation")
    for step in steps:
        assert step["tokens_per_s_per_device"] == pytest.approx(64 / step["seconds"])
        assert step["mfu"] == pytest.approx(step["tflops_per_device"] / 0.5)
    assert steps[-1]["mfu"] == pytest.approx(line["compute_s"] / steps[-1]["seconds"])
    assert json.loads((tmp_path / "run.json").read_text())["config"]["peak_tflops"] == 0.5


def test_missing_settings_are_named(capsys):
    assert main("--steps", 3) == 2
    assert "Missing option '--out'" in capsys.readouterr().err


def test_bad_data_or_a_file_in_the_way_leave_everything_as_it_was(tmp_path, capsys):
    out, chats = tmp_path / "out", tmp_path / "chats.jsonl"
    out.mkdir()
    (out / "run.json").write_text("an earlier run's")
    chats.write_text('{"prompt": 3}')
    assert main("--out", out, "--data", chats) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: rank 0: data file ")
    assert said.count("\n") == 1
    assert [p.name for p in out.iterdir()] == ["run.json"]
    assert main("--out", chats) == 2
    assert capsys.readouterr().err == (
        f"error: rank 0: --out '{chats}' cannot be a folder: File exists\n"
    )
    assert (out / "run.json").read_text() == "an earlier run's"


def test_a_run_that_is_done_changes_nothing(tmp_path, capsys):
    out = tmp_path / "out"
    options = ("--out", out, "--tokens", 64, "--steps", 1)
    assert main(*options) == 0
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    capsys.readouterr()
    assert main(*options, "--schedule", "ring") == 0
    assert capsys.readouterr().out == f"nothing to do: step 1 of 1 is saved in {out}\n"
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before


def test_worlds_that_rows_or_plans_do_not_fit(tmp_path):
    def refused(rank, group, options, message):
        with pytest.raises(tasp.PlanError, match=message):
            training.run(Settings(out=tmp_path / "x", **options))

    for options, message in (
        ({"ranks": 3}, "4 processes are no whole number of groups of 3"),
        ({"ranks": 2, "rows": 3}, "3 rows per step do not divide among 2 groups of 2 ranks"),
        ({"intra": 3}, "intra=3 does not divide"),
        ({"machine": "mesh3"}, "has 3 ranks"),
    ):
        tasp.launch(refused, 4, options, message)
    assert not (tmp_path / "x").exists()


def test_data_that_vanish_end_the_run_and_leave_its_checkpoints(tmp_path):
    out = tmp_path / "out"
    for i in range(4):
        (tmp_path / f"t{i}.txt").write_text(f"{i} some text " * 30)

    def vanishing(rank, group):
        real = training.Run.train

        def train(self, batch):
            if self.step == 3:
                for i in range(4):
                    (tmp_path / f"t{i}.txt").unlink(missing_ok=True)
            return real(self, batch)

        training.Run.train = train
        with pytest.raises(tasp.PlanError, match=r"data file .*t\d.txt' cannot be read: No such"):
            training.run(
                Settings(out=out, data=(str(tmp_path),), tokens=300, steps=20, save_every=2)
            )
        return sorted(p.name for p in (out / "checkpoints").iterdir())

    (names,) = tasp.launch(vanishing, 1)
    assert names[-1] >= "step-00000002"  # how far it came depends on how far ahead rows were read
    assert not any(n.endswith(".part") for n in names)
