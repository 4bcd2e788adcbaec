# %% [markdown]
# # 0. Set-up
#
# Afterwards you can start real ranks on a laptop and let them talk. Needs Python, nothing else.
#
# ## Picture and question (2 min)
#
# A long text does not fit on one accelerator, so several share the work. Each is driven by one
# process, called a **rank**; ranks are numbered from 0. Here are four of them, and the links between
# every two. *Can this machine, without any accelerator, run four ranks that really exchange data?*

# %% tags=["setup"]
import torch
import torch.distributed as dist

import tasp_core as tasp
import visualize
from tasp_course import unit_00 as unit

# %%
visualize.topology(tasp.machine("mesh4"))

# %% [markdown]
# ## Exercise 1: ask the doctor (3 min)
#
# `examine` looks at this machine: packages, devices, attention kernels, and whether two ranks reach
# each other. The command line has the same: `python -m tasp_core doctor`.

# %% tags=["setup"]
from tasp_core.lab.doctor import examine

found = examine()
found

# %% [markdown]
# Which kernels can be used here? Make a list of the names in `found["kernels"]` whose text begins
# with `ok`. (`math` always works; it is slow and exact.)

# %% tags=["exercise"]
kernels = ...

# %% tags=["solution"]
kernels = [name for name, text in found["kernels"].items() if text.startswith("ok")]

# %% tags=["check"]
unit.check_kernels(kernels)

# %% [markdown]
# ## Exercise 2: hello from each rank (3 min)
#
# `tasp.launch(fn, 4)` starts four processes, calls `fn(rank, group)` in each, and returns the four
# results in rank order. `group` is the set of processes that talk to each other; all functions of
# `torch.distributed` take it. `dist.get_world_size(group)` is the number of ranks in it.
#
# Let every rank return a greeting such as `rank 2 of 4`.


# %% tags=["exercise"]
def hello(rank, group):
    return ...


# %% tags=["solution"]
def hello(rank, group):
    return f"rank {rank} of {dist.get_world_size(group)}"


# %% tags=["check"]
unit.check_hello(hello)

# %%
tasp.launch(hello, 4)

# %% [markdown]
# The four processes do not share variables: each has its own copy of everything. What one should
# know from another has to travel.
#
# ## Exercise 3: a sum over all ranks (4 min)
#
# A **collective** is a function that all ranks of a group call together. `dist.all_reduce(x,
# group=group)` adds up the tensors `x` of all ranks and writes the sum into every `x`.
#
# Each rank holds `own`, a number that the others do not know. Return its **share** of the total, a
# float: `own / total`.


# %% tags=["exercise"]
def share(rank, group, numbers):
    own = torch.tensor(numbers[rank])
    return ...


# %% tags=["solution"]
def share(rank, group, numbers):
    own = torch.tensor(numbers[rank])
    total = own.clone()
    dist.all_reduce(total, group=group)
    return float(own / total)


# %% tags=["check"]
unit.check_share(share)

# %%
tasp.launch(share, 4, [1.0, 2.0, 3.0, 4.0])

# %% [markdown]
# ## Play (1 min)
#
# What if a rank breaks? The error names it, and the others are ended: nothing hangs. Let another rank
# fail, or two; let one sleep and give `launch` a small `timeout_s`.


# %%
def fails(rank, group):
    if rank == 2:
        raise ValueError("out of coffee")
    dist.barrier(group)


try:
    tasp.launch(fails, 4)
except tasp.RankError as error:
    print("failed first: rank", error.first, "|", error.cause)

# %% [markdown]
# ## Recap (2 min)
#
# Replace each `...`; words in quotation marks.
#
# 1. `tasp.launch(hello, 7)`: how long is the list that comes back?
# 2. What is the number of the last of these ranks?
# 3. Rank 0 sets `x = 5`. What is `x` on rank 1, where it was 3?
# 4. Each of 4 ranks has `x = rank`. What is `x` on rank 1 after `dist.all_reduce(x)`?
# 5. Three of four ranks call `dist.all_reduce`, one does not. Do the three `"return"` or `"wait"`?

# %% tags=["exercise"]
recap = [..., ..., ..., ..., ...]

# %% tags=["solution"]
recap = [7, 6, 3, 6, "wait"]

# %% tags=["check"]
unit.check_recap(recap)
