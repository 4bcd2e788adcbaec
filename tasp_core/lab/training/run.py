"""Train a Llama on packed sequences: FSDP2 x sequence parallelism, checkpoints, metrics.

    torchrun --nproc-per-node 4 slurm/train.py --out results/run --size tiny --ranks 2

The sequences, their order and the losses depend on settings.TRAJECTORY only. Numbers of ranks and
interruptions do not change the losses; on a CPU, a run that is resumed on as many ranks has the same bits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ...errors import PlanError
from ...integrations.fsdp import shard_parameters
from ...planner import plan
from ...planning.plan import Plan
from ...result_file import write
from ...runtime.attention import attention
from ...runtime.loss import token_loss
from ...sequence.documents import Documents
from . import checkpoint
from .data import Batch, Corpus, Cursor, Local, ahead, batches
from .llama import TinyLlama, init_weights, llama
from .metrics import Metrics, bucket_loss
from .process_groups import ProcessGroups, Stop
from .settings import Settings, refuse_other_run
from .throughput import Throughput, roofline_line


class Run:
    """A run on one rank: model, optimiser, and the position in the data."""

    def __init__(self, s: Settings, stop: Stop) -> None:
        self.s, self.stop = s, stop
        corpus = Corpus.of(s.data)
        self.corpus, self.held_out = corpus.split()
        if s.eval_every and not self.held_out.items:
            raise PlanError("a single document leaves nothing to hold out; use --eval-every 0")
        with torch.device("meta"):
            self.model: TinyLlama = llama(s.size, s.recompute)
        self.groups = ProcessGroups.join(s)
        try:
            s.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PlanError(f"--out {str(s.out)!r} cannot be a folder: {error.strerror}") from None
        self.group = self.groups.mesh["sp"].get_group()
        self.trajectory = s.trajectory(corpus.fingerprint())
        dtype = torch.bfloat16 if s.dtype == "bfloat16" else None
        shard_parameters(self.model, self.model.blocks, self.groups.everyone, dtype=dtype)
        self.model.to_empty(device=self.groups.device)
        init_weights(self.model, s.seed)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), s.lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=s.weight_decay
        )
        self.throughput = Throughput.of(s, self.groups.device, self.groups.size)
        self.step, self.cursor = 0, Cursor()
        self._resume()

    def _resume(self) -> None:
        folder = checkpoint.latest(self.s.out / "checkpoints")
        if folder is not None:
            refuse_other_run(
                self.trajectory, checkpoint.read_metadata(folder)["trajectory"], folder
            )
            saved = checkpoint.load(folder, self.model, self.optimizer)
            self.step, self.cursor = saved["step"], Cursor(*saved["cursor"])

    def save(self) -> None:
        """Write a checkpoint of this step."""
        metadata = {"trajectory": self.trajectory, "cursor": list(self.cursor)}
        checkpoint.save(self.s.out / "checkpoints", self.step, self.model, self.optimizer, metadata)

    def make_plan(self, docs: Documents) -> Plan:
        """The plan of a packed sequence."""
        s, ranks = self.s, self.groups.mesh["sp"].size()
        return plan(
            docs, ranks, schedule=s.schedule, layout=s.layout, machine=s.machine, intra=s.intra
        )

    def batches(
        self, corpus: Corpus, rows: int, cursor: Cursor, *, replicated: bool = False
    ) -> Iterator[Batch]:
        """This rank's training steps; `replicated`: every data-parallel group takes all rows."""
        mesh = self.groups.mesh
        parts = 1 if replicated else mesh["dp"].size()
        part = 0 if replicated else mesh.get_local_rank("dp")
        return batches(
            corpus,
            self.s.tokens,
            rows,
            self.make_plan,
            rank=mesh.get_local_rank("sp"),
            part=part,
            parts=parts,
            sft=self.s.sft,
            seed=self.s.seed,
            cursor=cursor,
        )

    def logits(self, row: Local) -> Tensor:
        """Logits [t, 256] of this rank's tokens of a packed sequence."""
        ids, positions = (
            torch.from_numpy(x).to(self.groups.device) for x in (row.ids, row.positions)
        )
        return self.model(
            ids,
            positions,
            lambda q, k, v: attention(q, k, v, row.plan, self.group, kernel=self.s.kernel),
        )

    def train(self, batch: Batch) -> tuple[float, float, bool]:
        """One optimiser step; its loss, gradient norm, and whether any rank was asked to stop.

        A step without a target has no loss: nan, not 0; its gradient is 0.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = self.s.learning_rate(self.step)
        self.optimizer.zero_grad()
        total = torch.zeros((), device=self.groups.device)
        for row in batch.rows:
            labels = torch.from_numpy(row.labels).to(self.groups.device)
            part, _ = token_loss(self.logits(row), labels, self.group, plan=row.plan)
            (part / max(1, batch.targets)).backward()
            total += part.detach()
        norm: Any = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.s.clip)
        self.optimizer.step()
        self.step, self.cursor = self.step + 1, batch.cursor
        loss, asked = self.groups.add_up([total, self.stop.asked])
        loss = loss / batch.targets if batch.targets else math.nan
        return loss, float(norm.full_tensor()), asked > 0

    @torch.no_grad()
    def evaluate(self) -> dict[str, dict[str, float]]:
        """Loss of held-out text by position in the document; the same on all ranks."""
        batch = next(self.batches(self.held_out, self.s.eval_rows, Cursor(), replicated=True))
        parts = self.groups.mesh["dp"].size()  # all of them sum up the same rows
        return bucket_loss(
            batch.rows, self.logits, lambda values: [v / parts for v in self.groups.add_up(values)]
        )


def run(settings: Settings) -> str:
    """Train to the last step, or until a signal, from the newest checkpoint of `settings.out` on.

    Returns:
        "done", or "stopped" when SIGUSR1 or SIGTERM came and the state was saved.

    Raises:
        PlanError: settings, data or a checkpoint that do not fit; nothing is overwritten.
    """
    with Stop() as stop:
        return _run(Run(settings, stop))


def _run(job: Run) -> str:
    s, groups = job.s, job.groups
    if job.step >= s.steps:
        if groups.first:
            print(f"nothing to do: step {job.step} of {s.steps} is saved in {s.out}", flush=True)
        return "done"
    stream = ahead(job.batches(job.corpus, s.rows, job.cursor))
    first = next(stream)  # if data cannot be read, the run ends before it writes anything
    if groups.first:
        config = {**asdict(s), "out": str(s.out), "world_size": groups.size}
        write(s.out / "run.json", "train", config=config, trajectory=job.trajectory)
    metrics = Metrics(s.out / "metrics.jsonl", job.step, speaks=groups.first)
    if job.step:
        metrics.say(f"going on after step {job.step} of {s.steps}")
    start = time.perf_counter()
    for batch in chain([first], stream):
        loss, norm, asked = job.train(batch)
        cost = job.throughput.of_step(batch, time.perf_counter() - start)
        last = job.step == s.steps
        rate = s.learning_rate(job.step - 1)
        written = loss if batch.targets else None  # null in the file: there is no loss
        metrics.write("step", job.step, loss=written, grad_norm=norm, lr=rate, **cost)
        shown = "no targets" if written is None else f"loss {loss:.4f}"
        metrics.say(
            f"step {job.step}/{s.steps}  {shown}  {cost['tokens_per_s_per_device']:.0f} "
            f"tokens/s/device  MFU {cost['mfu']:.1%}",
            now=last,
        )
        if s.eval_every and (job.step % s.eval_every == 0 or last):
            buckets = job.evaluate()
            metrics.write("eval", job.step, buckets=buckets)
            parts = (f"{name} {bucket['loss']:.4f}" for name, bucket in buckets.items())
            metrics.say("held out: " + "  ".join(parts))
        if asked or last or job.step % s.save_every == 0:
            job.save()
            metrics.write("saved", job.step)
        if last:
            line = job.throughput.roofline(batch, groups.mesh.get_local_rank("sp"))
            metrics.write("roofline", job.step, **line)
            metrics.say(roofline_line(line, cost["seconds"]))
            break
        if asked:
            metrics.say(f"stopped by a signal: step {job.step} is saved, run again to go on")
            return "stopped"
        start = time.perf_counter()
    return "done"
