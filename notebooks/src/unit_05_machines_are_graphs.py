# %% [markdown]
# # 5. Machines are graphs
#
# Afterwards you can read a link matrix, and see what one ring leaves unused. Needs
# [unit 2](unit_02_a_schedule_is_a_table.ipynb).
#
# ## Picture and question (5 min)
#
# Eight accelerators in one box, a **node**, can be joined in two ways. In the first picture every two have
# a **link** of their own (AMD MI300X): a **full mesh**. In the second each has one fast **port** to a
# switch (NVIDIA H100). The planner describes both as ranks and **resources**, each with a capacity in
# GB/s.
#
# *Each rank sends to its right neighbour only. Which of the two machines is badly used?*

# %% tags=["setup"]
import tasp_core as tasp
import visualize
from tasp_course import unit_05 as unit

# %%
mesh, switch = tasp.machine("mi300x"), tasp.machine("h100")
visualize.topology(mesh)

# %%
visualize.topology(switch)

# %% [markdown]
# Which resources a message uses, and how fast it can be, depends on the pair of ranks. `h100x2` is two
# nodes `h100`; between nodes a message leaves and enters through a **NIC**, a network card:

# %%
for where in (mesh, switch, tasp.machine("h100x2")):
    for src, dst in ((0, 1), (1, where.ranks - 1)):
        print(where.name, f"{src}>{dst}", where.resources(src, dst), where.route_gbps(src, dst))

# %% [markdown]
# ## Exercise 1: build three machines (10 min)
#
# `tasp.Machine(name, node_size, num_nodes, link_gbps=, port_gbps=, nic_gbps=)`: links join every two ranks
# of a node, ports connect each rank to the node's switch, NICs join nodes. Leave out what a machine does
# not have; `num_nodes` is 1 unless you say more. Build
#
# - `mesh`: four ranks, a link of 50 GB/s between every two;
# - `switch`: eight ranks on a switch, ports of 450 GB/s, no links;
# - `cluster`: two nodes of four ranks, links of 64 GB/s inside, one NIC of 25 GB/s per rank.

# %% tags=["exercise"]
machines = {"mesh": ..., "switch": ..., "cluster": ...}

# %% tags=["solution"]
machines = {
    "mesh": tasp.Machine("mesh", 4, link_gbps=50),
    "switch": tasp.Machine("switch", 8, port_gbps=450),
    "cluster": tasp.Machine("cluster", 4, 2, link_gbps=64, nic_gbps=25),
}

# %% tags=["check"]
unit.check_machines(machines)

# %% [markdown]
# ## Exercise 2: the load of a schedule (12 min)
#
# Hops say which rank sends to which; a machine says which resources that uses. Write
# `load(hops, machine)`: a dict from each resource that is used to the total number of shares that it
# carries. `hops` is a list in text form. `unit.ends("t3 2>5 kv1.4")` gives `(2, 5)`;
# `machine.resources(src, dst)` gives the names.


# %% tags=["exercise"]
def load(hops, machine):
    return ...


# %% tags=["solution"]
def load(hops, machine):
    shares = {}
    for hop in hops:
        for name in machine.resources(*unit.ends(hop)):
            shares[name] = shares.get(name, 0) + 1
    return shares


# %% tags=["check"]
unit.check_load(load)

# %% [markdown]
# The next figure compares one ring on the mesh of eight with `tasp`, a schedule that cuts each rank's KV
# into shares and sends them over all links at once (unit 6). A cell of the matrix is a link; a link with a
# 0 is not used at all:

# %%
ring = tasp.plan([1024], 8, schedule="ring", machine=mesh)
many = tasp.plan([1024], 8, schedule="tasp", machine=mesh)
visualize.links([("ring", ring), ("tasp", many)])

# %%
for plan in (ring, many):
    report = tasp.check(plan)
    print(f"{plan.schedule.name}: {report.busy:.0%} of the links are busy in a step")

# %% [markdown]
# *No* schedule can bring all KV to all ranks in less time than the **cut bound**: the bytes that must
# enter a rank (or a node), over the bandwidth into it. For one GB of KV per rank:

# %%
for where in (mesh, switch, tasp.machine("h100x2")):
    print(f"{where.name:7} {1000 * tasp.cut_bound(where, 1e9):.1f} ms")

# %% [markdown]
# ## Exercise 3: read a real machine (12 min)
#
# On a machine with NVIDIA GPUs, `nvidia-smi topo -m` prints a matrix. NVLinks join GPUs directly: `NV4`
# means four of them between the two. `SYS`, `PIX`, `PHB`, `NODE` are routes through the host (the computer
# around the GPUs), `X` is the GPU itself. Here is a real matrix, of eight V100:

# %% tags=["setup"]
text = (unit.TOPOLOGIES / "v100_cube.txt").read_text()

# %%
print(text[: text.index("Legend")].expandtabs(6))

# %% [markdown]
# Write `nvlinks(text)`: a list of lists, the number of NVLinks between each two GPUs, 0 where there is
# none. The line of a GPU begins with `GPU` and a digit, without indentation (the header is indented).
# White space separates the columns. The columns of NICs and affinities do not belong to the answer.


# %% tags=["exercise"]
def nvlinks(text):
    return ...


# %% tags=["solution"]
def nvlinks(text):
    rows = [line.split() for line in text.splitlines() if line.startswith("GPU")]
    cells = [row[1 : len(rows) + 1] for row in rows]
    return [[int(c[2:]) if c.startswith("NV") else 0 for c in row] for row in cells]


# %% tags=["check"]
unit.check_nvlinks(nvlinks)

# %% [markdown]
# The planner reads such files itself; pairs without NVLink go through the hosts:

# %%
cube = tasp.machine(unit.TOPOLOGIES / "v100_cube.txt")
visualize.topology(cube)

# %% [markdown]
# ## Play (6 min)
#
# Break something: a dead link, a slow one; the numbers are the GB/s that are left. Which route do messages
# take now, and what does the bound say? (`degraded` refuses a change that would leave two ranks without a
# route.)

# %%
hurt = tasp.machine("mesh4").degraded({"link 0>1": 0, "link 2>3": 10})
print(hurt.resources(0, 1), f"{1000 * tasp.cut_bound(hurt, 1e9):.1f} ms")

# %% [markdown]
# Now compare schedules on complete machines. The number in brackets is the most KV of other ranks that a
# rank holds at a time; 1 KV is as much as its own.

# %%
from visualize.widgets import explore_machine

explore_machine(machine="mi300x")

# %% [markdown]
# ## Recap (5 min)
#
# 1. How many links does a full mesh of 8 ranks have, if the two directions count as two?
# 2. How many of them are busy in a step of one ring?
# 3. Links of 50 GB/s, 4 ranks, full mesh: how many GB/s can enter a rank?
# 4. A hop from rank 0 to rank 9 on `h100x2`: over `"port"` or `"nic"`?
# 5. On which machine does one ring already use the full bandwidth of a rank: `"mesh"` or `"switch"`?

# %% tags=["exercise"]
recap = [..., ..., ..., ..., ...]

# %% tags=["solution"]
recap = [56, 8, 150, "nic", "switch"]

# %% tags=["check"]
unit.check_recap(recap)
