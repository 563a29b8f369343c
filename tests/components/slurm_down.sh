#!/usr/bin/env bash
# Stop the cluster that slurm_up.sh started in DIR, and the jobs it still runs; then remove DIR.
# Only recorded daemons (same pid and same start time), their step daemons and what those started are ended.
set -uo pipefail
[[ $# == 1 ]] || { echo "usage: slurm_down.sh DIR" >&2; exit 2; }
dir=$1
[[ -f $dir/daemons ]] || exit 0
export PATH=$PATH:/usr/sbin:/sbin SLURM_CONF=$dir/slurm.conf

recorded() { # pids that still are the daemons we started
    local pid start name
    while read -r pid start name; do
        [[ -n $start && $(sed 's/.*) //' "/proc/$pid/stat" 2>/dev/null | cut -d' ' -f20) == "$start" ]] && echo "$pid"
    done <"$dir/daemons"
}
steps() { # step daemons leave slurmd's session; our configuration in their environment says that they are ours
    local pid
    for pid in $(pgrep -x slurmstepd); do
        tr '\0' '\n' 2>/dev/null <"/proc/$pid/environ" | grep -qxF "SLURM_CONF=$SLURM_CONF" && echo "$pid"
    done
}
tree() { # a process and everything below it, children first
    local child
    for child in $(cat /proc/"$1"/task/*/children 2>/dev/null); do tree "$child"; done
    echo "$1"
}

timeout 5 scancel --full --signal=KILL --user=root >/dev/null 2>&1
timeout 5 scancel --user=root >/dev/null 2>&1
for _ in {1..8}; do
    [[ -z $(timeout 5 squeue -h 2>/dev/null) ]] && break
    sleep 0.25
done
for pid in $(steps); do tree "$pid"; done | xargs -r kill -KILL 2>/dev/null
recorded | xargs -r kill -TERM 2>/dev/null
for _ in {1..20}; do
    [[ -z $(recorded) ]] && break
    sleep 0.1
done
for pid in $(recorded); do tree "$pid"; done | xargs -r kill -KILL 2>/dev/null
rm -rf "$dir"
