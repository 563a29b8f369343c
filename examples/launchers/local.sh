#!/usr/bin/env bash
# Runs a training script on this machine.
#   bash examples/launchers/local.sh [--spmd] SCRIPT CONFIG [key=value ...]
# --spmd starts it with the (deprecated) SPMD launcher. PYTHON names the interpreter.
set -euo pipefail

spmd=
[[ ${1:-} != --spmd ]] || { spmd=1; shift; }
(($# >= 2)) || { sed -n '2,4s/^# *//p' "$0" >&2; exit 2; }
script=$1 config=$2
shift 2

if [[ $spmd ]]; then
    exec "${PYTHON:-python}" -m areal.infra.launcher.local "$script" --config "$config" "$@"
fi
exec "${PYTHON:-python}" "$script" --config "$config" scheduler.type=local "$@"
