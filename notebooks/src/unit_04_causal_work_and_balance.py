# %% [markdown]
# # 4. Causal work and balance
#
# Afterwards you can explain and fix idle ranks. Needs [unit 3](unit_03_from_table_to_ranks.ipynb).
#
# ## Picture and question (5 min)
#
# With a **causal** mask a token sees itself and the tokens before it. Below, a colour is the rank that
# computes a (query, key) pair: rank 0 has the first quarter of the sequence, rank 3 the last. All ranks
# have the same number of tokens, but not the same amount of work.
#
# *By what factor does the busiest rank prolong the pass, compared with perfectly even work?*

# %% tags=["setup"]
import tasp_core as tasp
import visualize
from tasp_course import unit_04 as unit

# %%
plan = tasp.plan([256], 4, schedule="ring", layout="contiguous")
visualize.mask(plan)

# %% [markdown]
# ## Exercise 1: work of a rank in a step (12 min)
#
# `n` ranks form a ring, each with `b` consecutive tokens. In step `t` rank `r` computes its queries
# against the KV of rank `r - t`, if there is such a rank. Otherwise it has the KV of rank `r - t + n`,
# which come *later* in the sequence. How many pairs are visible? Count three cases: earlier KV, own KV,
# later KV. Write `work(n, b)`: a list of `n` lists, so that `work(n, b)[r][t]` is the number of pairs of
# rank `r` in step `t`.


# %% tags=["exercise"]
def work(n, b):
    return ...


# %% tags=["solution"]
def work(n, b):
    own = b * (b + 1) // 2  # a token sees itself, too
    return [[own if t == 0 else b * b * (t <= r) for t in range(n)] for r in range(n)]


# %% tags=["check"]
unit.check_work(work)

# %% [markdown]
# The checker counts the same from the plan, whatever the layout. Rows are ranks, columns are steps:

# %%
tasp.check(plan).work

# %% [markdown]
# A rank can go on only when its neighbours are ready, and they wait for theirs: so all ranks wait for the
# slowest. The ranks with the first tokens compute almost nothing, and yet the pass lasts as long as if all
# ranks had the work of the last one.
#
# ## Exercise 2: zigzag (12 min)
#
# The fix costs nothing: distribute the tokens differently. Cut the sequence into `2 * n` blocks. Rank `r`
# gets block `r` from the front and block `r` counted from the back. For four ranks, these are the ranks of
# the eight blocks:
#
#     0 1 2 3 3 2 1 0
#
# Write `zigzag(rank, n, total)`: the list of the rank's tokens, the front block first, each block in the
# order of the sequence. `total` is a multiple of `2 * n`.


# %% tags=["exercise"]
def zigzag(rank, n, total):
    return ...


# %% tags=["solution"]
def zigzag(rank, n, total):
    size = total // (2 * n)
    back = (2 * n - 1 - rank) * size
    return [*range(rank * size, (rank + 1) * size), *range(back, back + size)]


# %% tags=["check"]
unit.check_zigzag(zigzag)

# %%
even = tasp.plan([256], 4, schedule="ring", layout="zigzag")
visualize.balance([("contiguous", plan), ("zigzag", even)])

# %% [markdown]
# The *worst single step* is the same ratio within one step: in the last step of `contiguous` only rank 3
# computes anything.
#
# ## Exercise 3: predict the bound, then plot (10 min)
#
# Back to contiguous blocks. For long sequences, what is the work of the busiest rank over the mean of all
# ranks? Write `bound(n)`, which returns this number from a formula. (A step counts `b * b` pairs, the step
# on the own block half as many; `b` cancels.) Predict first: what does the ratio tend to for many ranks?


# %% tags=["exercise"]
def bound(n):
    return ...


# %% tags=["solution"]
def bound(n):
    busiest = (n - 1) + 1 / 2
    mean = (n * (n - 1) / 2 + n / 2) / n
    return busiest / mean  # 2 - 1 / n


# %% tags=["check"]
unit.check_bound(bound)

# %%
for n in (2, 4, 8, 32):
    long = tasp.plan([1000 * n], n, schedule="ring", layout="contiguous")
    print(f"{n:3} ranks: counted {tasp.check(long).balance:.3f}, yours {bound(n)}")

# %%
visualize.balance(
    [(f"{n} ranks", tasp.plan([1000 * n], n, schedule="ring", layout="contiguous")) for n in (2, 8)]
)

# %% [markdown]
# ## Play (6 min)
#
# Zigzag is perfect for one document. Now pack several documents into the sequence, with commas between
# their lengths: a token sees its own document only. Which layout keeps the work even? Try one long
# document and many short ones, and other layouts. `striped` distributes one token after the other,
# `per_document` is a zigzag inside each document, and `balanced` cuts few documents and still gives even
# work (unit 8).

# %%
from visualize.widgets import explore_balance

explore_balance(lengths="1024", ranks=4)

# %% [markdown]
# Time, too: a longer sequence on the slow machine of unit 3. Communication can be hidden behind compute;
# idle ranks cannot.

# %%
from tasp_course.unit_03 import SLOW


def timed(layout):
    plan = tasp.plan([40_000], 4, schedule="ring", layout=layout, machine=SLOW)
    return layout, tasp.simulate(plan, heads=8, head_dim=128)


visualize.timeline([timed("contiguous"), timed("zigzag")])

# %% [markdown]
# ## Recap (5 min)
#
# 1. How many pairs does one causal document of 4 tokens have?
# 2. A ring of 4 ranks, contiguous: in how many of the 4 compute steps does rank 0 compute anything?
# 3. Zigzag, 4 ranks, 8 blocks: which block does rank 1 hold besides block 1?
# 4. With very many ranks and the contiguous layout, what is the work of the busiest rank over the mean?
# 5. A sequence of two documents of equal length on 2 ranks, contiguous: what is the work of the busiest
#    rank over the mean?

# %% tags=["exercise"]
recap = [..., ..., ..., ..., ...]

# %% tags=["solution"]
recap = [10, 1, 6, 2.0, 1.0]

# %% tags=["check"]
unit.check_recap(recap)
