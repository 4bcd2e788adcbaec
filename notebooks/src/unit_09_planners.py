# %% [markdown]
# # 9. Planners
#
# Afterwards you can compute the least communication time of a machine, write a planner for a machine whose
# links differ, and compare its plans with that bound. Needs units 5 to 7.

# %% tags=["setup"]
import tasp_core as tasp
import visualize
from tasp_course import unit_09 as unit
from tasp_course.unit_09 import KV_BYTES, machines

# %% [markdown]
# ## Picture and question (5 min)
#
# Rings treat all links alike. Here is a machine on which some links are 2, 4 or 10 times slower than
# others: a bad cable, a switch that is shared. A line of the picture is two links, one in each direction;
# it is dashed where one of them is slow. *What determines the time of a step in which all links send?*

# %%
machine = machines()[1]
visualize.topology(machine)

# %%
print("GB/s, from the rank on the left to the rank above")
print("    ", *(f"{dst:6}" for dst in range(machine.ranks)))
for src in range(machine.ranks):
    row = [machine.route_gbps(src, dst) if src != dst else 0 for dst in range(machine.ranks)]
    print(f"{src:4} ", *(f"{rate:6.1f}" if rate else "     -" for rate in row))

# %%
plan = tasp.plan([16384], machine.ranks, schedule="tasp", layout="contiguous", machine=machine)
visualize.timeline([("tasp", tasp.simulate(plan, heads=8, head_dim=128))])

# %% [markdown]
# Every link carries as much as every other, so the slowest link determines the time of each step: the grey
# bars.
#
# ## Exercise 1: the cut bound (10 min)
#
# Every rank needs the KV of all others, `nbytes` bytes of each. Whatever the schedule, these bytes must
# enter rank r over the links into it. And its own KV must leave it at least once: other ranks can forward
# them. Each of the two has a least time, with all links of the rank busy at once. Return the seconds that
# no schedule can beat: the longest of these times, over all ranks.
#
# `machine.route_gbps(src, dst)` is the bandwidth of a link in GB/s (1e9 bytes per second).


# %% tags=["exercise"]
def bound_s(machine, nbytes):
    return ...


# %% tags=["solution"]
def bound_s(machine, nbytes):
    n = machine.ranks

    def least(rank):
        others = [r for r in range(n) if r != rank]
        into = sum(machine.route_gbps(r, rank) for r in others)
        out = sum(machine.route_gbps(rank, r) for r in others)
        return max((n - 1) * nbytes / into, nbytes / out) / 1e9

    return max(least(rank) for rank in range(n))


# %% tags=["check"]
unit.check_bound(bound_s)

# %%
print(f"cut bound: {tasp.cut_bound(machine, KV_BYTES) * 1e3:.2f} ms")
print(f"tasp takes {unit.ratio(plan):.2f} times as long")

# %% [markdown]
# ## Exercise 2: a greedy planner (15 min)
#
# Each rank's KV is cut into shares `(owner, number)`. A planner is called once per step and says what is
# sent:
#
#     rate    {(src, dst): GB/s} of every link
#     have    {rank: set of shares that it has}
#
# It returns a list of `(src, dst, share)`: at most one share per link, each from a rank that has it to a
# rank that does not, no share twice to the same rank. It is called again until every rank has every share.
#
# Write a planner that uses every link that can help. The check proves its plans, forward and backward, on
# twenty machines. It also asks that they are not much slower than `tasp` is there: at most
# `unit.ALL_LINKS` cut bounds on average.

# %%
print("tasp:", f"{sum(unit.scores('tasp')) / len(machines()):.2f}", "cut bounds on average")
print("asked for: at most", unit.ALL_LINKS, "in exercise 2,", unit.PATIENT, "in exercise 3")


# %% tags=["exercise"]
def greedy(rate, have):
    return ...  # for example [(0, 1, (0, 0)), (1, 0, (1, 0))]


# %% tags=["solution"]
def greedy(rate, have):
    sent, coming = [], {rank: set() for rank in have}
    for src, dst in rate:
        new = have[src] - have[dst] - coming[dst]
        if new:
            share = min(new)
            coming[dst].add(share)
            sent.append((src, dst, share))
    return sent


# %% tags=["check"]
unit.check_planner(greedy)

# %% [markdown]
# ## Exercise 3: patience (12 min)
#
# A step lasts as long as its slowest transfer. So a slow link that carries one share can keep ranks
# waiting that could have received two shares over other links. Take fast links first, and do not use a
# link that is much slower than the fastest one that sends in this step (try some thresholds). Among the
# shares that a link could carry, send one that few ranks have, so that others can forward it. At most
# `unit.PATIENT` cut bounds on average are allowed.


# %% tags=["exercise"]
def patient(rate, have):
    return ...


# %% tags=["solution"]
def patient(rate, have):
    sent, coming = [], {rank: set() for rank in have}

    def copies(share):
        return sum(share in held[rank] for held in (have, coming) for rank in have), share

    for src, dst in sorted(rate, key=rate.get, reverse=True):
        new = have[src] - have[dst] - coming[dst]
        if sent and rate[src, dst] < 0.45 * rate[sent[0][:2]]:
            break
        if new:
            share = min(new, key=copies)
            coming[dst].add(share)
            sent.append((src, dst, share))
    return sent


# %% tags=["check"]
unit.check_patient(patient)

# %% [markdown]
# ## Play (15 min)
#
# A score board: enter your planner under a name. The board is a file of yours, `results/scoreboard.json`;
# times are modelled. Lower is better, and no planner can be below 1.

# %%
print(unit.enter("my planner", patient))

# %% [markdown]
# The figure shows the plan of your planner for one machine. Which links are not used, and which ranks
# wait?

# %%
unit.against(machine, patient)

# %% [markdown]
# Ideas: cut the KV into more shares (`unit.planned(machine, patient, shares=4)`); try several thresholds
# and keep the plan for which `unit.ratio(plan)` is least; look ahead for ranks that will be last.

# %% [markdown]
# ## Recap (5 min)
#
# 1. 5 ranks with 1 GB of KV each. 40 GB/s enter rank 3 over all its links. At least how many seconds does
#    it take?
# 2. Two transfers of 60 MB in one step, over 60 and over 6 GB/s: how many ms does the step last?
# 3. A plan takes 1.3 cut bounds. Can another one be 1.4 times as fast, "yes" or "no"?
# 4. 4 ranks, the KV of each cut into 2 shares: how many shares are received, on all ranks together?
# 5. A rank has 1 GB and can send 2 GB/s over all its links together. At least how many seconds until all
#    of it has left?

# %% tags=["exercise"]
recap = [..., ..., ..., ..., ...]

# %% tags=["solution"]
recap = [0.1, 10, "no", 24, 0.5]

# %% tags=["check"]
unit.check_recap(recap)
