# %% [markdown]
# # 6. Many rings
#
# Afterwards you can decompose a complete digraph into rings, and split keys and values over them. Needs
# [unit 5](unit_05_machines_are_graphs.ipynb).
#
# ## Picture and question (5 min)
#
# One ring leaves most links of a full mesh unused. Why not several rings at once? Cut every rank's keys
# into shares, and send share 0 round the first ring, share 1 round the second, and so on. No two rings
# may use the same link in the same direction, else they would have to share it.
#
# *How many such rings fit into a full mesh of `n` ranks? Is it always possible to use up all links?*

# %% tags=["setup"]
import tasp_core as tasp
import visualize
from tasp_course import unit_06 as unit

# %%
visualize.rings(tasp.plan([64], 5, schedule="tasp"))

# %% [markdown]
# A ring visits every rank once and returns: a **Hamiltonian cycle**. Its hops from rank to rank are
# **arcs**; `0>1` and `1>0` are two different ones. All arcs between `n` ranks, a full mesh, make up the
# **complete digraph** on `n` ranks.
#
# ## Exercise 1: five ranks by hand (10 min)
#
# Five ranks have 20 arcs, a ring has 5, so at most four rings fit. The picture shows one solution; find
# *another* with the help of arithmetic: from `0 1 2 3 4` each step adds 1 (and wraps around). What do
# you get by adding 2? Write four lists.

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
# common arc, or `[]` if there is none. A search that tries *everything* and finds nothing is a proof.
#
# Two things make it quick: some ring uses the arc `0>1`, some ring `0>2`, ..., so look for ring number
# `k` only among those that begin `0, k`; and give up a choice as soon as an arc is used twice.
# (`n = 8` takes well under a second. `Kernel > Interrupt` stops a search that does not end.)


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
            if fits and (found := extend([*chosen, ring], used | arcs)):
                return found
        return []

    return extend([], frozenset())


# %% tags=["check"]
unit.check_disjoint(disjoint)

# %% [markdown]
# For four and six ranks there is no solution; for all other numbers there is one, as Tillson proved.
# The package has a formula for every `n`, without a search:

# %%
for n in (4, 6, 8, 9):
    found = tasp.decompose(n)
    print(f"n = {n}: {len(found)} rings, every link used {found.fold} times in all of them")

# %% [markdown]
# ## Exercise 3: fold (12 min)
#
# What to do with four or six ranks? Use every link exactly **twice**: `2 * (n - 1)` rings, and the load
# is even again. Put `m = n - 1` ranks on a circle and the last one, `m`, in the middle. The zigzag path
#
#     0, 1, -1, 2, -2, ...     (modulo m, all m of them)
#
# crosses the circle. Begin with `m`, go along the path: a ring. Turn the path by 1, 2, ..., `m - 1`
# places (add as much, modulo `m`): with the first, `m` rings. Take them in the other direction, too. Write
# `folded(n)` for even `n`: the list of all.


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
# ## Exercise 4: shares on their way (8 min)
#
# Now make a schedule of rings. Share `i` of **every** rank goes round ring `i`: in step `t` the rank at
# place `p` of the ring sends to the rank at place `p + 1` what belongs to the rank at place `p - t`.
# Write `travel(rings)`: all words, as strings (`t3 2>5 kv1.4`: step 3, from 2 to 5, share 4 of rank 1), for
# as many steps as it takes until everybody has everything. Each of `rings` lists its ranks, as before.


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
# With as many rings as that, each link carries the same in each step. What it is worth on eight
# MI300X, where every two have a link:

# %%
docs = tasp.Documents.of([16_384], causal=False)


def timed(schedule, where):
    made = tasp.plan(docs, where.ranks, schedule=schedule, machine=where)
    return schedule, tasp.simulate(made, heads=32, head_dim=128)


mesh = tasp.machine("mi300x")
visualize.compare([timed("ring", mesh), timed("tasp", mesh)])

# %% [markdown]
# ## Play (6 min)
#
# All numbers of ranks, one node or several, and other schedules. Look at 4 and 6. Between nodes there
# are few links: which schedules care?

# %%
from visualize.widgets import explore_rings

explore_rings(ranks=6)

# %% [markdown]
# Whether rings help depends on the machine. On a switch one peer can fill the port, and many rings only
# make more messages: below 1 they are slower.

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
# 4. 6 ranks, folded: into how many shares are a rank's keys cut?
# 5. Full mesh of 8, many rings instead of one: by what factor does communication alone become faster,
#    at most?

# %% tags=["exercise"]
recap = [..., ..., ..., ..., ...]

# %% tags=["solution"]
recap = [42, 6, [4, 6], 10, 7]

# %% tags=["check"]
unit.check_recap(recap)
