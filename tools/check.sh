#!/usr/bin/env bash
# Every static check, the same here and in CI: lint, format, types, layers, sizes. Runs all, then fails if one failed.
# Uses the tools on PATH; `make check` puts those of .venv first.
set -uo pipefail
cd "$(dirname "$0")/.."

failed=()
check() {
    local name=$1
    shift
    echo "-- $name"
    "$@" || failed+=("$name")
}

check "ruff check" ruff check --quiet .
check "ruff format" ruff format --quiet --check .
check "mypy" mypy --no-error-summary
check "layers" python -m areal.tools.check_layers
check "sizes" python -m areal.tools.check_sizes

if ((${#failed[@]})); then
    printf 'failed: %s\n' "${failed[*]}" >&2
    exit 1
fi
echo "all checks passed"
