# %% [markdown]
# # 7. How long will it take?
#
# Afterwards you can predict what a schedule takes on a machine, say from which length communication is
# hidden, and tell when more links help and when they do not.
# Needs units 5 and 6. All times here are modelled, not measured.

# %% tags=["setup"]
import tasp_core as tasp
import visualize
from tasp_course import unit_07 as unit
from tasp_course.unit_07 import HEADS, KV_BYTES, MACHINES
from visualize.widgets import explore_machine

# %% [markdown]
# ## Picture and question (5 min)
#
# The same row of tokens, the same two schedules, three machines: `h100` and `mi300x` of unit 5, and
# `a100_pcie`, which has no links at all. (us: microseconds.) *Why does the order change?*

# %%
times = {name: unit.race(name, 8192, ("ring", "tasp")) for name in MACHINES}
for name, found in times.items():
    print(name.ljust(10), {s: f"{t.total_s * 1e6:.0f} us" for s, t in found.items()})

# %%
visualize.timeline(list(times["mi300x"].items()))

# %% [markdown]
# Every rank has two things to do in a step: compute on what arrived in the step before, and send and
# receive for the step after. It goes on when both are done. Grey bars are communication; where it
# is pale above them, the rank waits.
#
# ## Exercise 1: a step is latency plus bytes over bandwidth (12 min)
#
# A transfer uses resources of the machine, each with a capacity. Transfers of one step that need the same
# resource share it. The model of a step's communication, in seconds:
#
#     latency_s + message_s * (most messages a rank posts) + (bytes / capacity of the busiest resource)
#
# A rank posts what it sends *and* what it receives. `latency_s` and `message_s` are figures of the machine:
# `machine.latency_s`. Which resources a transfer uses, and what each can carry, it says, too:

# %%
for name in MACHINES:
    machine = tasp.machine(name)
    way = machine.resources(0, 5)
    print(name.ljust(10), {resource: machine.capacity_gbps(resource) for resource in way})

# %% [markdown]
# On `a100_pcie` a message leaves and enters by a rank's way to its host. The first four ranks sit at one
# processor, the other four at a second one. All that goes from the first to the second shares one **bus**,
# and all that comes back another one.
#
# Write that model. `messages` is a list of (src, dst, bytes), capacities are in GB/s
# (1e9 bytes a second). The check holds it against the simulator on three machines.


# %% tags=["exercise"]
def step_s(machine, messages):
    """Seconds of one step's communication."""
    # first add up: the bytes of each resource, and the messages that each rank posts
    return ...


# %% tags=["solution"]
def step_s(machine, messages):
    """Seconds of one step's communication."""
    load = {}  # bytes of each resource
    posted = [0] * machine.ranks
    for src, dst, nbytes in messages:
        posted[src] += 1
        posted[dst] += 1
        for name in machine.resources(src, dst):
            load[name] = load.get(name, 0) + nbytes
    busiest = max(nbytes / machine.capacity_gbps(name) / 1e9 for name, nbytes in load.items())
    return machine.latency_s + machine.message_s * max(posted) + busiest


# %% tags=["check"]
unit.check_step(step_s)

# %% [markdown]
# What the simulator says of one step, row of 16,384 tokens. `tasp` uses all links: that helps where every
# pair of ranks has a link of its own, costs messages where all leave through one port, and bytes where
# many pairs need one bus.

# %%
for name in MACHINES:
    machine = tasp.machine(name)
    for schedule in ("ring", "tasp"):
        sends, computes = (1e6 * s for s in unit.step_times(16384, schedule, machine))
        print(f"{name:10} {schedule}: sends {sends:.0f} us, computes {computes:.0f} us")

# %% [markdown]
# ## Exercise 2: from which length on is communication hidden? (12 min)
#
# A step that computes longer than it communicates costs nothing for communication. Let a rank hold `t`
# tokens of a full (not causal) row. One step of the ring then
#
#     sends     t * KV_BYTES bytes to one neighbour:   latency_s + 2 * message_s + t * KV_BYTES / rate
#     computes  4 * t * t * heads * head_dim flops:     kernel_s + flops / (tflops * 1e12)
#
# One grows with `t`, the other with `t * t`: they cross once. `KV_BYTES` is the size of one token's keys
# and values, `HEADS` a dict with `heads` and `head_dim`; `kernel_s` and `tflops` are the machine's.

# %%
print(KV_BYTES, HEADS)
print({name: tasp.machine(name).route_gbps(0, 1) for name in MACHINES})

# %% [markdown]
# Write `hides_from(machine)`: the tokens *of the whole row* from which a ring's step hides
# its communication. Solve the quadratic or search; 2 % off is fine. `machine.route_gbps(0, 1)` is the rate
# between neighbours. The time to merge partial results is left out here.


# %% tags=["exercise"]
def hides_from(machine):
    """Tokens of the row, over machine.ranks ranks, from which a step computes as long as it sends."""
    # machine.route_gbps(0, 1) * 1e9 bytes a second; machine.tflops * 1e12 flops a second
    return ...


# %% tags=["solution"]
def hides_from(machine):
    """Tokens of the row, over machine.ranks ranks, from which a step computes as long as it sends."""
    rate = machine.route_gbps(0, 1) * 1e9
    flops_rate = machine.tflops * 1e12
    square = 4 * HEADS["heads"] * HEADS["head_dim"] / flops_rate
    linear = KV_BYTES / rate
    fixed = machine.latency_s + 2 * machine.message_s - machine.kernel_s
    t = (linear + (linear**2 + 4 * square * fixed) ** 0.5) / (2 * square)
    return t * machine.ranks


# %% tags=["check"]
unit.check_hidden(hides_from)

# %%
for name in MACHINES:
    machine = tasp.machine(name)
    bare, whole = unit.hidden_from(unit.without_merging(machine)), unit.hidden_from(machine)
    print(f"{name:10} hidden from {bare} tokens, or from {whole} where merging takes its time too")

# %% [markdown]
# Merging is work that grows with `t`: it hides some communication by itself. It is no gain.
#
# ## Exercise 3: rank before you run (9 min)
#
# Put the three schedules in order, the quickest first, *before* any is simulated. The row
# is causal and in zigzag. On n ranks `ring` and `tasp` take n - 1 steps; `all_gather` takes one, behind
# which only the work on a rank's own keys can hide. In it, everybody sends to all at once on `h100` and
# `mi300x`; on `a100_pcie` keys go round a ring, with as many latencies as `ring` has. Think: how many
# latencies, how many bytes through the busiest resource, and can anything hide them at this length?

# %% tags=["exercise"]
order = {
    ("h100", 4096): ...,  # e.g. ["ring", "tasp", "all_gather"]
    ("mi300x", 4096): ...,
    ("mi300x", 16384): ...,
    ("a100_pcie", 4096): ...,
}

# %% tags=["solution"]
order = {
    ("h100", 4096): ["all_gather", "ring", "tasp"],  # one port: more messages only cost
    ("mi300x", 4096): ["all_gather", "tasp", "ring"],  # seven links: the ring uses one
    ("mi300x", 16384): ["all_gather", "tasp", "ring"],
    ("a100_pcie", 4096): ["ring", "all_gather", "tasp"],  # pairs share the sockets' bus
}

# %% tags=["check"]
unit.check_order(order)

# %% [markdown]
# And now simulate. Where was your reasoning right for the wrong cause?

# %%
visualize.compare([(f"{s}, a100_pcie", t) for s, t in unit.race("a100_pcie", 4096).items()])

# %% [markdown]
# ## Play (6 min)
#
# Find a machine and a length where the choice does not matter, and say why. Then halve the KV heads. (In
# brackets: how much of other ranks' keys a rank holds at most, in KV, which is as much as its own.)

# %%
explore_machine(machine="mi300x", tokens=16384)

# %% [markdown]
# ## Recap (4 min)
#
# 1. A step of 1 MB over 50 GB/s with a latency of 10 us: how many us?
# 2. A full row doubles. How many times as much does one step of a rank compute?
# 3. The same link, 4 kB: what does the step spend its time on, "latency" or "bandwidth"?
# 4. A step computes 155 us and communicates 31 us, overlapped. How many us does it last?
# 5. On `h100` a rank's seven transfers share one "...": which word?

# %% tags=["exercise"]
recap_answers = [..., ..., ..., ..., ...]

# %% tags=["solution"]
recap_answers = [30, 4, "latency", 155, "port"]

# %% tags=["check"]
unit.check_recap(recap_answers)
