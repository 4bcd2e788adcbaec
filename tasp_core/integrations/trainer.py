"""transformers' Trainer, with accelerate, on rows that are spread over ranks.

    collator = DataCollatorWithFlattening()                       # packs documents, position_ids restart
    planner = lambda docs: tasp.plan(docs, ranks)                 # a plan for every row
    trainer = RowTrainer(model, args, data_collator=collator, train_dataset=data, ranks=ranks)
    with sequence_parallel(model, planner, group):                # group: ranks r, r + 1, ... of one row
        trainer.train()                                           # world size = rows at once x ranks
        trainer.evaluate(held_out)                                # and predict()

A row is one packed sequence; groups of `ranks` consecutive global ranks share one. Losses and gradients
equal those of one process with as many rows per step. Evaluation is that of one process, whatever the
number of ranks and of rows at once: the mean over examples of their batches' losses, and logits and
labels of whole rows for `compute_metrics`. A step without a label has gradient 0 and is logged as nan,
not as a loss. `label_smoothing_factor` is exact.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import prepare_data_loader
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler
from transformers import Trainer

from ..errors import PlanError
from ..runtime.sharding import gather
from .inputs import NO_LABELS, count_targets
from .transformers import Active, active


class RowTrainer(Trainer):
    """A Trainer in which groups of `ranks` consecutive processes work on the same row.

    Raises:
        PlanError: a world size that `ranks` does not divide; a setting that breaks the loss; work
            outside `sequence_parallel`.
    """

    def __init__(self, *args: Any, ranks: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ranks = ranks
        if self.args.world_size % ranks:
            raise PlanError(
                f"{self.args.world_size} processes cannot be shared out in groups of {ranks}; "
                "the world size must be a multiple of the plan's ranks"
            )
        if self.args.world_size > 1 and not self.args.average_tokens_across_devices:
            raise PlanError("ranks hold unequal tokens: set average_tokens_across_devices=True")
        settings: Any = self.args.accelerator_config
        for unfit, what in (
            (
                self.compute_loss_func is not None,
                "compute_loss_func is given the logits of one rank's tokens and labels of whole rows; "
                "leave it out, or give no labels and compute the loss in a training loop of your own with "
                "tasp.token_loss",
            ),
            (
                self.args.neftune_noise_alpha is not None,
                "neftune_noise_alpha scales its noise by the tokens at hand, which are one rank's; leave "
                "it out",
            ),
            (
                self.args.use_liger_kernel,
                "use_liger_kernel computes the loss without logits, of one rank's tokens; leave it out",
            ),
            (
                self.args.n_gpu > 1,
                f"one process has {self.args.n_gpu} GPUs, and Trainer would split rows over them; start "
                "one process for each GPU with torchrun",
            ),
            (
                bool(settings.split_batches or settings.dispatch_batches),
                "split_batches and dispatch_batches share batches out over processes, not over groups; "
                "leave them out",
            ),
        ):
            if unfit:
                raise PlanError(what)
        self.model_accepts_loss_kwargs = True  # inside sequence_parallel, every model does
        self._evaluating = False
        self._examples = 0  # of the data that are evaluated
        self._labelled: dict[int, Any] = {}  # labels of each step since the last log

    # ---- rows for each group

    def _context(self) -> Active:
        """The state of the `sequence_parallel` around the model."""
        model: Any = self.model
        context = active(model)
        if context is None:
            raise PlanError(
                "the model is not inside sequence_parallel: train, evaluate and predict within "
                "`with sequence_parallel(model, plan, group):`"
            )
        size = dist.get_world_size(context.group) if self.args.world_size > 1 else 1
        if size != self.ranks and not (context.group is None and self.ranks == 1):
            raise PlanError(
                f"RowTrainer has groups of {self.ranks} ranks, sequence_parallel was given a group of "
                f"{size}; pass the group of this row's ranks"
            )
        return context

    def _loader(self, dataset: Any, what: str, **options: Any) -> DataLoader:
        """A DataLoader with Trainer's settings, not divided among processes yet."""
        args = self.args
        return DataLoader(
            dataset,
            collate_fn=self._get_collator_with_removed_columns(
                self.data_collator, description=what
            ),
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and torch.cuda.is_available(),
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            **options,
        )

    def get_train_dataloader(self) -> DataLoader:
        """Rows for this process's group: the same on each of its ranks."""
        self._context()
        if self.train_dataset is None:
            raise PlanError("Trainer has no train_dataset")
        loader = self._loader(
            self.train_dataset,
            "training",
            batch_size=self.args.train_batch_size,
            sampler=self._get_train_sampler(),
            drop_last=self.args.dataloader_drop_last,
        )
        return prepare_data_loader(
            loader,
            num_processes=self.args.world_size // self.ranks,
            process_index=self.args.process_index // self.ranks,
            use_seedable_sampler=True,
            data_seed=self.args.data_seed or self.args.seed,
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Batches for this process's group, the same on each of its ranks."""
        if isinstance(eval_dataset, str) and isinstance(self.eval_dataset, dict):
            eval_dataset = self.eval_dataset[eval_dataset]
        eval_dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if eval_dataset is None:
            raise PlanError("Trainer has no eval_dataset")
        return self._whole_batches(eval_dataset, "evaluation")

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """Batches for this process's group, the same on each of its ranks."""
        return self._whole_batches(test_dataset, "test")

    def _whole_batches(self, dataset: Any, what: str) -> DataLoader:
        """One process's batches in order, distributed over the groups in turn.

        The last batch is repeated for groups that would have none; `_gather_rows` drops it again.
        """
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise PlanError(f"{what} needs a dataset with a length, got {type(dataset).__name__}")
        self._context()
        sampler = self._get_eval_sampler(dataset) or SequentialSampler(dataset)
        if isinstance(sampler, torch.utils.data.DistributedSampler):
            raise PlanError("the evaluation sampler gives every process its own rows; leave it out")
        size, groups = self.args.eval_batch_size, self.args.world_size // self.ranks
        batches = list(BatchSampler(sampler, size, self.args.dataloader_drop_last))
        self._examples = sum(map(len, batches))
        batches += batches[-1:] * (-len(batches) % groups)
        mine = batches[self.args.process_index // self.ranks :: groups]
        return prepare_data_loader(
            self._loader(dataset, what, batch_sampler=mine), num_processes=1, process_index=0
        )

    # ---- losses

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """The batches of a step, and how many labels all of its rows have, counted inside documents."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        return batches, self._count(batches) if batches else None

    def _count(self, batches: list[Any]) -> Tensor:
        """Labels of this step's rows, of all groups."""
        context = self._context()
        count = torch.zeros((), dtype=torch.int64, device=self.args.device)
        for batch in batches:
            if batch.get("labels") is None:
                raise PlanError(NO_LABELS)
            try:
                count += count_targets(batch, context.plan, context.accepts).to(count.device)
            except ValueError:
                continue  # the model's inputs are checked on all ranks together
        if self.args.world_size > 1:
            dist.all_reduce(count)
        return count // self.ranks  # each rank of a group has counted the group's rows

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """This rank's part of the step's loss, times the world size that Trainer's wrapper divides by.

        In evaluation the loss of the row, the same on each of its ranks; nan without a label.
        """
        context = self._context()
        extra: dict[str, Any] = {}
        if self.args.label_smoothing_factor:
            extra["label_smoothing"] = self.args.label_smoothing_factor
        if not self._evaluating:
            if num_items_in_batch is None:
                raise PlanError(NO_LABELS)
            extra["num_items_in_batch"] = num_items_in_batch
        outputs = model(**inputs, **extra)
        loss = outputs["loss"]
        if self._evaluating:
            call = context.call
            assert call is not None
            loss = loss.detach().clone()
            if self.ranks > 1:
                dist.all_reduce(loss, group=context.group)
            loss = torch.where(call.targets.to(loss.device) > 0, loss, math.nan)
        else:
            loss = loss * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's; the log begins anew."""
        self._labelled = {}
        return super().train(*args, **kwargs)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Trainer's; remembers the step's number of labels for the log."""
        self._labelled[self.state.global_step] = num_items_in_batch
        return super().training_step(model, inputs, num_items_in_batch)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Trainer's; the loss is the mean of the steps that have a label, nan where none has."""
        if "loss" in logs and self._labelled:
            steps = len(self._labelled)
            labelled = sum(int(n) > 0 for n in self._labelled.values() if n is not None)
            logs["loss"] = logs["loss"] * steps / labelled if labelled else math.nan
            self._labelled = {}
        super().log(logs, *args, **kwargs)

    # ---- evaluation

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's, with every row counted once."""
        self._context()
        self.gather_function = self._gather_rows
        return super().evaluation_loop(*args, **kwargs)

    def prediction_step(
        self,
        model: Any,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> Any:
        """The loss of the row and, unless only that is wanted, its logits, of whole rows."""
        self._evaluating = True
        try:
            loss, logits, labels = super().prediction_step(
                model, inputs, prediction_loss_only, ignore_keys=ignore_keys
            )
        finally:
            self._evaluating = False
        if logits is None or prediction_loss_only:
            return loss, logits, labels
        context = self._context()
        assert context.call is not None
        if not isinstance(logits, Tensor):
            raise PlanError(
                f"predictions are {len(logits)} outputs of the model, and only logits are put together "
                "from all ranks; leave the others out (output_hidden_states, output_router_logits), or "
                "name them in ignore_keys"
            )
        return loss, gather(logits, context.call.run.plan, context.group, dim=1), labels

    def _gather_rows(self, data: Any) -> Any:
        """What all processes have -> what one process would have: each group's once, no batch twice."""
        if isinstance(data, list | tuple):
            return type(data)(self._gather_rows(x) for x in data)
        batch, groups = self.args.eval_batch_size, self.args.world_size // self.ranks
        if groups > 1:
            data = self.accelerator.pad_across_processes(data, dim=0, pad_index=-100)
        rows = data.shape[0]  # one for each example, or one for a packed batch
        if self.args.world_size > 1:
            data = self.accelerator.gather(data.contiguous())
            data = data.unflatten(0, (groups, self.ranks, rows))[:, 0].flatten(0, 1)
        left = self._examples % (batch * groups)
        if left and self.accelerator.gradient_state.end_of_dataloader:
            full = rows == batch or (rows > 1 and groups == 1)
            data = data[: left if full else math.ceil(left / batch) * rows]
        return data
