# %% [markdown]
# # 3. From table to ranks
#
# Afterwards you can run a schedule on real ranks, and explain deadlock and overlap. Needs
# [unit 2](unit_02_a_schedule_is_a_table.ipynb).
#
# ## Picture and question (5 min)
#
# A proved table still has to become calls. For one rank, `lower` turns it into a program. Each step of the
# program lists the messages to **post** (to begin sending or receiving), the KV to compute on meanwhile,
# and where in memory the arriving KV is stored. The picture shows that memory and its content, step by
# step.
#
# *In a ring, every rank's KV visits every rank. Why are buffers for two shares enough, however many ranks
# there are?*

# %% tags=["setup"]
import torch
import torch.distributed as dist

import tasp_core as tasp
import visualize
from tasp_course import unit_03 as unit

# %%
full = tasp.Documents.of([240], causal=False)  # every query sees every key
plan = tasp.plan(full, 6, schedule="ring", layout="contiguous")
visualize.memory(plan, rank=0)

# %%
for t, step in enumerate(tasp.lower(plan, 0).steps):
    out = [f"send kv{m.owner} to {m.peer}" for m in step.sends]
    into = [f"receive kv{m.owner} from {m.peer} at row {m.low}" for m in step.recvs]
    print(f"step {t}:", ", ".join(out + into), "| compute" if step.compute else "")

# %% [markdown]
# The first 40 rows of the memory are rank 0's own KV. It stays, so the picture leaves it out.
#
# ## Exercise 1: a step on four ranks (15 min)
#
# Point-to-point messages of `torch.distributed`:
#
#     work = dist.isend(tensor, dst, group)      # begins to send, returns at once
#     work = dist.irecv(tensor, src, group)      # begins to receive into `tensor`, returns at once
#     work.wait()                                # returns when that is done
#
# Write `move`: it runs **one** step on one rank. `hops` lists `(src, dst, owner)` of all ranks; most do
# not concern this one. `held` maps an owner to the tensor with its KV: send from it, add what arrives to
# it, and return it. Every tensor has four numbers, as `torch.empty(4)` has. Before you return, wait for
# everything that you began, sends too: after that, the check overwrites what was sent.


# %% tags=["exercise"]
def move(rank, group, hops, held):
    return ...


# %% tags=["solution"]
def move(rank, group, hops, held):
    arriving, works = {}, []
    for src, dst, owner in hops:
        if src == rank:
            works.append(dist.isend(held[owner], dst, group))
        if dst == rank:
            arriving[owner] = torch.empty(4)
            works.append(dist.irecv(arriving[owner], src, group))
    for work in works:
        work.wait()
    held.update(arriving)
    return held


# %% tags=["check"]
unit.check_move(move)

# %% [markdown]
# ## Exercise 2: an order that hangs (12 min)
#
# `dist.send` and `dist.recv` are the same without `i`: they return only when the message is through.
# Below, every rank first sends to its right neighbour. No rank receives, so no send ends: a **deadlock**.
# `launch` gives up after `timeout_s` and says which ranks hung.

# %% tags=["setup"]
from tasp_course.unit_03 import all_send_first

# %%
try:
    tasp.launch(all_send_first, 4, timeout_s=3)
except tasp.RankError as error:
    print(error.errors)

# %% [markdown]
# Repair it with `send` and `recv` alone: choose for each rank which comes first. It must work for even and
# odd numbers of ranks. Return the number that came from the left neighbour.


# %% tags=["exercise"]
def turn(rank, group, own):
    n = dist.get_world_size(group)
    right, left = (rank + 1) % n, (rank - 1) % n
    mine, got = torch.tensor([own]), torch.empty(1)
    return ...


# %% tags=["solution"]
def turn(rank, group, own):
    n = dist.get_world_size(group)
    right, left = (rank + 1) % n, (rank - 1) % n
    mine, got = torch.tensor([own]), torch.empty(1)
    if rank % 2:
        dist.recv(got, left, group)
    dist.send(mine, right, group)
    if rank % 2 == 0:
        dist.recv(got, left, group)
    return float(got)


# %% tags=["check"]
unit.check_turn(turn)

# %% [markdown]
# With `isend` and `irecv` the order matters less: both are under way before any rank waits. So the
# [executor](../../tasp_core/runtime/execute.py) posts all messages of a step, computes, and waits last.
#
# ## Exercise 3: two buffers are enough (12 min)
#
# Posting first has a price: while step `t` is computed, what arrives may not overwrite what is still being
# read or sent. Each arriving share is **live** from the step in which it arrives to the step in which it
# is last used, both included. For the ring on six ranks, these are the first and last steps of each share:

# %% tags=["setup"]
lives = unit.ring_lives(6)

# %%
lives

# %% [markdown]
# Write `slots(lives)`: for each share the number of the buffer slot that it occupies, counted from 0.
# Shares that are live at the same time, even in one step only, need different slots. Use as few slots as
# possible. `lives` is sorted by arrival.


# %% tags=["exercise"]
def slots(lives):
    return ...


# %% tags=["solution"]
def slots(lives):
    ends, chosen = [], []  # the last step in which each slot is in use
    for first, last in lives:
        slot = next((i for i, end in enumerate(ends) if end < first), len(ends))
        ends[slot : slot + 1] = [last]
        chosen.append(slot)
    return chosen


# %% tags=["check"]
unit.check_slots(slots)

# %% [markdown]
# ## Play (10 min)
#
# What is gained by all this? A rank computes *while* messages travel. Here is one plan on a machine with
# slow links, with and without overlap. Make `tokens` larger or smaller: when does overlap help most, and
# by what factor can it ever help?

# %%
tokens = 20_000
longer = tasp.plan(tasp.Documents.of([tokens], causal=False), 4, schedule="ring", machine=unit.SLOW)
visualize.timeline(
    [
        (name, tasp.simulate(longer, heads=8, head_dim=128, overlap=name == "overlapped"))
        for name in ("overlapped", "one after the other")
    ]
)

# %% [markdown]
# Now all of it together, on four real processes: a table like yours goes in, exact attention comes out.
# `shard` selects a rank's tokens from the sequence, `unshard` puts the ranks' outputs back in order. The
# number is the largest difference from float64 on one process.


# %%
def attend(rank, group):
    torch.manual_seed(0)
    q, k, v = (torch.randn(small.docs.total, heads, 32) for heads in (4, 2, 2))
    q, k, v = (tasp.shard(x, small, rank) for x in (q, k, v))
    return tasp.attention(q, k, v, small, group)


small = tasp.plan([300, 45], 4, schedule="ring")
out = tasp.unshard(tasp.launch(attend, 4), small)
unit.error_against_float64(out, small.docs)

# %% [markdown]
# ## Recap (6 min)
#
# 1. Which call returns before the message is through: `"send"` or `"isend"`?
# 2. All of 3 ranks call `dist.recv` first. How many of them hang?
# 3. A rank forwards shares along the ring of 64 ranks. How many slots for travelling KV does it need?
# 4. A step computes for 3 ms and communicates for 5 ms. How many ms does it take with overlap?
# 5. And the largest speed-up that overlap can ever give, as a factor?

# %% tags=["exercise"]
recap = [..., ..., ..., ..., ...]

# %% tags=["solution"]
recap = ["isend", 3, 2, 5, 2]

# %% tags=["check"]
unit.check_recap(recap)
