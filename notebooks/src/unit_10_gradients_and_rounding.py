# %% [markdown]
# # 10. Gradients and rounding
#
# Afterwards you can follow a gradient home, compute the backward pass of a tile, and say where bf16 hurts.
# Needs units 1, 2 and 3.

# %% tags=["setup"]
import torch

import tasp_core as tasp
import visualize
from tasp_course import unit_10 as unit
from tasp_course.unit_10 import COUNTS, DTYPES

# %% [markdown]
# ## Picture and question (5 min)
#
# In the backward pass keys travel round the ring once more: `kv2.0` in the table is what comes in of rank
# 2's keys and values. Each rank that sees them finds a part of their gradient. *How do the parts get home,
# and who adds them up?*

# %%
plan = unit.ring(4)
print(plan.table(backward=True))

# %%
visualize.memory(plan, rank=0, backward=True)

# %% [markdown]
# `dkv2.0` is what has been added up of the gradient of rank 2's keys and values. It follows the keys: a
# rank adds its part and hands the sum on, until it closes the ring at its owner.
#
# ## Exercise 1: the way home (10 min)
#
# A step communicates and computes at once. So compute step t uses the keys that arrived in communication
# step t - 1, and what a rank has added in compute step t can leave it in communication step t + 1. The
# owner adds its own part at home. Return the hops `(step, src, dst)` of the gradient of `owner`'s keys, on
# a ring 0, 1, ..., n - 1, 0. (The table above is the case of four ranks.)


# %% tags=["exercise"]
def way_home(owner, n):
    return ...  # e.g. [(2, 1, 2), ...]


# %% tags=["solution"]
def way_home(owner, n):
    # keys are on rank owner + d after step d - 1, computed on in step d, so their gradient leaves in d + 1
    return [(d + 1, (owner + d) % n, (owner + d + 1) % n) for d in range(1, n)]


# %% tags=["check"]
unit.check_route(way_home)

# %% [markdown]
# ## Exercise 2: backward through one tile (15 min)
#
# A block of queries meets a block of keys `k, v`: a **tile**, one of several; no mask. `dout` is the
# gradient of the output. With the *final* `out` and `lse` of the queries, over all tiles, each tile's part
# of the gradients stands alone:
#
#     p  = exp(scale * q k^T - lse)             weights, as in the forward pass
#     dv = p^T dout
#     delta = sum of dout * out                 over the numbers of a query: one a query, as lse
#     ds = p * (dout v^T - delta) * scale
#     dq = ds k                                 parts add up over tiles
#     dk = ds^T q
#
# Shapes: q, out, dout [T, D]; k, v [S, D]; lse, delta [T]. `k^T` is `k.T`, products without `*` are
# matrix products, `@`. Return dq, dk, dv.


# %% tags=["exercise"]
def tile_backward(dout, q, k, v, out, lse, scale):
    return ...


# %% tags=["solution"]
def tile_backward(dout, q, k, v, out, lse, scale):
    p = torch.exp(scale * q @ k.T - lse[:, None])
    delta = (dout * out).sum(-1, keepdim=True)
    ds = p * (dout @ v.T - delta) * scale
    return ds @ k, ds.T @ q, p.T @ dout


# %% tags=["check"]
unit.check_backward(tile_backward)

# %% [markdown]
# That is why forward keeps `lse`: neither the other tiles nor the scores have to come back.
#
# ## Exercise 3: predict the rounding (12 min)
#
# On its way home a gradient is added up and rounded once a hop. `unit.summed(parts, dtype)` does the same;
# here with parts that are normally distributed, with standard deviation `1`. How far off is the sum of n
# parts, as a root mean square?
#
# - rounding x to the nearest number of a dtype is off by about `eps * |x| / 5`;
# - the sum of the first k parts is about `sqrt(k)` large, for k = `1, ..., n`, and each is rounded;
# - roundings are independent: their squares add up, and the error is the root of that sum.

# %%
for dtype in DTYPES:
    print(dtype, "eps", torch.finfo(dtype).eps)

# %% [markdown]
# Return the predicted error of the sum of n parts, not divided by anything; a factor of 1.5 either way is
# allowed.


# %% tags=["exercise"]
def predicted(n, eps):
    return ...


# %% tags=["solution"]
def predicted(n, eps):
    squares = sum((eps / 5) ** 2 * k for k in range(1, n + 1))
    return squares**0.5


# %% tags=["check"]
unit.check_error(predicted)

# %% [markdown]
# The same errors, measured, relative to the size of the sum, `sqrt(n)`:

# %%
for dtype in DTYPES:
    print(dtype, {n: f"{unit.rounding(n, dtype) / n**0.5:.1e}" for n in COUNTS})

# %% [markdown]
# ## Play (8 min)
#
# And real ranks: tensors are float32, and gradients travel in float32 (the default) or in bf16. Relative
# errors of dk against float64, by number of ranks. Which of the two grows with it, and why does the other
# one not? (A kernel rounds in float32, too.)

# %%
for dtype in DTYPES:
    print(dtype, {ranks: f"{unit.measured(ranks, dtype):.1e}" for ranks in (2, 4, 8)})

# %% [markdown]
# What it costs on the wire where tensors are bf16, in `MB in` and `MB out`, forward/backward: keys travel
# in both passes, gradients in float32 are twice as wide.
# `tasp.attention(..., grad_comm_dtype=torch.bfloat16)` would halve the gradients' bytes.

# %%
print(tasp.explain(plan, heads=8, head_dim=128))

# %% [markdown]
# ## Recap (5 min)
#
# 1. A ring of 8 ranks: how many hops does the gradient of a rank's keys make?
# 2. KV travels in bf16, its gradient in float32: how many times as many bytes has the gradient?
# 3. A tile's backward needs which lse, its "own" or the "final" one?
# 4. Does dq travel round the ring, "yes" or "no"?
# 5. Four times as many bf16 parts: how many times as large is the error, relative to the sum?

# %% tags=["exercise"]
recap = [..., ..., ..., ..., ...]

# %% tags=["solution"]
recap = [7, 2, "final", "no", 2]

# %% tags=["check"]
unit.check_recap(recap)
