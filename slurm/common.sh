# shellcheck shell=bash
# What the jobs here share. A job is a few #SBATCH lines, `source slurm/common.sh` and one call:
#
#   ranks ARGUMENTS...    torchrun ARGUMENTS on every node of the allocation, one task per node
#   bench ARGUMENTS...    ranks with `bench attention`, on the shapes of Llama 3 8B
#   run COMMAND...        prints the command and runs it; with --dry-run it only prints
#
# Submit from the repository's root. `bash slurm/NAME.sbatch --dry-run` shows a job without Slurm.
# For the caller: $result, the job's result folder, and $nodes, how many it has.
set -euo pipefail

die() {
    printf 'tasp: %s\n' "$1" >&2
    exit 2
}

run() {
    printf '+'
    printf ' %q' "$@"
    printf '\n'
    $dry || "$@"
}

# The job's own arguments, without --dry-run.
dry=false
for word; do
    shift
    if [[ $word == --dry-run ]]; then dry=true; else set -- "$@" "$word"; fi
done

source slurm/site.sh
[[ -n $SBATCH_PARTITION ]] || die 'SBATCH_PARTITION is not set: edit slurm/site.sh'
[[ $TASP_DEVICE =~ ^(cuda|rocm|cpu)$ ]] ||
    die "TASP_DEVICE is '$TASP_DEVICE', not cuda, rocm or cpu: edit slurm/site.sh"

# What Slurm says of this job; in a dry run without a job, what the #SBATCH lines ask for.
if [[ -n ${SLURM_JOB_ID:-} ]]; then
    nodes=${SLURM_JOB_NUM_NODES:-$SLURM_NNODES}
    gpus=${SLURM_GPUS_ON_NODE:-}
elif $dry; then
    nodes=$(sed -nE 's/^#SBATCH --nodes=([0-9]+).*/\1/p' "$0")
    gpus=${SBATCH_GPUS_PER_NODE:-} gpus=${gpus##*:}
else
    die "this is a job: sbatch $0, or bash $0 --dry-run to see what it does"
fi
job=${SLURM_JOB_ID:-0}
cpus=${SLURM_CPUS_ON_NODE:-1}
if [[ $TASP_DEVICE == cpu ]]; then per_node=$cpus; else per_node=$gpus; fi
[[ -n $per_node ]] ||
    die "no $TASP_DEVICE device in this job: set SBATCH_GPUS_PER_NODE in slurm/site.sh and source it before sbatch"
[[ $per_node =~ ^[0-9]+$ ]] ||
    die "a node's devices are '$per_node', which is no number: SBATCH_GPUS_PER_NODE in slurm/site.sh is like 8 or h100:8"
[[ $nodes == 1 || -n $TASP_INTERFACE ]] ||
    die "TASP_INTERFACE is not set, and $nodes nodes need one to talk: edit slurm/site.sh"
address=${TASP_RENDEZVOUS//%n/${SLURMD_NODENAME:-node0}} # a batch script runs on node 0
port=$((10000 + job % 20000))                            # below the ports that Linux hands out
name=${SLURM_JOB_NAME:-$(basename "$0" .sbatch)}
result=$TASP_RESULTS/$name-${SLURM_ARRAY_JOB_ID:-$job}${SLURM_ARRAY_TASK_ID:+/$SLURM_ARRAY_TASK_ID}

# shellcheck disable=SC2086 # words
[[ -z $TASP_MODULES ]] || run module load $TASP_MODULES
read -ra python <<<"$TASP_PYTHON"
$dry || type -P "${python[0]}" >/dev/null ||
    die "TASP_PYTHON: no program ${python[0]} on $(hostname): edit slurm/site.sh"
if [[ -n $TASP_INTERFACE ]]; then
    export NCCL_SOCKET_IFNAME=$TASP_INTERFACE GLOO_SOCKET_IFNAME=$TASP_INTERFACE # RCCL reads NCCL_*
fi
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} # this checkout, whatever is installed
threads=$((cpus / per_node))
export OMP_NUM_THREADS=$((threads > 1 ? threads : 1))
# shellcheck disable=SC2016 # torchrun fills it in
export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE='[rank ${rank}] '

# Before the time limit Slurm signals the batch shell (#SBATCH --signal=B:USR1@S): the shell signals the
# ranks, which save and end, and the job goes back to the queue.
requeue=false
trap 'requeue=true; run scancel --signal=USR1 "$SLURM_JOB_ID"' USR1

# Last lines of the ranks, with how many ranks ended with each: a wrong setting is one line here.
failed() {
    printf 'tasp: the ranks failed; "Root Cause" above names the first. Last lines, the rest in %s:\n' "$result/logs"
    tail -qn 1 "$result"/logs/*/"${job}"_*/attempt_0/*/stderr.log | sort | uniq -c
    exit 1
} >&2

# Static rendezvous: torchrun's node rank is Slurm's, so that neighbouring ranks are where Slurm's
# topology put them; node.sh adds it on each node.
ranks() {
    local step=(
        srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --cpu-bind=none
        --kill-on-bad-exit=1
    )
    run mkdir -p "$result/logs" "$result/topology"
    run "${step[@]}" --output="$result/ranks.txt" --open-mode=truncate \
        "${python[@]}" slurm/facts.py "$TASP_DEVICE" "$per_node" "$result/topology" ||
        { cat "$result/ranks.txt" >&2 && exit 1; } # its errors are there too
    run sort -n -k 2 -o "$result/ranks.txt" "$result/ranks.txt"
    run cat "$result/ranks.txt"
    run "${step[@]}" slurm/node.sh "$result/logs" "${python[@]}" -m torch.distributed.run \
        --nnodes="$nodes" --nproc-per-node="$per_node" --max-restarts=0 --tee=3 \
        --rdzv-backend=static --rdzv-id="$job" --rdzv-endpoint="$address:$port" "$@" &
    while kill -0 $! 2>/dev/null; do wait $! || true; done # a trapped signal ends a wait early
    wait $! || failed
    ! $requeue || run scontrol requeue "$SLURM_JOB_ID"
}

# A later option replaces an earlier one: the job's, then the user's.
bench() {
    ranks -m tasp_core bench attention --dtype bfloat16 --heads 32 --kv-heads 8 --head-dim 128 \
        --methods ring,tasp,wave,all_gather --lengths 16384,65536,262144 --out "$result/bench.json" "$@"
}
