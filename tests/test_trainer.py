"""RowTrainer: training, evaluation and prediction equal to one process, on rows over ranks."""

from __future__ import annotations

import itertools
import math
import os
import tempfile

import numpy as np
import pytest
import torch
import torch._dynamo  # once here, not once in every forked rank
import transformers as hf
from spread import spread
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

import tasp_core as tasp
from tasp_core.integrations.trainer import RowTrainer
from tasp_core.integrations.transformers import sequence_parallel

hf.logging.set_verbosity_error()
SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
}
GROUPS = [(1, 1), (2, 1), (4, 1), (2, 2)]  # ranks a row, rows at once


def model(kind="ForCausalLM"):
    torch.manual_seed(0)
    more = {} if kind == "ForCausalLM" else {"num_labels": 5, "classifier_dropout": 0.0}
    return getattr(hf, f"Llama{kind}")(hf.LlamaConfig(**SIZES, **more))


def documents(count, equal=False, kind="ForCausalLM", seed=1):
    """Documents of 3 to 29 tokens; labels: the tokens, a prompt without."""
    generator = torch.Generator().manual_seed(seed)
    lengths = (
        [24] * count if equal else torch.randint(3, 30, (count,), generator=generator).tolist()
    )
    found = []
    for n in lengths:
        ids = torch.randint(0, 97, (n,), generator=generator).tolist()
        labels = ids if kind == "ForCausalLM" else [x % 5 for x in ids]
        found.append({"input_ids": ids, "labels": [-100, *labels[1:]]})
    return found


def sums(net, data, smoothing=0.0):
    """(sum of losses, labels) of documents, in float64."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for item in data:
        ids, labels = (torch.tensor(item[k]) for k in ("input_ids", "labels"))
        logits = net(input_ids=ids[None]).logits[0]
        if isinstance(net, hf.LlamaForCausalLM):
            logits, labels = logits[:-1], labels[1:]
        total = total + cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
        count += int((labels != -100).sum())
    return total, count


class Seen(hf.TrainerCallback):
    def __init__(self):
        self.found = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.found.append((float(logs["loss"]), float(logs["grad_norm"])))


class Ordered(RowTrainer):
    def _get_train_sampler(self, *args):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def trainer(rank, ranks, rows, kind="ForCausalLM", trainer_class=Ordered, options=None, **given):
    """A trainer of this process, its model, its losses and its group."""
    world = ranks * rows
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "OMP_NUM_THREADS": "1",
    }
    mesh = init_device_mesh("cpu", (rows, ranks), mesh_dim_names=("dp", "sp"))
    net, seen = model(kind), Seen()
    args = hf.TrainingArguments(
        output_dir=tempfile.gettempdir(),
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        learning_rate=1e-2,
        ddp_find_unused_parameters=False,
        **(options or {}),
    )
    given = {"data_collator": hf.DataCollatorWithFlattening(), "callbacks": [seen], **given}
    made = trainer_class(net, args, ranks=ranks, **given)
    group = mesh["sp"].get_group()
    return made, net, seen, lambda: sequence_parallel(net, lambda d: tasp.plan(d, ranks), group)


# ---- evaluation


def evaluated(rank, group, ranks, rows, count, equal, loss_only):
    options = {"per_device_eval_batch_size": 2, "prediction_loss_only": loss_only}
    data = documents(count, equal)
    t, _, _, inside = trainer(rank, ranks, rows, options=options, eval_dataset=data)
    with inside():
        return t.evaluate()["eval_loss"]


def wanted_loss(net, data, batch=2):
    """The mean over examples of their batches' losses: what one process evaluates."""
    total = 0.0
    for i in range(0, len(data), batch):
        part, count = sums(net, data[i : i + batch])
        total += float(part.detach()) / count * len(data[i : i + batch])
    return total / len(data)


@pytest.mark.parametrize("count", spread([8, 7, 5], keep=2))
def test_evaluation_is_that_of_one_process(count):
    wanted = wanted_loss(model().double(), documents(count))
    for ranks, rows in GROUPS:
        for loss_only in (True, False) if rows == 2 else (True,):
            given = ranks, rows, count, False, loss_only
            found = tasp.launch(evaluated, ranks * rows, *given)
            assert found == pytest.approx([wanted] * ranks * rows, abs=2e-6)


def test_evaluation_of_equal_documents():
    wanted = wanted_loss(model().double(), documents(8, equal=True))
    found = tasp.launch(evaluated, 2, 2, 1, 8, True, True)
    assert found == pytest.approx([wanted] * 2, abs=2e-6)


def accuracy(pair):
    chosen, labels = pair.predictions[:, :-1].argmax(-1), pair.label_ids[:, 1:]
    return {"right": float((chosen == labels).sum()), "of": float((labels != -100).sum())}


def predicted(rank, group, ranks, rows, trainer_class=Ordered):
    options, data = {"per_device_eval_batch_size": 2}, documents(5)
    t, _, _, inside = trainer(
        rank, ranks, rows, options=options, eval_dataset=data, compute_metrics=accuracy
    )
    with inside():
        found = t.predict(data)
    return found.predictions, found.label_ids, found.metrics


def test_predictions_and_metrics_are_those_of_whole_rows():
    net, data = model().double(), documents(5)
    with torch.no_grad():
        rows = [
            torch.cat(
                [net(input_ids=torch.tensor([d["input_ids"]])).logits[0] for d in data[i : i + 2]]
            )
            for i in (0, 2, 4)
        ]
    labels = [list(itertools.chain(*(d["labels"] for d in data[i : i + 2]))) for i in (0, 2, 4)]
    right = of = 0
    for logits, row in zip(rows, labels, strict=True):
        chosen, row = logits[:-1].argmax(-1).tolist(), row[1:]
        right, of = right + sum(map(int.__eq__, chosen, row)), of + sum(x != -100 for x in row)
    for ranks, groups in GROUPS:
        for predictions, label_ids, metrics in tasp.launch(
            predicted, ranks * groups, ranks, groups
        ):
            assert len(predictions) == len(label_ids) == 3
            for i, (logits, row) in enumerate(zip(rows, labels, strict=True)):
                n = len(row)
                np.testing.assert_allclose(predictions[i, :n], logits.numpy(), atol=1e-5)
                assert (predictions[i, n:] == -100).all()
                assert label_ids[i, :n].tolist() == row
            assert (metrics["test_right"], metrics["test_of"]) == (right, of)


# ---- training


def trained(rank, group, ranks, rows, kind, accumulate, smoothing):
    options = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": accumulate // rows,
        "max_steps": 1,
        "label_smoothing_factor": smoothing,
    }
    data = documents(8, kind=kind)
    t, _, seen, inside = trainer(rank, ranks, rows, kind, options=options, train_dataset=data)
    with inside():
        t.train()
    return seen.found[0]


@pytest.mark.parametrize(
    ("kind", "accumulate", "smoothing"),
    spread(
        [
            ("ForCausalLM", 2, 0.0),
            ("ForTokenClassification", 2, 0.0),
            ("ForCausalLM", 2, 0.1),
            ("ForTokenClassification", 4, 0.2),
        ],
        keep=2,
    ),
)
def test_steps_of_several_rows_are_those_of_one_process(kind, accumulate, smoothing):
    net = model(kind).double()
    total, count = sums(net, documents(8, kind=kind)[: 2 * accumulate], smoothing)
    (total / count).backward()
    norm = torch.stack([w.grad.norm() for w in net.parameters()]).norm()
    wanted = float(total.detach()) / count, float(norm)
    for ranks, rows in GROUPS:
        for found in tasp.launch(trained, ranks * rows, ranks, rows, kind, accumulate, smoothing):
            assert found == pytest.approx(wanted, rel=1e-4)


class Whole(hf.DataCollatorWithFlattening):
    """Labels as they are: the first of a document is nobody's next token inside it."""

    def __call__(self, features, **kwargs):
        batch = super().__call__(features, **kwargs)
        batch["labels"] = batch["input_ids"].clone()
        return batch


def counted(rank, group, ranks, rows):
    options = {"per_device_train_batch_size": 4 // rows, "max_steps": 1}
    t, _, seen, inside = trainer(
        rank, ranks, rows, options=options, train_dataset=documents(4), data_collator=Whole()
    )
    with inside():
        t.train()
    return seen.found[0][0]


def test_labels_are_counted_inside_documents():
    data = documents(4)
    total, count = sums(model().double(), data)
    for ranks, rows in ((1, 1), (2, 2)):
        found = tasp.launch(counted, ranks * rows, ranks, rows)
        assert found == pytest.approx([float(total.detach()) / count] * ranks * rows, abs=1e-4)


def silent(rank, group, ranks, logging_steps):
    data = documents(3)
    data[1] = {"input_ids": [5], "labels": [-100]}  # also a rank without tokens
    options = {
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 1,
        "max_steps": 3,
    }
    t, net, seen, inside = trainer(rank, ranks, 1, options=options, train_dataset=data)
    t.args.logging_steps = t.state.logging_steps = logging_steps
    with inside():
        t.train()
        finite = all(bool(w.isfinite().all()) for w in net.parameters())
        return seen.found, finite, t.evaluate(data[1:2])["eval_loss"]


def test_a_step_without_labels_has_no_loss():
    for ranks in (1, 2):
        for found, finite, evaluation in tasp.launch(silent, ranks, ranks, 1):
            assert [math.isnan(loss) for loss, _ in found] == [False, True, False]
            assert found[1][1] == 0.0  # its gradient
            assert min(loss for loss, _ in found[::2]) > 1
            assert finite
            assert math.isnan(evaluation)
    for found, _, _ in tasp.launch(silent, 2, 2, 3):
        assert found[0][0] > 3  # the mean of two steps, not of three


# ---- what is refused


def told(work):
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


REFUSED = {  # options of the trainer, of its arguments, and what is said
    "compute_loss_func": (
        {"compute_loss_func": lambda *a, **k: 0},
        {},
        "compute_loss_func is given",
    ),
    "neftune": ({}, {"neftune_noise_alpha": 5.0}, "neftune_noise_alpha scales its noise"),
    "dispatch": ({}, {"accelerator_config": {"dispatch_batches": True}}, "share batches out"),
    "averaging": (
        {},
        {"average_tokens_across_devices": False},
        "average_tokens_across_devices=True",
    ),
}


def refusals(rank, group):
    found = {}
    for name, (given, options, _) in REFUSED.items():
        found[name] = told(lambda g=given, o=options: trainer(rank, 2, 1, options=o, **g))
    data = documents(8, equal=True)
    options = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "max_steps": 1}
    both = {"options": options, "train_dataset": data, "eval_dataset": data}
    t, _, _, inside = trainer(rank, 2, 1, **both)
    found["outside, training"], found["outside, evaluation"] = told(t.train), told(t.evaluate)
    with inside():
        iterable = torch.utils.data.ChainDataset([])
        found["iterable"] = told(lambda: t.evaluate(iterable))
        t.model.config.output_hidden_states = True
        found["hidden states"] = told(lambda: t.predict(data))

    def plain(model, args, ranks, **given):
        return hf.Trainer(model, args, **given)

    t, _, _, inside = trainer(rank, 2, 1, trainer_class=plain, **both)
    with inside():
        found["plain, evaluation"] = told(t.evaluate)
        found["plain, training"] = told(t.train)
    return found


def test_what_would_be_wrong_is_refused_on_every_rank():
    says = {name: text for name, (_, _, text) in REFUSED.items()} | {
        "outside, training": "not inside sequence_parallel",
        "outside, evaluation": "not inside sequence_parallel",
        "iterable": "evaluation needs a dataset with a length, got ChainDataset",
        "hidden states": "predictions are 2 outputs of the model, and only logits are put together",
        "plain, evaluation": "use integrations.trainer.RowTrainer instead of Trainer",
        "plain, training": "use integrations.trainer.RowTrainer instead of Trainer",
    }
    for found in tasp.launch(refusals, 2):
        assert found.keys() == says.keys()
        for name, text in says.items():
            assert found[name].startswith("PlanError: "), (name, found[name])
            assert text in found[name], (name, found[name])
