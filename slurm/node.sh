#!/usr/bin/env bash
# node.sh LOGS TORCHRUN...: torchrun on one node, with the node's rank and log folder; common.sh starts it.
# Only the ranks answer SIGUSR1, which Slurm sends to every process of the step.
set -euo pipefail
export PET_NODE_RANK=$SLURM_NODEID PET_LOG_DIR=$1/$SLURMD_NODENAME
shift
trap '' USR1
exec "$@"
