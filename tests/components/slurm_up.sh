#!/usr/bin/env bash
# Start a private Slurm cluster on loopback: munged, slurmctld and N virtual nodes (slurmd) with faked cores and GPUs.
# For tests; needs root and the Debian packages slurm-wlm and munge, but neither systemd nor cgroups.
#
#   slurm_up.sh DIR [NODES [GPUS_PER_NODE [CPUS_PER_NODE [MEM_MB_PER_NODE]]]]        defaults: 2 4 8 16000
#
# Everything it writes lies in DIR, which must not exist: DIR/slurm.conf (export SLURM_CONF to it) and DIR/daemons, one
# line "pid start-time name" for each daemon, by which slurm_down.sh stops exactly these.
set -euo pipefail
[[ $# -ge 1 ]] || { echo "usage: slurm_up.sh DIR [NODES [GPUS [CPUS [MEM_MB]]]]" >&2; exit 2; }
dir=$1 nodes=${2:-2} gpus=${3:-4} cpus=${4:-8} mem=${5:-16000}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export PATH=$PATH:/usr/sbin:/sbin SLURM_CONF=$dir/slurm.conf
deadline=$((SECONDS + 60))

fail() {
    echo "slurm_up: $*" >&2
    tail -n 15 "$dir"/log/* >&2 || true
    bash "$here/slurm_down.sh" "$dir" || true
    exit 1
}
wait_for() { # WHAT COMMAND...: until the command succeeds; a daemon that ended will not come up
    local what=$1 pid rest
    shift
    until "$@" >/dev/null 2>&1; do
        ((SECONDS < deadline)) || fail "$what is not up after 60 s"
        while read -r pid rest; do
            [[ -d /proc/$pid ]] || fail "${rest#* } ended while waiting for $what"
        done <"$dir/daemons"
        sleep 0.1
    done
}
daemon() { # NAME COMMAND...: in its own session, recorded before anything else can go wrong
    local name=$1
    shift
    setsid "$@" >>"$dir/log/$name" 2>&1 </dev/null &
    local pid=$!
    sleep 0.05
    echo "$pid $(sed 's/.*) //' "/proc/$pid/stat" 2>/dev/null | cut -d' ' -f20 || true) $name" >>"$dir/daemons"
}

[[ $(id -u) == 0 ]] || { echo "slurm_up: needs root" >&2; exit 1; }
for command in munged slurmctld slurmd sinfo python3; do
    command -v "$command" >/dev/null || { echo "slurm_up: $command is missing; apt-get install slurm-wlm munge" >&2; exit 1; }
done
[[ ! -e $dir ]] || { echo "slurm_up: $dir exists; stop that cluster with slurm_down.sh first" >&2; exit 1; }
mkdir -p "$dir"/{log,munge,state,dev}
chmod 755 "$dir" "$dir/munge" # munge wants its socket reachable by all; the key is 0600
host=$(hostname -s)

# Ports that are free now, all bound at once so that they differ.
mapfile -t ports < <(python3 - "$((nodes + 1))" <<'PY'
import socket, sys
held = [socket.create_server(("127.0.0.1", 0)) for _ in range(int(sys.argv[1]))]
print(*(s.getsockname()[1] for s in held), sep="\n")
PY
)

gres="" node_lines="" gres_lines="AutoDetect=off"
((gpus == 0)) || gres=" Gres=gpu:$gpus"
for ((i = 1; i <= nodes; i++)); do
    mkdir -p "$dir/spool/n$i"
    node_lines+="NodeName=n$i NodeHostname=$host NodeAddr=127.0.0.1 Port=${ports[i]} CPUs=$cpus Boards=1 SocketsPerBoard=1"
    node_lines+=" CoresPerSocket=$cpus ThreadsPerCore=1 RealMemory=$mem$gres State=UNKNOWN"$'\n'
    ((gpus == 0)) || gres_lines+=$'\n'"NodeName=n$i Name=gpu File=$dir/dev/gpu[0-$((gpus - 1))]"
done
for ((i = 0; i < gpus; i++)); do
    mknod "$dir/dev/gpu$i" c 1 3 2>/dev/null || : >"$dir/dev/gpu$i" # a second /dev/null, else a plain file
done
echo "$gres_lines" >"$dir/gres.conf"
cat >"$dir/slurm.conf" <<CONF
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=${ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$dir/munge/socket
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool/%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MailProg=/bin/true
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2,sched_min_interval=0,batch_sched_delay=0
SlurmdParameters=config_overrides
DefMemPerCPU=100
ReturnToService=2
KillWait=2
CompleteWait=0
MinJobAge=3600
InactiveLimit=0
Waittime=0
SlurmctldTimeout=30
SlurmdTimeout=30
GresTypes=gpu
${node_lines}PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
CONF

(umask 077 && head -c 128 /dev/urandom >"$dir/munge/key")
daemon munged munged -F --key-file="$dir/munge/key" --socket="$dir/munge/socket" --pid-file="$dir/munge/pid" \
    --seed-file="$dir/munge/seed" --log-file="$dir/log/munged.log"
wait_for munged munge -n -S "$dir/munge/socket"
daemon slurmctld slurmctld -D -f "$dir/slurm.conf"
wait_for slurmctld bash -c 'timeout 5 scontrol ping | grep -q "is UP"'
for ((i = 1; i <= nodes; i++)); do
    daemon "slurmd-n$i" slurmd -D -N "n$i" -f "$dir/slurm.conf"
done
wait_for "every node" bash -c '[[ $(timeout 5 sinfo -h -N -o %T | grep -cx idle) == '"$nodes"' ]]'
