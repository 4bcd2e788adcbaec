# %% [markdown]
# # 2. A schedule is a table
#
# Afterwards you can write a schedule and prove it right, without a GPU. Needs
# [unit 1](unit_01_attention_in_pieces.ipynb).
#
# ## Picture and question (5 min)
#
# Four ranks hold a quarter of the keys and values (KV) each: rank 0's are called `kv0`. Queries stay on
# their rank, so every `kv` must come to every rank. The oldest schedule is the **ring**: in every step
# each rank sends to its right neighbour, rank + 1 (the last one to rank 0). First it sends its own `kv`,
# then what came from the left. (In JupyterLab, drag the slider under the picture.)
#
# *After how many steps has every rank seen every `kv`? Which links are never used?*

# %% tags=["setup"]
import tasp_core as tasp
import visualize
from tasp_course import unit_02 as unit

# %%
plan = tasp.plan([64], 4, schedule="ring", layout="contiguous")
visualize.hops(plan)

# %% [markdown]
# A **schedule** says which rank sends whose KV to which rank, and when. One `kv` sent over one link in one
# step is a **hop**. A table of hops describes a schedule completely. A **plan** is a schedule for certain
# tokens on certain ranks. In a printed plan a row is a step, a column a receiver; `3>kv2.0` below `into 0`
# is `kv2`, which comes from rank 3:

# %%
print(plan)

# %% [markdown]
# Each hop also has a **text form**, one line. `t2 3>0 kv1.0` says: in step 2 rank 3 sends rank 0 share 0
# of rank 1's KV. A **share** is a chunk of a rank's KV: the KV of some of its tokens, sent as one piece.
# From unit 6 on a rank's KV is cut into several shares, which take different routes. In this unit there is
# one share per rank, number 0. What arrives in a step can be computed on, and sent on, in the next step.

# %%
plan.hops().lines()

# %% [markdown]
# ## Exercise 1: write the ring (12 min)
#
# Write `ring(n)`: it returns the hops of this schedule for `n` ranks in text form, a list of strings in
# any order. In step `t` rank `r` sends to its right neighbour a `kv` that has made `t` hops already, each
# by one rank to the right. Which rank's `kv` is it? Numbers wrap around: `% n`.


# %% tags=["exercise"]
def ring(n):
    return ...


# %% tags=["solution"]
def ring(n):
    return [f"t{t} {r}>{(r + 1) % n} kv{(r - t) % n}.0" for t in range(n - 1) for r in range(n)]


# %% tags=["check"]
unit.check_ring(ring)

# %% [markdown]
# The check does not compare your hops with a list. It *proves* them for several `n`, by following which
# rank holds which shares: no rank sends what it does not hold, every query meets every key exactly once,
# no link carries more than one share per step. The same proof for the plan above (gradients and even work
# are for later units):

# %%
print(tasp.check(plan))

# %% [markdown]
# ## Exercise 2: find the fault (10 min)
#
# Here are three tables for four ranks, each with **one** wrong or missing hop: a rank sends what it does
# not hold yet, a share never arrives, or a link carries two shares in a step. Find the fault by eye, then
# repair it: write the hop to take out (or `""`) and the hop to put in, in text form. `.0` is the share,
# `-` means no hop.

# %% tags=["setup"]
broken = unit.broken_tables()

# %%
for name, lines in broken.items():
    print(f"{name}\n{unit.show(lines)}\n")

# %% tags=["exercise"]
repairs = {"A": ..., "B": ..., "C": ...}  # e.g. "A": ("t0 0>1 kv0.0", "t1 0>1 kv0.0")

# %% tags=["solution"]
repairs = {
    "A": ("t0 3>1 kv2.0", "t2 0>1 kv2.0"),
    "B": ("", "t2 3>0 kv1.0"),
    "C": ("t2 2>3 kv1.0", "t1 2>3 kv1.0"),
}

# %% tags=["check"]
unit.check_repairs(repairs)

# %% [markdown]
# The checker points at the wrong step:

# %%
try:
    unit.prove(broken["A"], 4)
except tasp.PlanError as error:
    print(error)

# %% [markdown]
# ## Exercise 3: the fewest steps (12 min)
#
# A ring uses one outgoing link of every rank. Suppose there is a link between *every* two ranks, but a
# rank can send only `ports` shares per step, and receive only `ports`. How few steps are enough, and what
# is the table? Write `quick(n, ports)`, which returns hops in text form, as `ring` does. No share needs to
# be forwarded: rank `r` sends its own `kv` to `r + 1`, `r + 2`, ..., `r + n - 1`, `ports` of them in each
# step.


# %% tags=["exercise"]
def quick(n, ports):
    return ...


# %% tags=["solution"]
def quick(n, ports):
    return [f"t{(d - 1) // ports} {r}>{(r + d) % n} kv{r}.0" for d in range(1, n) for r in range(n)]


# %% tags=["check"]
unit.check_quick(quick)

# %% [markdown]
# ## Play (6 min)
#
# Choose another schedule, more ranks, and step through it: `ring`, `all_gather`, `wave` and `tasp` first.
# Which ones forward shares? Which ones use all links in every step? (Some schedules need certain numbers
# of ranks or several nodes; the message says which. Nodes are in unit 5.)

# %%
from visualize.widgets import explore_schedule

explore_schedule(schedule="ring", ranks=4)

# %% [markdown]
# Or break a plan yourself: leave out any hop, and read what the checker says. A complete plan contains the
# backward pass, too: hops with `dkv` carry gradients of KV to their owner (unit 10).

# %%
lines = plan.hops(backward=True).lines()
try:
    print(tasp.check(plan.with_hops(lines[:4] + lines[5:])))
except tasp.PlanError as error:
    print(error)

# %% [markdown]
# ## Recap (5 min)
#
# Replace each `...`. Questions 1 and 2 are about the hop `t3 2>5 kv1.4`.
#
# 1. Which rank receives?
# 2. Which rank's KV travels?
# 3. How many steps does a ring of 8 ranks need?
# 4. Between 8 ranks there are 56 links, if the two directions count as two. How many does the ring use?
# 5. 8 ranks, each can send and receive 3 shares per step: what is the fewest number of steps?

# %% tags=["exercise"]
recap = [..., ..., ..., ..., ...]

# %% tags=["solution"]
recap = [5, 1, 7, 8, 3]

# %% tags=["check"]
unit.check_recap(recap)
