#!/usr/bin/env bash
# Runs a training script on a Ray cluster; start this on one of its nodes.
#   RAY_ADDRESS=host:port bash examples/launchers/ray.sh [--spmd] SCRIPT CONFIG [key=value ...]
# Without RAY_ADDRESS it is a cluster that runs on this machine, else one that ends with the run.
# --spmd starts it with the (deprecated) SPMD launcher. PYTHON names the interpreter.
set -euo pipefail

spmd=
[[ ${1:-} != --spmd ]] || { spmd=1; shift; }
(($# >= 2)) || { sed -n '2,5s/^# *//p' "$0" >&2; exit 2; }
script=$1 config=$2
shift 2

if [[ $spmd ]]; then
    exec "${PYTHON:-python}" -m areal.infra.launcher.ray "$script" --config "$config" "$@"
fi
exec "${PYTHON:-python}" "$script" --config "$config" scheduler.type=ray "$@"
