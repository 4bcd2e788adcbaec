# shellcheck shell=bash
# What differs from cluster to cluster, and nothing else: fill in the lines marked EDIT, then
#
#   source slurm/site.sh    # before sbatch, which reads the SBATCH_* variables itself
#
# Jobs read this file once more. A value that the environment already holds wins.

: "${SBATCH_PARTITION=}"     # EDIT the partition with the GPUs (sinfo -s lists them)
: "${SBATCH_ACCOUNT=}"       # EDIT who pays; empty where nobody asks
: "${SBATCH_GPUS_PER_NODE=}" # EDIT what a node has, e.g. 8 or h100:8; empty with TASP_DEVICE=cpu
: "${TASP_DEVICE=}"          # EDIT cuda, rocm or cpu (gloo)
: "${TASP_INTERFACE=}"       # EDIT the network interface between nodes, e.g. ib0 (ip -br addr)
: "${TASP_RENDEZVOUS=%n}"    # EDIT how others reach the first node: %n is its name, e.g. %n-ib0
: "${TASP_MODULES=}"         # EDIT modules to load, e.g. cuda/12.4; empty for none
: "${TASP_PYTHON=.venv/bin/python}" # EDIT or in a container: apptainer exec --nv tasp.sif python
: "${TASP_RESULTS=results/slurm}"   # EDIT a folder that all nodes share

export SBATCH_PARTITION SBATCH_ACCOUNT SBATCH_GPUS_PER_NODE
export TASP_DEVICE TASP_INTERFACE TASP_RENDEZVOUS TASP_MODULES TASP_PYTHON TASP_RESULTS
[ -n "$SBATCH_ACCOUNT" ] || unset SBATCH_ACCOUNT # to sbatch an empty value is a value
[ -n "$SBATCH_GPUS_PER_NODE" ] || unset SBATCH_GPUS_PER_NODE
