"""Wrong answers to unit 0, by check and by what is wrong."""

import torch
import torch.distributed as dist


def sum_of_others(rank, group, numbers):
    total = torch.tensor(numbers[rank])
    dist.all_reduce(total, group=group)
    return float(numbers[rank] / (total - numbers[rank]))


def overwritten(rank, group, numbers):
    own = torch.tensor(numbers[rank])
    dist.all_reduce(own, group=group)
    return float(own / own)


WRONG = {
    "check_kernels": {
        "one is missing": ["math"],
        "all known kernels": ["math", "aten cpu", "aten", "flash2", "flash3", "flash4"],
        "a constant": 1,
    },
    "check_hello": {
        "ranks counted from 1": lambda rank, group: (
            f"rank {rank + 1} of {dist.get_world_size(group)}"
        ),
        "always four ranks": lambda rank, group: f"rank {rank} of 4",
    },
    "check_share": {
        "a constant": lambda rank, group, numbers: 0.25,
        "the own number is not in the sum": sum_of_others,
        "nothing is sent": lambda rank, group, numbers: float(numbers[rank] / sum(numbers)),
        "the sum overwrites the own number": overwritten,
        "a tensor": lambda rank, group, numbers: torch.tensor(numbers[rank] / sum(numbers)),
    },
    "check_recap": {
        "ranks counted from 1": [7, 7, 3, 6, "wait"],
        "shared variables": [7, 6, 5, 6, "wait"],
    },
}
