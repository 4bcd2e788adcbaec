"""Unit 0, set-up: checks."""

from __future__ import annotations

import math
from typing import Any

import tasp_core as tasp
from tasp_core.lab.doctor import examine

from .verdict import exercise, expect, recap


@exercise
def check_kernels(answer: Any) -> None:
    """The names of the kernels that the doctor finds usable."""
    usable = [name for name, text in examine()["kernels"].items() if text.startswith("ok")]
    expect(isinstance(answer, list), "a list of names is asked for")
    unknown = [name for name in answer if name not in usable]
    expect(not unknown, f"the line of {unknown[:1]} does not begin with ok")
    expect(sorted(answer) == sorted(usable), f"{len(usable)} lines begin with ok")


@exercise
def check_hello(answer: Any) -> None:
    """A greeting of each rank, with rank and number of ranks in it."""
    for ranks in (4, 3):
        greetings = tasp.launch(answer, ranks, timeout_s=30)
        for rank, greeting in enumerate(greetings):
            right = f"rank {rank} of {ranks}"
            expect(
                greeting == right,
                f"of {ranks} ranks, rank {rank} should return {right!r}, not {greeting!r}",
            )


@exercise
def check_share(answer: Any) -> None:
    """Each rank's number over the sum of all ranks' numbers."""
    numbers = [1.0, 5.0, 2.0, 8.0]

    def knows_its_own(rank: int, group: Any) -> Any:
        return answer(rank, group, [x if r == rank else math.nan for r, x in enumerate(numbers)])

    returned = tasp.launch(knows_its_own, 4, timeout_s=10)
    for rank, (got, number) in enumerate(zip(returned, numbers, strict=True)):
        right = number / sum(numbers)
        expect(isinstance(got, float), f"rank {rank} should return a float, got {got!r}")
        expect(
            not math.isnan(got),
            f"rank {rank} used numbers of other ranks from its list, where they are nan: "
            "they have to be sent, see all_reduce",
        )
        hint = f"with the numbers {numbers}, rank {rank} should return {right}, got {got:.7g}"
        if abs(got - 1) < 1e-6:
            hint += "; all_reduce writes the sum into the tensor it gets: pass it a copy of `own`"
        expect(abs(got - right) < 1e-6, hint)


check_recap = recap(
    (7, "one result per rank"),
    (6, "ranks are numbered from 0"),
    (3, "processes do not share variables"),
    (6, "every rank's x is added up: 0 + 1 + 2 + 3"),
    ("wait", "a collective needs all ranks of the group"),
)
