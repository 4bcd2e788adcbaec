# %% [markdown]
# # 8. Packed sequences
#
# Afterwards you can say which KV of a packed sequence is needed on which rank, leave out hops that no rank
# needs, spread the work evenly, and run the result on real ranks. Needs units 2, 3 and 4.

# %% tags=["setup"]
import numpy as np

import tasp_core as tasp
import visualize
from tasp_course import unit_08 as unit
from tasp_course.unit_08 import LENGTHS, RANKS
from visualize.widgets import explore_mask

# %% [markdown]
# ## Picture and question (5 min)
#
# Training data is packed: documents of all lengths follow each other in one sequence. A token sees its own
# document, up to itself. Here are five documents over four ranks. *Which ranks hold KV that rank 3 needs?*

# %%
plan = tasp.plan(LENGTHS, RANKS, schedule="ring", layout="contiguous")
visualize.mask(plan)

# %% [markdown]
# Most of the square is empty, and a ring still carries all KV to every rank:

# %%
pairs = plan.docs.total * (plan.docs.total + 1) // 2
print(f"visible pairs: {plan.docs.num_pairs / pairs:.0%} of those of one document of that length")
print(
    f"tokens sent by the ring: {unit.tokens_sent(plan)} for a sequence of {plan.docs.total} tokens"
)

# %% [markdown]
# ## Exercise 1: the mask of a packed sequence (8 min)
#
# Attention kernels for packed sequences take `cu_seqlens`, cumulative lengths, here `cu`: document d holds
# the tokens `cu[d] .. cu[d + 1] - 1`. Lengths `3, 0, 2` give `[0, 3, 3, 5]`. Return the mask as a boolean
# array [queries, keys], True where the query sees the key. Documents may be empty, or one token long.


# %% tags=["exercise"]
def mask(cu):
    return ...  # cu[-1] tokens


# %% tags=["solution"]
def mask(cu):
    tokens = np.arange(cu[-1])
    doc = np.searchsorted(cu, tokens, side="right")
    return (doc[:, None] == doc) & (tokens[:, None] >= tokens)


# %% tags=["check"]
unit.check_mask(mask)

# %% [markdown]
# ## Exercise 2: hops that no rank needs (12 min)
#
# Rank r holds the tokens `tokens[r]`, an array of their positions in the packed sequence. Return the set
# of pairs `(owner, reader)` of different ranks for which at least one query of the reader sees a key of
# the owner.


# %% tags=["exercise"]
def needed(cu, tokens):
    return ...


# %% tags=["solution"]
def needed(cu, tokens):
    tokens = [np.asarray(t) for t in tokens]
    doc = [np.searchsorted(cu, t, side="right") for t in tokens]

    def sees(reader, owner):
        same = doc[reader][:, None] == doc[owner]
        return (same & (tokens[reader][:, None] >= tokens[owner])).any()

    ranks = range(len(tokens))
    return {(a, b) for a in ranks for b in ranks if a != b and sees(b, a)}


# %% tags=["check"]
unit.check_needed(needed)

# %% [markdown]
# Where ranks send directly to each other, hops between other pairs can simply be left out. The checker
# proves that nothing is missing, forward and backward:

# %%
direct = unit.direct()
small = unit.pruned(direct, unit.needed(direct))
print(small, "\n")
print(tasp.check(small))

# %% [markdown]
# A ring cannot be pruned like this, because each rank forwards shares that other ranks need. In the plan
# below it is a gradient (`dkv`, unit 10) that fails: it follows its KV round the ring, and no longer
# reaches its owner:

# %%
try:
    tasp.check(unit.pruned(plan, unit.needed(plan)))
except tasp.PlanError as error:
    print(error)

# %% [markdown]
# Pairs of ranks are still coarse: rank 2 sends rank 3 all its KV, and rank 3 needs the KV of one document
# only. The schedule `sap` decides per token: it cuts each rank's KV where the set of ranks that read it
# changes. For four layouts, the next cell counts the tokens whose KV is sent, and the work of the busiest
# rank over the mean:

# %%
print("layout        ring   pruned  sap    work max/mean")
for layout in ("contiguous", "zigzag", "per_document", "balanced"):
    ring = tasp.plan(LENGTHS, RANKS, schedule="ring", layout=layout)
    pruned = unit.pruned(unit.direct(layout), unit.needed(unit.direct(layout)))
    sent = [unit.tokens_sent(p) for p in (ring, pruned, unit.by_token(layout))]
    print(layout.ljust(13), *(str(n).ljust(6) for n in sent), f"{tasp.check(ring).balance:.3f}")

# %% [markdown]
# `zigzag` spreads the *sequence* evenly as if it were one document, which it is not. `per_document` does
# so inside every document: the work is even, but every document is sent to every rank. `balanced` is
# explained below.
#
# ## Exercise 3: five documents over four ranks (12 min)
#
# Give each rank pieces `(document, start, stop)`: the tokens of that document at the positions `start` to
# `stop - 1`, counted from the first token of the document. Every token must be held by exactly one rank.
# No rank may have more than `unit.WORK` times the mean work, or more than `unit.TOKENS` times the mean
# tokens. A token at position i of its document sees i + 1 keys: that is its work. The check also tries
# other packed sequences, so write it for any lengths; sequences of a few tokens need not be even.

# %%
print("work at most", unit.WORK, "and tokens at most", unit.TOKENS, "times the mean over ranks")


# %% tags=["exercise"]
def place(lengths, ranks):
    return ...  # a list for each rank, e.g. [[(0, 0, 400), (1, 0, 90)], [(0, 400, 800)], ...]


# %% tags=["solution"]
def place(lengths, ranks):
    pieces = [[] for _ in range(ranks)]
    for doc, length in enumerate(lengths):
        cut = [length * i // (2 * ranks) for i in range(2 * ranks + 1)]
        for rank in range(ranks):  # an early block and a late one
            for block in (rank, 2 * ranks - 1 - rank):
                pieces[rank].append((doc, cut[block], cut[block + 1]))
    return pieces


# %% tags=["check"]
unit.check_balance(place)

# %% [markdown]
# Cutting every document for every rank makes the work even, but then every document is sent to every rank.
# `balanced` is even, too, and sends less: it cuts long documents only, and fills the ranks up with short
# ones. `moved_tokens` counts tokens whose KV a rank needs and does not hold, `segments` the pieces.

# %%
from tasp_core.sequence.balanced import lower_bound, measure
from tasp_core.sequence.balanced import place as balanced

print(measure(balanced(np.array(LENGTHS), RANKS), np.array(LENGTHS)))
print("no placement this even moves fewer than", lower_bound(np.array(LENGTHS), RANKS), "tokens")

# %% [markdown]
# ## Exercise 4: run it on real ranks (8 min)
#
# `attend` runs on every rank. It gets q, k, v and the gradient `dout` of the output, all for the complete
# packed sequence. `tasp.shard(x, plan, rank)` selects the rows of a rank's tokens, in the order that
# `tasp.attention(q, k, v, plan, group)` expects. `tasp.attention` returns this rank's output, and autograd
# differentiates it as any function of torch. Return this rank's output and dk, the gradient of its keys.


# %% tags=["exercise"]
def attend(rank, group, plan, q, k, v, dout):
    q, k, v, dout = (tasp.shard(x, plan, rank) for x in (q, k, v, dout))
    k.requires_grad_()
    return ...


# %% tags=["solution"]
def attend(rank, group, plan, q, k, v, dout):
    q, k, v, dout = (tasp.shard(x, plan, rank) for x in (q, k, v, dout))
    k.requires_grad_()
    out = tasp.attention(q, k, v, plan, group)
    out.backward(dout)
    return out.detach(), k.grad


# %% tags=["check"]
unit.check_run(attend)


# %% [markdown]
# Now plan the packed sequence of the picture with `sap` and `balanced`, run it, and compare it with one
# process in float64. `reference` are the errors of a float32 kernel on one process:

# %%
from tasp_core.lab.bench.accuracy import verify

compiled = tasp.plan(LENGTHS, RANKS, schedule="sap", layout="balanced")
print(compiled.summary())
errors, seconds = verify(compiled, unit.inputs(compiled))
for name, by_tensor in (("ours", errors.ours), ("reference", errors.plain)):
    print(name.ljust(9), {tensor: f"{error:.1e}" for tensor, error in by_tensor.items()})

# %% [markdown]
# ## Play (8 min)
#
# Find documents for which `zigzag` is as good as `balanced`, and some for which it is much worse.

# %%
explore_mask(lengths=", ".join(map(str, LENGTHS)), layout="balanced", schedule="sap")

# %% [markdown]
# **Ulysses** is another way to divide attention. Before it, ranks exchange tokens for heads: each ends up
# with the complete sequence, for some of the heads. Afterwards outputs are sent back to the ranks of their
# tokens. The work is even for any documents, but all q, k and v are sent, whatever can see them. And the
# number of heads is a limit: the number of ranks that divide the heads among them, the **Ulysses degree**
# (`intra`), must divide the number of query heads. A group of ranks lies inside a node, or is several whole
# nodes.

# %%
heads_only = tasp.plan(LENGTHS, RANKS, schedule="ring", layout="balanced", intra=RANKS)
for name, compared in (("ulysses", heads_only), ("sap", compiled)):
    cost = tasp.explain(compared, heads=8, kv_heads=2)
    print(name, sum(r.bytes_out[0] + r.bytes_heads[0] for r in cost.ranks) / 1e6, "MB sent")
try:
    tasp.explain(heads_only, heads=6, kv_heads=2)
except tasp.PlanError as error:
    print(error)

# %% [markdown]
# One more idea: if tokens may not be permuted, work can still move. `sap` over `contiguous` sends some
# *queries* of busy ranks to idle ones. These **remote queries** are computed there, and their partial
# outputs are sent back.

# %%
moved = tasp.plan(LENGTHS, RANKS, schedule="sap", layout="contiguous")
visualize.balance([("ring, contiguous", plan), ("sap, contiguous: remote queries", moved)])

# %% [markdown]
# ## Even in total, and in every step (5 min)
#
# A pass goes step by step, and ranks wait for each other in every step. So it is not enough that the work
# of all ranks is equal *in total*: it should be equal in every step. Here is one giant document among short
# ones, on eight MI300X. `contiguous` leaves ranks with unequal work, `zigzag` cuts the sequence and not the
# documents, and `sap` over `balanced` is even. *In which steps does a rank not compute, and what is it
# waiting for?*

# %%
giant = (65536, *[1024] * 64)
plans = {
    "ring, contiguous": tasp.plan(giant, 8, schedule="ring", layout="contiguous", machine="mi300x"),
    "tasp, zigzag": tasp.plan(giant, 8, schedule="tasp", layout="zigzag", machine="mi300x"),
    "sap, balanced": tasp.plan(giant, 8, schedule="sap", layout="balanced", machine="mi300x"),
}
shape = {"heads": 32, "kv_heads": 8, "head_dim": 128}
visualize.timeline([(name, tasp.simulate(p, **shape)) for name, p in plans.items()])

# %% [markdown]
# The first keys of a document are seen by more queries than the last ones, so shares of equal size are not
# equal work. `sap` puts each share into the step in which the ranks that need it have least to compute, as
# far as their buffers allow. And the work on a rank's *own* KV needs no message at all: it can wait until a
# step in which the rank would otherwise be idle. What is left of the waiting is small:

# %%
for name, p in plans.items():
    t = tasp.simulate(p, **shape)
    alone = max(t.compute_s, t.comm_s)
    print(f"{name:<17} {t.total_s * 1e3:6.2f} ms, {t.total_s / alone:.2f} x what no plan can beat")

# %% [markdown]
# ## Recap (5 min)
#
# 1. Two documents of 3 and 2 tokens, causal: how many visible pairs?
# 2. Two ranks have no document in common. How many tokens' KV must be sent between them?
# 3. In which schedule can no rank be left out, because each share passes through every rank: "ring" or
#    "direct"?
# 4. 6 query heads, nodes of 8 ranks: what is the largest possible Ulysses degree?
# 5. A causal document of 100 tokens: 0..59 on one rank, 60..99 on another. How many tokens' KV must be
#    sent?

# %% tags=["exercise"]
recap = [..., ..., ..., ..., ...]

# %% tags=["solution"]
recap = [9, 0, "ring", 2, 60]

# %% tags=["check"]
unit.check_recap(recap)
