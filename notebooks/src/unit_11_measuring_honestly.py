# %% [markdown]
# # 11. Measuring honestly
#
# Afterwards you can write a benchmark that is fair, fit a machine's latency and bandwidth to it, prepare a
# job for a cluster, and read result files. Needs unit 0 and unit 7.

# %% tags=["setup"]
import json

import numpy as np

import visualize
from tasp_course import unit_11 as unit
from tasp_course.unit_11 import RESULTS, SIZES

# %% [markdown]
# ## Picture and question (5 min)
#
# Two new ranks call attention seven times, the same call each time. *Which of these numbers is the time of
# a call?*

# %%
for rank, samples in enumerate(unit.first_calls()):
    print(f"rank {rank}, ms:", *(f"{1e3 * s:8.2f}" for s in samples))

# %% [markdown]
# The first call makes a plan, connects sockets and fills caches. Other programs disturb some of the later
# calls.
#
# ## Exercise 1: a benchmark that warms up (10 min)
#
# `unit.Fake` is a workload whose costs are known: its first call takes far longer than the others, and one
# later call is disturbed. It has a clock of its own, so nothing here really takes that long. Here is a
# hasty benchmark:


# %%
def hasty(run, clock, repeats):
    start = clock()
    for _ in range(repeats):
        run()
    return (clock() - start) / repeats


fake = unit.Fake()
print(f"{hasty(fake.run, fake.clock, 5):.2f} s; the calls took", fake.costs)

# %% [markdown]
# Write a better one: one call or more to warm up, then `repeats` calls (an odd number) timed one by one.
# Return their median, in seconds.


# %% tags=["exercise"]
def bench(run, clock, repeats):
    return ...


# %% tags=["solution"]
def bench(run, clock, repeats):
    run()
    samples = []
    for _ in range(repeats):
        start = clock()
        run()
        samples.append(clock() - start)
    return sorted(samples)[repeats // 2]


# %% tags=["check"]
unit.check_bench(bench)

# %% [markdown]
# ## Exercise 2: several ranks (6 min)
#
# `by_rank[r][i]` is the time of pass i on rank r, in seconds. All ranks began each pass together. When is
# a pass over? And a disturbed pass must not count, as above. Return one number: how long does a pass take?


# %% tags=["exercise"]
def pass_s(by_rank):
    return ...


# %% tags=["solution"]
def pass_s(by_rank):
    return float(np.median([max(passes) for passes in zip(*by_rank, strict=True)]))


# %% tags=["check"]
unit.check_slowest(pass_s)

# %% [markdown]
# ## Exercise 3: latency and bandwidth (12 min)
#
# From sizes and seconds of single messages (each size occurs several times), return `(latency_s, gbps)` of
# the model `latency_s + nbytes / (gbps * 1e9)`. Each sample has an error of up to a fifth of itself, and
# sizes differ widely: ordinary least squares would be determined by the largest messages alone. Dividing
# each equation
#
#     latency_s * 1 + (1 / gbps) * (nbytes / 1e9) = seconds
#
# by its measured seconds gives all equations the same weight.
# `np.linalg.lstsq(columns, right, rcond=None)[0]` are the two unknowns. `columns` contains their
# coefficients, one row per sample, and `right` the right-hand sides.

# %%
print("sizes:", SIZES)


# %% tags=["exercise"]
def fit(nbytes, seconds):
    return ...


# %% tags=["solution"]
def fit(nbytes, seconds):
    t = np.array(seconds)
    columns = np.stack([np.ones(len(t)), np.array(nbytes) / 1e9], axis=1) / t[:, None]
    (latency_s, per_gb), *_ = np.linalg.lstsq(columns, np.ones(len(t)), rcond=None)
    return latency_s, 1 / per_gb


# %% tags=["check"]
unit.check_fit(fit)

# %% [markdown]
# This machine, measured between two real ranks, with a fit of this kind. Where the points leave the dashed
# line by more than chance, the model is too simple: which part of a transfer does it leave out? (Run the
# cell again to see the effect of chance.)

# %%
samples = unit.transfers()
unit.picture(samples)

# %% [markdown]
# `python -m tasp_core calibrate` does this for all links and kernels, and writes a machine that
# `tasp.simulate` takes.
#
# ## Exercise 4: a job for a cluster (12 min)
#
# On a cluster a scheduler, mostly Slurm, assigns the nodes: you submit a **job**, a shell script with what
# it needs, by `sbatch`. On each node the job then runs `torchrun`, which starts the ranks there, one per
# GPU. The files in `slurm/` are such jobs. What differs from cluster to cluster is in settings, and
# `bash slurm/NAME.sbatch --dry-run` prints what would be run, here, without Slurm. Without settings:

# %%
code, output = unit.dry_run({})
print(f"exit code {code}: {output}")

# %% [markdown]
# The cluster has a partition (a queue of nodes of one kind) named `gpu`, nodes of 8 H100 GPUs, InfiniBand
# between them, and a network interface named `ib0`. You want to compare ring and tasp at 131072 tokens, on
# the two nodes that the job asks for. Fill in strings; [site.sh](../../slurm/site.sh) explains the
# settings. `arguments` are passed to the program and override its defaults
# (`--methods a,b --lengths n,m`).

# %% tags=["exercise"]
job = {
    "SBATCH_PARTITION": ...,
    "SBATCH_GPUS_PER_NODE": ...,
    "TASP_DEVICE": ...,
    "TASP_INTERFACE": ...,
    "arguments": ...,
}

# %% tags=["solution"]
job = {
    "SBATCH_PARTITION": "gpu",
    "SBATCH_GPUS_PER_NODE": "h100:8",
    "TASP_DEVICE": "cuda",
    "TASP_INTERFACE": "ib0",
    "arguments": "--methods ring,tasp --lengths 131072",
}

# %% tags=["check"]
unit.check_job(job)

# %%
if ... not in job.values():
    print(unit.dry_run(job)[1])

# %% [markdown]
# ## Exercise 5: read a result file (8 min)
#
# A result file contains the conditions under which it was measured, the raw samples, and whether the
# result was *right*, compared with float64, before it was timed. This one is of attention split over the
# ranks of one machine: how much processor time does the splitting itself cost?

# %%
data = json.loads((RESULTS / "overhead.json").read_text())
print(
    {name: value for name, value in data.items() if name in ("schema", "kind", "config", "right")}
)
print({name: type(value).__name__ for name, value in data.items()})

# %% [markdown]
# Return the overhead of splitting: the processor time of all ranks (the median of each, added up) over the
# median of the processor time of one process that computes the same attention, not split. Return the
# string "wrong" if the result was not right.


# %% tags=["exercise"]
def overhead(data):
    return ...  # data["rank_cpu_s"][rank][i], data["plain_cpu_s"][i]


# %% tags=["solution"]
def overhead(data):
    if not data["right"]:
        return "wrong"
    ranks = sum(np.median(samples) for samples in data["rank_cpu_s"])
    return float(ranks / np.median(data["plain_cpu_s"]))


# %% tags=["check"]
unit.check_ratio(overhead)

# %% [markdown]
# ## Play (5 min)
#
# The results of `make demo`, drawn from their file: several schedules, on ranks of one machine. Measured,
# counted, modelled and quoted (published by others) figures are never mixed in one panel. Which of these
# can you trust to be the same on your machine?

# %%
visualize.results(RESULTS / "demo.json")

# %% [markdown]
# ## Recap (5 min)
#
# 1. Calls took 3.0, 1.0, 1.1, 0.9 and 1.0 ms, in this order. What do you report, in ms?
# 2. A figure of `tasp.simulate`: "measured", "modelled" or "quoted"?
# 3. A job on 2 nodes with 8 GPUs each: how many ranks?
# 4. 1 kB, with the model 10 us + bytes / (1 GB/s): mostly "latency" or "bandwidth"?
# 5. A setting is missing: with which exit code does a job end?

# %% tags=["exercise"]
recap = [..., ..., ..., ..., ...]

# %% tags=["solution"]
recap = [1.0, "modelled", 16, "latency", 2]

# %% tags=["check"]
unit.check_recap(recap)
