# %% [markdown]
# # 2. A schedule is a table
#
# Afterwards you can write a schedule and prove it right, without a GPU. Needs
# [unit 1](unit_01_attention_in_pieces.ipynb).
#
# ## Picture and question (5 min)
#
# Four ranks hold a quarter of the keys and values each: rank 0's are called `kv0`. Queries stay at
# home, so every rank must be visited by every `kv`. The oldest way: everybody passes on to its right
# neighbour what came from the left. (In JupyterLab, drag the slider under the picture.)
#
# *After how many steps has everybody seen everything? Which links are never used?*

# %% tags=["setup"]
import tasp_core as tasp
import visualize
from tasp_course import unit_02 as unit

# %%
plan = tasp.plan([64], 4, schedule="ring", layout="contiguous")
visualize.hops(plan)

# %% [markdown]
# Nothing more is needed to describe a schedule than a table of such **hops**. Printed, a row is a step,
# a column a receiver:

# %%
print(plan)

# %% [markdown]
# And each hop is a word. `t2 3>0 kv1.0` says: in step 2 rank 3 sends rank 0 share 0 of rank 1's keys
# and values. (In this unit a rank's keys are one share, number 0.) What arrives in a step can be
# computed on, and passed on, in the next.

# %%
plan.hops().words()

# %% [markdown]
# ## Exercise 1: write the ring (12 min)
#
# Write `ring(n)`: the words of this schedule for any number of ranks. In step `t` rank `r` sends to its
# right neighbour what came to it `t` hops ago. Whose keys are those? Indices wrap around: `% n`.


# %% tags=["exercise"]
def ring(n):
    return ...


# %% tags=["solution"]
def ring(n):
    return [
        f"t{t} {r}>{(r + 1) % n} kv{(r - t) % n}.0"
        for t in range(n - 1)
        for r in range(n)
    ]  # fmt: skip


# %% tags=["check"]
unit.check_ring(ring)

# %% [markdown]
# The check does not compare your words with a list. It *proves* them, on sets, for several `n`: nobody
# sends what it does not hold, every query meets every key exactly once, no link carries more than one
# share a step. The same proof for the plan above:

# %%
print(tasp.check(plan))

# %% [markdown]
# ## Exercise 2: find the fault (10 min)
#
# Three tables for four ranks, each with **one** wrong or missing hop: a rank sends what it does not
# have yet, something never arrives, or a link carries two shares in a step. Find the fault by eye, then
# repair: write the word to take out (or `""`) and the word to put in.

# %% tags=["setup"]
broken = unit.broken_tables()

# %%
for name, words in broken.items():
    print(f"{name}\n{unit.show(words)}\n")

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
# The checker points at the step:

# %%
try:
    unit.prove(broken["A"], 4)
except tasp.PlanError as error:
    print(error)

# %% [markdown]
# ## Exercise 3: the fewest steps (12 min)
#
# A ring uses one link of every rank. Suppose there is a link between *every* two ranks, but a rank can
# send only `ports` shares in a step, and take in only `ports`. How few steps are enough, and what is
# the table? Write `quick(n, ports)`. Nothing needs to be forwarded: in which step does rank `r` send
# its own share to `r + 1`, `r + 2`, ...?


# %% tags=["exercise"]
def quick(n, ports):
    return ...


# %% tags=["solution"]
def quick(n, ports):
    return [
        f"t{(d - 1) // ports} {r}>{(r + d) % n} kv{r}.0"
        for d in range(1, n)
        for r in range(n)
    ]  # fmt: skip


# %% tags=["check"]
unit.check_quick(quick)

# %% [markdown]
# ## Play (6 min)
#
# Choose another schedule, more ranks, and step through it. Which ones forward? Which ones use all links
# in every step?

# %%
from visualize.widgets import explore_schedule

explore_schedule()

# %% [markdown]
# Or break a plan yourself: leave out any hop, and read what the checker says.

# %%
words = plan.hops(backward=True).words()
try:
    print(tasp.check(plan.with_hops(words[:4] + words[5:])))
except tasp.PlanError as error:
    print(error)

# %% [markdown]
# ## Recap (5 min)
#
# Questions 1 and 2 are about the word `t3 2>5 kv1.4`.
#
# 1. Which rank receives?
# 2. Whose keys and values travel: of which rank?
# 3. How many steps does a ring of 8 ranks need?
# 4. Between 8 ranks there are 56 links, if the two directions count as two. How many does the ring use?
# 5. 8 ranks, everybody can send and receive 3 shares a step: the fewest steps?

# %% tags=["exercise"]
recap = [..., ..., ..., ..., ...]

# %% tags=["solution"]
recap = [5, 1, 7, 8, 3]

# %% tags=["check"]
unit.check_recap(recap)
