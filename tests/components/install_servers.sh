#!/usr/bin/env bash
# Builds the environments that the tests of inference servers run in, and prints one line per server:
#   AREAL_VLLM_PYTHON=<interpreter>          what the tests read; everything else goes to standard error
#   usage: tests/components/install_servers.sh [DIRECTORY [SERVER...]]   defaults: .servers, vllm
# Uses the interpreter of .venv (or PYTHON) to run `areal install-server`. A second run finds the environments complete.
set -euo pipefail
cd "$(dirname "$0")/../.."

python=${PYTHON:-.venv/bin/python}
directory=${1:-.servers}
servers=("${@:2}")
((${#servers[@]})) || servers=(vllm)

command -v "$python" >/dev/null || {
    echo "tests/components/install_servers.sh: $python does not exist; run  make install  first or set PYTHON" >&2
    exit 1
}
mkdir -p "$directory"
directory=$(cd "$directory" && pwd)
for server in "${servers[@]}"; do
    "$python" -m areal.cli install-server "$server" "$directory/$server" --device cpu >&2
    printf 'AREAL_%s_PYTHON=%s\n' "${server^^}" "$directory/$server/bin/python"
done
