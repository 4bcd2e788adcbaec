# %% [markdown]
# # 6. Many rings
#
# Afterwards you can decompose a complete digraph into rings, and split KV over them. Needs
# [unit 5](unit_05_machines_are_graphs.ipynb).
#
# ## Picture and question (5 min)
#
# One ring leaves most links of a full mesh unused. Why not use several rings at once? Cut every rank's KV
# into shares, and send share 0 round the first ring, share 1 round the second, and so on. No two rings may
# use the same link in the same direction, because each would then get only a part of its bandwidth.
#
# *How many such rings fit into a full mesh of `n` ranks? Can all links always be used?*

# %% tags=["setup"]
import tasp_core as tasp
import visualize
from tasp_course import unit_06 as unit

# %%
visualize.rings(tasp.plan([64], 5, schedule="tasp"))

# %% [markdown]
# A ring visits every rank once and returns: a **Hamiltonian cycle**. Its hops from rank to rank are
# **arcs**; `0>1` and `1>0` are two different arcs. All arcs between `n` ranks, the links of a full mesh,
# form the **complete digraph** on `n` ranks.
#
# ## Exercise 1: five ranks by hand (10 min)
#
# Five ranks have 20 arcs, a ring has 5, so at most four rings fit. The picture shows one solution; find
# *another* with the help of arithmetic: from `0 1 2 3 4` each step adds 1 (and wraps around). What do you
# get by adding 2? Write four lists.

# %% tags=["exercise"]
by_hand = [..., ..., ..., ...]  # the first one: [0, 1, 2, 3, 4]

# %% tags=["solution"]
by_hand = [[0, 1, 2, 3, 4], [0, 2, 4, 1, 3], [0, 3, 1, 4, 2], [0, 4, 3, 2, 1]]

# %% tags=["check"]
unit.check_by_hand(by_hand)

# %% [markdown]
# That works for every prime `n`. For `n = 8` it does not: adding 2 misses the odd ranks.
#
# ## Exercise 2: eight ranks by code, four and six by proof (14 min)
#
# Let the machine search. `unit.all_cycles(n)` lists all rings, each beginning with rank 0;
# `unit.arcs(ring)` is the set of a ring's arcs. Write `disjoint(n)`: a list of `n - 1` rings without a
# common arc, or `[]` if there is none. A search that tries *everything* and finds no solution is a proof.
#
# Two ideas make it fast. First, one of the rings uses the arc `0>1`, one uses `0>2`, and so on: so look
# for ring number `k` only among those that begin `0, k`. Second, give up a choice as soon as an arc is
# used twice. (`n = 8` takes well under a second. `Kernel > Interrupt` stops a search that does not end.)


# %% tags=["exercise"]
def disjoint(n):
    return ...


# %% tags=["solution"]
def disjoint(n):
    rings = [(ring, unit.arcs(ring)) for ring in unit.all_cycles(n)]

    def extend(chosen, used):
        k = len(chosen) + 1
        if k == n:
            return chosen
        for ring, arcs in rings:
            fits = ring[1] == k and not arcs & used
            if fits and (complete := extend([*chosen, ring], used | arcs)):
                return complete
        return []

    return extend([], frozenset())


# %% tags=["check"]
unit.check_disjoint(disjoint)

# %% [markdown]
# For four and six ranks there is no solution; for all other numbers there is one, as Tillson proved. The
# package has a formula for every `n`, without a search:

# %%
for n in (4, 6, 8, 9):
    rings = tasp.decompose(n)
    print(f"n = {n}: {len(rings)} rings, every link used {rings.fold} times in all of them")

# %% [markdown]
# ## Exercise 3: fold (12 min)
#
# What can be done with four or six ranks? Use every link exactly **twice**: with `2 * (n - 1)` rings all
# links have the same load again. Put `m = n - 1` ranks on a circle and the last one, `m`, in the middle.
# The zigzag path
#
#     0, 1, -1, 2, -2, ...     (modulo m, all m of them)
#
# crosses the circle. Rank `m`, followed by the path, is the first ring. Turn the path by 1, 2, ...,
# `m - 1` places (add as much, modulo `m`): together that makes `m` rings. Then take each ring in the other
# direction, too. Write `folded(n)` for even `n`: the list of all these rings.


# %% tags=["exercise"]
def folded(n):
    return ...


# %% tags=["solution"]
def folded(n):
    m = n - 1
    path = [(t + 1) // 2 if t % 2 else -(t // 2) for t in range(m)]
    rings = [[m] + [(i + p) % m for p in path] for i in range(m)]
    return rings + [ring[::-1] for ring in rings]


# %% tags=["check"]
unit.check_folded(folded)

# %% [markdown]
# ## Exercise 4: the routes of the shares (8 min)
#
# Now make a schedule of rings. Share `i` of **every** rank goes round ring `i`: in step `t` the rank at
# position `p` of the ring sends to the rank at position `p + 1` the share that belongs to the rank at
# position `p - t`. Write `travel(rings)`: all hops in text form (`t3 2>5 kv1.4`: step 3, from 2 to 5,
# share 4 of rank 1), for as many steps as it takes until every rank has every share. Each of `rings` lists
# its ranks, as before.


# %% tags=["exercise"]
def travel(rings):
    return ...


# %% tags=["solution"]
def travel(rings):
    n = len(rings[0])
    return [
        f"t{t} {ring[p]}>{ring[(p + 1) % n]} kv{ring[p - t]}.{i}"
        for i, ring in enumerate(rings)
        for t in range(n - 1)
        for p in range(n)
    ]


# %% tags=["check"]
unit.check_travel(travel)

# %% [markdown]
# With these rings every link carries the same number of shares in every step. How much time does that save
# on eight MI300X, where every two have a link?

# %%
docs = tasp.Documents.of([16_384], causal=False)


def timed(schedule, where):
    plan = tasp.plan(docs, where.ranks, schedule=schedule, machine=where)
    return schedule, tasp.simulate(plan, heads=32, head_dim=128)


mesh = tasp.machine("mi300x")
visualize.compare([timed("ring", mesh), timed("tasp", mesh)])

# %% [markdown]
# ## Play (6 min)
#
# Try all numbers of ranks, one node or several, and other schedules. Look at 4 and 6. Between nodes there
# are few links: which schedules take account of that?

# %%
from visualize.widgets import explore_rings

explore_rings(ranks=6)

# %% [markdown]
# Whether many rings help depends on the machine. On a switch a transfer to one peer already fills the
# port, and many rings only add messages. A ratio below 1 means that many rings are slower:

# %%
for name in ("mi300x", "h100"):
    one, many = (timed(s, tasp.machine(name))[1].comm_s for s in ("ring", "tasp"))
    print(f"{name}: communication alone, one ring / many: {one / many:.2f}")

# %% [markdown]
# ## Recap (5 min)
#
# 1. How many arcs does a full mesh of 7 ranks have?
# 2. Into how many rings without a common arc can they be split?
# 3. For which numbers of ranks above 2 is that impossible? (a list)
# 4. 6 ranks, folded: into how many shares is a rank's KV cut?
# 5. Full mesh of 8, many rings instead of one: by what factor does communication alone become faster, at
#    most?

# %% tags=["exercise"]
recap = [..., ..., ..., ..., ...]

# %% tags=["solution"]
recap = [42, 6, [4, 6], 10, 7]

# %% tags=["check"]
unit.check_recap(recap)
