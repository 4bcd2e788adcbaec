# %% [markdown]
# # 0. Set-up
#
# Afterwards you can start real ranks on a laptop and let them talk. Needs Python, nothing else.
#
# ## Picture and question (2 min)
#
# A long text does not fit on one accelerator (a GPU, say), so several divide the work. Each is driven by
# one process, called a **rank**; ranks are numbered from 0. Here are four of them, and the links between
# every two. (The figures beside the picture describe a machine; unit 5 is about them.)
#
# *Can this machine, without any accelerator, run four ranks that really exchange data?*
#
# Click a cell, then Shift+Enter runs it and goes on to the next one. The first takes some seconds.

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
# `examine` looks at this machine: packages, devices, kernels, and whether two ranks reach each other. A
# **kernel** here is a routine that computes attention, the operation that this course cuts into pieces.
# `gloo` is the part of torch that carries data between processes without a GPU. Skim what comes out:

# %% tags=["setup"]
from tasp_core.lab.doctor import examine

report = examine()
report

# %% [markdown]
# Which kernels can be used here? Look at these lines only:

# %%
report["kernels"]

# %% [markdown]
# Replace `...` by a list of the names whose text begins with `ok`, typed or computed. Run the cell, then
# the check below it; as often as you like. (In a terminal, `python -m tasp_core doctor` shows the same
# report.)

# %% tags=["exercise"]
kernels = ...

# %% tags=["solution"]
kernels = [name for name, text in report["kernels"].items() if text.startswith("ok")]

# %% tags=["check"]
unit.check_kernels(kernels)

# %% [markdown]
# ## Exercise 2: hello from each rank (3 min)
#
# `torch.distributed` (`dist` here) is the part of torch with which processes send each other tensors.
# `tasp.launch(fn, 4)` starts four processes, connects them, calls `fn(rank, group)` in each, and returns
# the four results in rank order. `group` is the set of processes that talk to each other; all functions
# of `dist` take it. `dist.get_world_size(group)` is the number of ranks in it.
#
# Let every rank return (not print) a greeting such as `rank 2 of 4`, for any number of ranks.


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
# The four processes do not share variables: each has its own copy of everything. Whatever one rank should
# know from another has to be sent.
#
# ## Exercise 3: a sum over all ranks (5 min)
#
# A **collective** is a function that all ranks of a group call together. `dist.all_reduce(x, group=group)`
# adds up the tensors `x` of all ranks and writes the sum into every `x`: what was in `x` is gone, and
# nothing is returned. `x.clone()` is a copy.
#
# Each rank has `own`, a number that the others do not know: in the check, all other `numbers` are `nan` on
# this rank. Return the fraction of the total that its own number is, as `float(own / total)`.


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
tasp.launch(share, 4, [1.0, 2.0, 3.0, 4.0], timeout_s=10)

# %% [markdown]
# ## Play (3 min)
#
# What if a rank fails? `dist.barrier(group)` waits for all ranks, and rank 2 never reaches it. The error
# names rank 2, and the other ranks are ended: nothing hangs. Let another rank fail, or two; or let one
# sleep instead (`import time`, `time.sleep(9)`), and write `tasp.launch(fails, 4, timeout_s=2)`.


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
# Replace each `...`, in the order of the questions. Put words in quotation marks.
#
# 1. `tasp.launch(hello, 7)`: how long is the list that comes back?
# 2. What is the number of the last of these ranks?
# 3. Rank 0 sets `x = 5`. What is `x` on rank 1, where it was 3?
# 4. On each of 4 ranks the tensor `x` holds the rank's number. What is in `x` on rank 1 after
#    `dist.all_reduce(x, group=group)`?
# 5. Three of four ranks call `dist.all_reduce`, one does not. Do the three `"return"` or `"wait"`?

# %% tags=["exercise"]
recap = [..., ..., ..., ..., ...]

# %% tags=["solution"]
recap = [7, 6, 3, 6, "wait"]

# %% tags=["check"]
unit.check_recap(recap)
