# %% [markdown]
# # 7. How long will it take?
#
# Afterwards you can predict how long a schedule takes on a machine, from which length on its communication
# is hidden, and whether more links help. Needs units 5 and 6.
#
# All times here are modelled, not measured.

# %% tags=["setup"]
import tasp_core as tasp
import visualize
from tasp_course import unit_07 as unit
from tasp_course.unit_07 import HEADS, KV_BYTES, MACHINES
from visualize.widgets import explore_machine

# %% [markdown]
# ## Picture and question (5 min)
#
# The same sequence and the same two schedules run on three machines: `h100` and `mi300x` of unit 5, and
# `a100_pcie`, which has no links at all. (us: microseconds.) *Why does the order of the schedules change?*

# %%
times = {name: unit.race(name, 8192, ("ring", "tasp")) for name in MACHINES}
for name, by_schedule in times.items():
    print(name.ljust(10), {s: f"{t.total_s * 1e6:.0f} us" for s, t in by_schedule.items()})

# %%
visualize.timeline(list(times["mi300x"].items()))

# %% [markdown]
# Every rank has two things to do in a step: compute on what arrived in the step before, and send and
# receive for the step after. The next step begins when both are done. Grey bars are communication; where
# the bar above is pale, the rank waits.
#
# ## Exercise 1: a step is latency plus bytes over bandwidth (12 min)
#
# A transfer uses resources of the machine, each with a capacity. Transfers of one step that need the same
# resource share its capacity. The model of a step's communication, in seconds:
#
#     latency_s + message_s * (most messages a rank posts) + (bytes / capacity of the busiest resource)
#
# A rank posts what it sends *and* what it receives. `latency_s` and `message_s` are attributes of the
# machine: `machine.latency_s`. The machine also says which resources a transfer uses, and the capacity of
# each:

# %%
for name in MACHINES:
    machine = tasp.machine(name)
    used = machine.resources(0, 5)
    print(name.ljust(10), {resource: machine.capacity_gbps(resource) for resource in used})

# %% [markdown]
# On `a100_pcie` a message leaves and enters through a rank's connection to its host. The first four ranks
# are attached to one processor, the other four to a second one. All messages from the first to the second
# processor share one **bus**, and all messages back share another one.
#
# Write that model. `messages` is a list of (src, dst, bytes), capacities are in GB/s (1e9 bytes per
# second). The check compares it with the simulator on three machines.


# %% tags=["exercise"]
def step_s(machine, messages):
    """Seconds of one step's communication."""
    # first add up the bytes of each resource, and the messages that each rank posts
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
# The simulator's times of one step, for a sequence of 16,384 tokens, follow. `tasp` uses all links. That
# helps where every pair of ranks has a link of its own. Where all messages of a rank leave through one
# port, it costs time for more messages. Where many pairs need one bus, it costs time for more bytes on
# that bus.

# %%
for name in MACHINES:
    machine = tasp.machine(name)
    for schedule in ("ring", "tasp"):
        sends, computes = (1e6 * s for s in unit.step_times(16384, schedule, machine))
        print(f"{name:10} {schedule}: sends {sends:.0f} us, computes {computes:.0f} us")

# %% [markdown]
# ## Exercise 2: from which length on is communication hidden? (12 min)
#
# A step that computes longer than it communicates takes no extra time for communication. Let a rank hold
# `t` tokens of a sequence with full attention (not causal). One step of the ring then
#
#     sends     t * KV_BYTES bytes to one neighbour:   latency_s + 2 * message_s + t * KV_BYTES / rate
#     computes  4 * t * t * heads * head_dim flops:     kernel_s + flops / (tflops * 1e12)
#
# The first grows with `t`, the second with `t * t`: the two are equal at one length. `KV_BYTES` is the
# size of one token's KV, `HEADS` a dict with `heads` and `head_dim`; `kernel_s` and `tflops` are
# attributes of the machine.

# %%
print(KV_BYTES, HEADS)
print({name: tasp.machine(name).route_gbps(0, 1) for name in MACHINES})

# %% [markdown]
# Write `hides_from(machine)`: the number of tokens *of the complete sequence* from which on a ring's step
# hides its communication. Solve the quadratic equation or search; an error of 2 % is allowed.
# `machine.route_gbps(0, 1)` is the bandwidth between neighbours. The time to merge partial outputs is left
# out here.


# %% tags=["exercise"]
def hides_from(machine):
    """Tokens of the sequence, on machine.ranks ranks, from which on computing takes as long as sending."""
    # machine.route_gbps(0, 1) * 1e9 bytes per second; machine.tflops * 1e12 flops per second
    return ...


# %% tags=["solution"]
def hides_from(machine):
    """Tokens of the sequence, on machine.ranks ranks, from which on computing takes as long as sending."""
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
    without, merging = unit.hidden_from(unit.without_merging(machine)), unit.hidden_from(machine)
    print(f"{name:10} hidden from {without} tokens on, with merging from {merging} tokens on")

# %% [markdown]
# Merging is work that grows with `t`: it hides some communication by itself. That is no gain, because the
# step takes longer.
#
# ## Exercise 3: rank before you run (9 min)
#
# Put the three schedules in order, the fastest first, *before* any is simulated. Attention is causal and
# the layout is zigzag. On n ranks `ring` and `tasp` take n - 1 steps. `all_gather` takes one step, and
# only the work on a rank's own KV can hide it. On `h100` and `mi300x` its ranks all send to all others at
# once; on `a100_pcie` its KV goes round a ring, with as many latencies as `ring` has. For each schedule,
# ask: how many latencies are there, how many bytes go through the busiest resource, and can anything be
# hidden at this length?

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
# Now simulate. Was any part of your order right for a wrong reason?

# %%
visualize.compare([(f"{s}, a100_pcie", t) for s, t in unit.race("a100_pcie", 4096).items()])

# %% [markdown]
# ## Play (6 min)
#
# Find a machine and a length where the choice does not matter, and say why. Then halve the KV heads. (The
# number in brackets is the most KV of other ranks that a rank holds at a time; 1 KV is as much as its
# own.)

# %%
explore_machine(machine="mi300x", tokens=16384)

# %% [markdown]
# ## Recap (4 min)
#
# 1. A step of 1 MB over 50 GB/s with a latency of 10 us: how many us?
# 2. The length of a sequence with full attention doubles. By what factor does the compute of one step of a
#    rank grow?
# 3. The same link, 4 kB: what does the step spend its time on, "latency" or "bandwidth"?
# 4. A step computes for 155 us and communicates for 31 us, overlapped. How many us does it last?
# 5. On `h100` the seven transfers of a rank go through one resource: "link", "port" or "bus"?

# %% tags=["exercise"]
recap_answers = [..., ..., ..., ..., ...]

# %% tags=["solution"]
recap_answers = [30, 4, "latency", 155, "port"]

# %% tags=["check"]
unit.check_recap(recap_answers)
