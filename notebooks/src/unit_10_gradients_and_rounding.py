# %% [markdown]
# # 10. Gradients and rounding
#
# Afterwards you can follow a gradient to its owner, compute the backward pass of a tile, and say where
# bf16 hurts. Needs units 1, 2 and 3.

# %% tags=["setup"]
import torch

import tasp_core as tasp
import visualize
from tasp_course import unit_10 as unit
from tasp_course.unit_10 import COUNTS, DTYPES

# %% [markdown]
# ## Picture and question (5 min)
#
# In the backward pass KV travels round the ring once more: `kv2.0` in the table is the arriving share of
# rank 2's KV. Each rank that has it computes a contribution to its gradient. *How do the contributions
# reach the owner, and which rank adds them up?*

# %%
plan = unit.ring(4)
print(plan.table(backward=True))

# %%
visualize.memory(plan, rank=0, backward=True)

# %% [markdown]
# `dkv2.0` is the sum of the contributions so far to the gradient of rank 2's KV. It follows the KV round
# the ring: a rank adds its contribution and sends the sum on, until the sum reaches the owner.
#
# ## Exercise 1: the route to the owner (10 min)
#
# A step communicates and computes at the same time. So compute step t uses the KV that arrived in
# communication step t - 1, and the sum to which a rank has added in compute step t can leave it in
# communication step t + 1. The owner adds its own contribution last. Return the hops `(step, src, dst)` of
# the gradient of `owner`'s KV, on a ring 0, 1, ..., n - 1, 0. (The table above is the case of four ranks.)


# %% tags=["exercise"]
def way_home(owner, n):
    return ...  # e.g. [(2, 1, 2), ...]


# %% tags=["solution"]
def way_home(owner, n):
    # KV is on rank owner + d after step d - 1, computed on in step d; its gradient leaves in step d + 1
    return [(d + 1, (owner + d) % n, (owner + d + 1) % n) for d in range(1, n)]


# %% tags=["check"]
unit.check_route(way_home)

# %% [markdown]
# ## Exercise 2: backward through one tile (15 min)
#
# A block of queries and a block of KV, `k, v`, form a **tile**, one of several; there is no mask. `dout`
# is the gradient of the output. With the *final* `out` and `lse` of the queries, over all tiles, the
# contribution of a tile to the gradients depends on no other tile:
#
#     p  = exp(scale * q k^T - lse)             weights, as in the forward pass
#     dv = p^T dout
#     delta = sum of dout * out                 over the D numbers of a query: one number per query, as lse
#     ds = p * (dout v^T - delta) * scale
#     dq = ds k                                 contributions of all tiles are added up
#     dk = ds^T q
#
# Shapes: q, out, dout [T, D]; k, v [S, D]; lse, delta [T]. `k^T` is `k.T`, products without `*` are matrix
# products, `@`. Return dq, dk, dv.


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
# That is why the forward pass keeps `lse`: neither the other tiles nor the scores are needed again.
#
# ## Exercise 3: predict the rounding (12 min)
#
# On its route a gradient is a sum that is rounded once per hop. `unit.summed(parts, dtype)` does the same;
# here with terms that are normally distributed, with standard deviation `1`. How large is the error of the
# sum of n terms, as a root mean square?
#
# - Rounding x to the nearest number of a dtype gives an error of about `eps * |x| / 5`.
# - The sum of the first k terms is about `sqrt(k)` large, for k = `1, ..., n`, and each sum is rounded.
# - Rounding errors are independent: their squares add up, and the error is the root of that sum.

# %%
for dtype in DTYPES:
    print(dtype, "eps", torch.finfo(dtype).eps)

# %% [markdown]
# Return the predicted error of the sum of n terms, not divided by anything; a factor of 1.5 in either
# direction is allowed.


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
# Now on real ranks: tensors are float32, and gradients are sent in float32 (the default) or in bf16. The
# numbers are relative errors of dk against float64, by number of ranks. Which of the two grows with the
# number of ranks, and why does the other one not? (A kernel rounds in float32, too.)

# %%
for dtype in DTYPES:
    print(dtype, {ranks: f"{unit.measured(ranks, dtype):.1e}" for ranks in (2, 4, 8)})

# %% [markdown]
# The next table counts the bytes that are sent if tensors are bf16, in `MB in` and `MB out`,
# forward/backward: KV is sent in both passes, and gradients in float32 take twice as many bytes.
# `tasp.attention(..., grad_comm_dtype=torch.bfloat16)` would halve the gradients' bytes.

# %%
print(tasp.explain(plan, heads=8, head_dim=128))

# %% [markdown]
# ## Recap (5 min)
#
# 1. A ring of 8 ranks: how many hops does the gradient of a rank's KV make?
# 2. KV is sent in bf16, its gradient in float32: how many times as many bytes does the gradient take?
# 3. A tile's backward pass needs which lse, its "own" or the "final" one?
# 4. Is dq sent round the ring, "yes" or "no"?
# 5. Four times as many bf16 terms: by what factor does the error grow, relative to the sum?

# %% tags=["exercise"]
recap = [..., ..., ..., ..., ...]

# %% tags=["solution"]
recap = [7, 2, "final", "no", 2]

# %% tags=["check"]
unit.check_recap(recap)
