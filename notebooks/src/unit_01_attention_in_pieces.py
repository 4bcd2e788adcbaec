# %% [markdown]
# # 1. Attention in pieces
#
# Afterwards you can merge partial outputs exactly. Needs [unit 0](unit_00_set_up.ipynb).
#
# ## Picture and question (5 min)
#
# Every token has three vectors: a **query**, a **key** and a **value**. Attention compares a token's query
# with the keys of the tokens it may see (itself and those before it, where attention is **causal**), and
# mixes their values. Keys and values always travel together: **KV** means both. In the picture a row is a
# query, a column a key, a coloured field a pair that is computed. The tokens lie on four ranks, a quarter
# on each. Rank 3, the last, has queries that see KV of *all* ranks, but this KV arrives from one rank
# after the other: each colour is one step.
#
# *Softmax divides by a sum over all keys. Can it be computed piece by piece, and is the result exact?*

# %% tags=["setup"]
import torch

import tasp_core as tasp
import visualize
from tasp_course import unit_01 as unit

# %%
visualize.mask(tasp.plan([64], 4, schedule="ring", layout="contiguous"), rank=3)

# %% [markdown]
# A query has a **score** with each key, the two vectors' scaled product. With scores `s1, s2, ...` and
# values `v1, v2, ...` of the keys it sees:
#
#     out = (exp(s1) * v1 + exp(s2) * v2 + ...) / (exp(s1) + exp(s2) + ...)
#     lse = log(exp(s1) + exp(s2) + ...)
#
# The **lse** (log-sum-exp) is the logarithm of the denominator. Attention kernels return it with the
# output. An output over a part of the KV, together with its lse, is a **partial output**: the two are all
# that is needed to add further KV later.
#
# `attend(q, k, v)` computes both. Shapes in this unit: `T` queries of `D` numbers each, `S` keys and as
# many values; `out` is `[T, D]`, `lse` is `[T]`, one number per query. Here every query sees every key.

# %% tags=["setup"]
from tasp_course.unit_01 import attend

torch.manual_seed(0)
q, k, v = (torch.randn(n, 8) for n in (3, 10, 10))
out, lse = attend(q, k, v)
out.shape, lse.shape

# %% [markdown]
# ## Exercise 1: predict an lse (10 min)
#
# Without running attention: what is the lse of a query that sees
#
# - `one`: a single key, with score 3?
# - `eight`: eight keys, all with score 0?
# - `two`: two keys, with scores 0 and 1000? (`exp(1000)` overflows, the lse does not; as a float.)
# - `none`: no key at all?
#
# Use `math.log`, `math.inf` as you like.

# %% tags=["exercise"]
import math

predicted = {"one": ..., "eight": ..., "two": ..., "none": ...}

# %% tags=["solution"]
import math

predicted = {"one": 3, "eight": math.log(8), "two": 1000, "none": -math.inf}

# %% tags=["check"]
unit.check_lse(predicted)

# %% [markdown]
# ## Exercise 2: merge two partial outputs (12 min)
#
# The KV is cut into two sets. Each set gives its own `(out, lse)`. Over both sets together:
#
#     lse = log(exp(lse1) + exp(lse2))
#     out = exp(lse1 - lse) * out1 + exp(lse2 - lse) * out2
#
# `torch.logaddexp(lse1, lse2)` computes the first without overflow. Write `merge`, which returns
# `(out, lse)`. Outputs are `[T, D]`, lses `[T]`, so a weight `w` per query must be written `w[:, None]` to
# multiply an output. A set may be empty: then its lse is `-inf` and its output 0. Both may be empty; the
# result is then `(0, -inf)` again, not `nan` (what is `-inf` minus `-inf`?).


# %% tags=["exercise"]
def merge(out1, lse1, out2, lse2):
    return ..., ...


# %% tags=["solution"]
def merge(out1, lse1, out2, lse2):
    lse = torch.logaddexp(lse1, lse2)
    base = torch.where(lse == -torch.inf, 0.0, lse)  # -inf minus -inf would be nan
    weight1, weight2 = torch.exp(lse1 - base), torch.exp(lse2 - base)
    return weight1[:, None] * out1 + weight2[:, None] * out2, lse


# %% tags=["check"]
unit.check_merge(merge)

# %% [markdown]
# The package's own [merge](../../tasp_core/runtime/merge.py) uses one weight instead of two. `unit.join`
# wraps it for this unit and takes pairs: `join((out1, lse1), (out2, lse2))`. The next cell cuts ten keys
# into two pieces, merges, and subtracts the output over all ten at once:

# %%
joined, _ = unit.join(attend(q, k[:4], v[:4]), attend(q, k[4:], v[4:]))
joined - out

# %% [markdown]
# Differences of that size are the rounding of float32, not an approximation: attention piece by piece is
# *exact*.
#
# ## Exercise 3: stream unequal blocks (12 min)
#
# Keys and values come as a stream of blocks `(k, v)` of different lengths, some of them empty. Memory
# holds **one** block at a time: it is overwritten when the next one comes, so keep `(out, lse)` only.
# Begin with the empty state, and merge each block with your `merge` or `unit.join`. `attend` works for
# empty blocks, too. Return the output.


# %% tags=["exercise"]
def stream(q, blocks):
    out, lse = torch.zeros_like(q), torch.full((len(q),), -torch.inf)
    for k, v in blocks:
        pass
    return ...


# %% tags=["solution"]
def stream(q, blocks):
    out, lse = torch.zeros_like(q), torch.full((len(q),), -torch.inf)
    for k, v in blocks:
        out, lse = unit.join((out, lse), attend(q, k, v))
    return out


# %% tags=["check"]
unit.check_stream(stream)

# %% [markdown]
# ## Play (6 min)
#
# Four real ranks, as in unit 0. Each attends to a part of the KV with all queries. `all_gather` is a
# collective: it copies what each rank has (here its `out`, then its `lse`) into a list on every rank.
# `unit.fold` merges a list of partial outputs. The last line shows how far each rank is from the result
# above.
#
# Change the number of ranks; take `ranks = 11`, so that one rank has no key; or put `q = 50 * q` and
# `out, lse = attend(q, k, v)` before it, for large scores. Is the error still that of rounding?


# %%
def attend_together(rank, group, ranks):
    mine = slice(len(k) * rank // ranks, len(k) * (rank + 1) // ranks)
    part = [x.contiguous() for x in attend(q, k[mine], v[mine])]
    parts = [[torch.empty_like(x) for _ in range(ranks)] for x in part]
    for x, into in zip(part, parts, strict=True):
        torch.distributed.all_gather(into, x, group=group)
    return unit.fold(zip(*parts, strict=True))


ranks = 4
results = tasp.launch(attend_together, ranks, ranks)
[f"{(found - out).abs().max():.1e}" for found, _ in results]

# %% [markdown]
# Which pieces does a rank compute, and when? Move `rank` and `step` to see the pairs of one rank, step by
# step. (Layouts are in unit 4, several documents and windows in unit 8.)

# %%
from visualize.widgets import explore_mask

explore_mask(lengths="64", layout="contiguous", rank=3)

# %% [markdown]
# ## Recap (5 min)
#
# Replace each `...`. Put words in quotation marks.
#
# 1. Does the order in which partial outputs are merged change the exact result, `"yes"` or `"no"`?
# 2. What is the lse of no key? (a float)
# 3. Two partial outputs have equal lse. What is the weight of the first one's output?
# 4. The output over 5 keys is all 2.0, the one over 5 other keys 6.0; all scores are equal. What is the
#    merged output?
# 5. A rank sends its output, `D` numbers per query. How many more numbers per query must it send, so that
#    the receiver can merge?

# %% tags=["exercise"]
recap = [..., ..., ..., ..., ...]

# %% tags=["solution"]
recap = ["no", -math.inf, 0.5, 4.0, 1]

# %% tags=["check"]
unit.check_recap(recap)
