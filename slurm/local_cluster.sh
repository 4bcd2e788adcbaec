#!/usr/bin/env bash
# A Slurm cluster in a box: munged, slurmctld and N slurmd on this machine, for tests and workshops.
#
#   eval "$(slurm/local_cluster.sh up 2)"    # starts it; SLURM_CONF and the settings of site.sh
#   slurm/local_cluster.sh status            # its nodes and jobs; exit 1 where none runs
#   slurm/local_cluster.sh down              # ends its jobs and daemons, removes its files
#
# All of it lives in one folder with its own key, ports and pid files, so that a Slurm which this
# machine belongs to is not touched. Needs root and Debian's slurm-wlm and munge (`up N --install`
# installs them). Not for real work: no accounting, no cgroups, no GPUs.
set -euo pipefail

dir=${XDG_STATE_HOME:-$HOME/.local/state}/tasp-cluster
conf=$dir/slurm.conf
cpus=2 # of each node: that many ranks
export SLURM_CONF=$conf PATH=$PATH:/usr/sbin:/sbin

refuse() {
    printf 'local_cluster: %s\n' "$1" >&2
    exit 2
}

install() {
    apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y slurm-wlm munge
} >&2

require() {
    local tool
    [[ $EUID == 0 ]] || refuse "needs root: slurmd starts its jobs as their users"
    for tool in munged slurmctld slurmd sbatch; do
        command -v "$tool" >/dev/null ||
            refuse "$tool is not installed; apt-get install slurm-wlm munge, or: up N --install"
    done
}

# The first of N ports in a row that nobody listens on.
free_ports() {
    local first port
    for ((first = 17000; first < 30000; first += $1)); do
        for ((port = first; port < first + $1; port++)); do
            if (: <>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then continue 2; fi
        done
        printf '%s\n' "$first"
        return
    done
    refuse "no $1 free ports in a row between 17000 and 30000"
}

# cred_expire is how long a requeued job waits; config_overrides: nodes may claim more CPUs than real;
# FirstJobId: another cluster's jobs have other numbers, so other result folders.
write_conf() {
    local nodes=$1 port node
    port=$(free_ports $((nodes + 1)))
    cat <<CONF
ClusterName=tasp
SlurmctldHost=$(hostname)(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/munge.socket,cred_expire=10
CredType=cred/munge
StateSaveLocation=$dir/state
SlurmctldPidFile=$dir/slurmctld.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdPidFile=$dir/slurmd-%n.pid
SlurmdLogFile=$dir/slurmd-%n.log
SlurmdSpoolDir=$dir/spool-%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=bf_interval=3,sched_interval=5
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
KillWait=10
MinJobAge=3600
FirstJobId=$(($(date +%s) % 10000000 + 1))
CONF
    for ((node = 0; node < nodes; node++)); do
        printf 'NodeName=n%d NodeHostname=%s NodeAddr=127.0.0.1 Port=%d CPUs=%d\n' \
            "$node" "$(hostname)" "$((port + 1 + node))" "$cpus"
    done
    printf 'PartitionName=local Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n'
}

# Whether the process of this pid file, left in $pid, is alive and ours: a stale file may name
# anybody's, and a daemon that ends removes its file at any moment.
running() {
    { read -r pid <"$1"; } 2>/dev/null && grep -qsxzF "SLURM_CONF=$conf" "/proc/$pid/environ"
}

within() { # SECONDS COMMAND...: repeats the command until it succeeds
    local end=$((SECONDS + $1))
    shift
    until "$@"; do
        ((SECONDS < end)) || return 1
        sleep 0.2
    done
}
all_idle() { (($(sinfo -h -N -t idle 2>/dev/null | wc -l) == $1)); }
no_jobs() { [[ -z $(squeue -h 2>/dev/null) ]]; }
ended() { ! running "$1"; }

exports() {
    printf 'export SLURM_CONF=%q SBATCH_PARTITION=local TASP_DEVICE=cpu TASP_INTERFACE=lo' "$conf"
    printf ' TASP_RENDEZVOUS=127.0.0.1\n'
}

up() {
    local nodes=$1 node
    [[ $nodes =~ ^[1-9][0-9]?$ ]] || refuse "how many nodes? up N with N from 1 to 99, not '$nodes'"
    case ${2:-} in
        '') ;;
        --install) install ;;
        *) refuse "up N takes --install and nothing else, not '$2'" ;;
    esac
    require
    if running "$dir/slurmctld.pid"; then
        [[ $(grep -c ^NodeName= "$conf") == "$nodes" ]] ||
            refuse "a cluster of another size is up; end it first: local_cluster.sh down"
        exports
        return
    fi
    down
    (umask 077 && mkdir -p "$dir/state")
    trap 'tail -n 3 "$dir"/*.log >&2; down; printf "local_cluster: did not start: see above\n" >&2' ERR
    (umask 077 && head -c 1024 /dev/urandom >"$dir/munge.key")
    munged --force --key-file="$dir/munge.key" --socket="$dir/munge.socket" \
        --pid-file="$dir/munged.pid" --log-file="$dir/munged.log" --seed-file="$dir/munge.seed" >&2
    write_conf "$nodes" >"$conf"
    slurmctld >&2
    for ((node = 0; node < nodes; node++)); do slurmd -N "n$node" >&2; done
    within 60 all_idle "$nodes"
    trap - ERR
    printf 'local_cluster: %d nodes of %d CPUs are up; files in %s\n' "$nodes" "$cpus" "$dir" >&2
    exports
}

# Jobs first: their step daemons outlive slurmd. munged last: the others sign with it.
down() {
    local pid_file
    [[ -d $dir ]] || return 0
    if running "$dir/slurmctld.pid"; then
        timeout 10 scancel --user=root || true
        within 30 no_jobs || true
    fi
    for pid_file in "$dir"/slurmctld.pid "$dir"/slurmd-*.pid "$dir"/munged.pid; do
        running "$pid_file" || continue
        kill "$pid" || true
        within 20 ended "$pid_file" || kill -KILL "$pid" || true
    done
    rm -rf "$dir"
}

status() {
    running "$dir/slurmctld.pid" || {
        printf 'no local cluster is up\n'
        exit 1
    }
    sinfo -N -o '%.6N %.8T %.5c'
    squeue
}

case ${1:-} in
    up) up "${2:-}" "${3:-}" ;;
    down) down ;;
    status) status ;;
    *) refuse 'usage: local_cluster.sh up N [--install] | down | status' ;;
esac
