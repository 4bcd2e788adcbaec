"""transformers' Trainer, with accelerate, on rows that are spread over ranks.

    collator = DataCollatorWithFlattening()                       # packs documents, position_ids restart
    planner = lambda docs: tasp.plan(docs, ranks)                 # a plan for every row
    trainer = RowTrainer(model, args, data_collator=collator, train_dataset=data, ranks=ranks)
    with sequence_parallel(model, planner, group):                # group: ranks r, r + 1, ... of one row
        trainer.train()                                           # world size = rows at once x ranks

Groups are `ranks` consecutive global ranks. Losses and gradients equal those of one process with as many
rows a step, by Trainer's own averaging. Not covered: evaluation (its rows are spread in the same way).
"""

from __future__ import annotations

from typing import Any

from accelerate.data_loader import prepare_data_loader
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import Trainer

from ..errors import PlanError


class RowTrainer(Trainer):
    """A Trainer of which each `ranks` consecutive processes work on the same row.

    Raises:
        PlanError: a world size that `ranks` does not divide; a setting that breaks the loss.
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

    def get_train_dataloader(self) -> DataLoader:
        """Rows for this process's group: the same on each of its ranks."""
        if self.train_dataset is None:
            raise PlanError("Trainer has no train_dataset")
        loader: DataLoader = DataLoader(
            self.train_dataset,
            self.args.train_batch_size,
            sampler=self._get_train_sampler(),
            collate_fn=self.data_collator,
        )
        return prepare_data_loader(
            loader,
            num_processes=self.args.world_size // self.ranks,
            process_index=self.args.process_index // self.ranks,
            use_seedable_sampler=True,
            data_seed=self.args.data_seed or self.args.seed,
        )

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:  # fmt: skip
        """The loss with its labels counted once, not once by every rank of a group."""
        if num_items_in_batch is None:
            raise PlanError(
                "the batch has no labels to count; use a collator that returns `labels`"
            )
        items: Any = num_items_in_batch / self.ranks
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch=items)
