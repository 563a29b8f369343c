#!/usr/bin/env bash
# Installs what the tests of schedulers and name stores run against: Redis, etcd, Slurm with munge, iproute2, and the
# Python packages ray, etcd3gw and redis. Starts nothing. A second run finds everything in place and needs no network.
#   usage: tests/components/install.sh [PYTHON]      PYTHON: interpreter that gets the packages, default .venv/bin/python
# Needs Debian or Ubuntu, and root (or sudo without a password) where a system package is missing. Never moves torch.
set -euo pipefail
cd "$(dirname "$0")/../.."

PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
python=${1:-.venv/bin/python}
packages=("ray==2.*" "etcd3gw>=2.4" "redis>=5.2")

fail() {
    printf 'tests/components/install.sh: %s\n' "$*" >&2
    exit 1
}

# Prints the Debian packages whose programs are not there.
missing_packages() {
    local found=()
    command -v redis-server >/dev/null || found+=(redis-server)
    command -v etcd >/dev/null || found+=("$(etcd_package)")
    command -v munged >/dev/null || found+=(munge)
    command -v ip >/dev/null || found+=(iproute2)
    local program
    for program in slurmctld slurmd sbatch srun squeue scancel scontrol; do
        command -v "$program" >/dev/null || {
            found+=(slurm-wlm)
            break
        }
    done
    printf '%s\n' "${found[@]}"
}

# etcd is one package in older releases and two in newer ones.
etcd_package() {
    if has_candidate etcd-server; then echo etcd-server; else echo etcd; fi
}

has_candidate() {
    grep -q '^  Candidate: [^(]' <<<"$(LC_ALL=C apt-cache policy "$1" 2>/dev/null)"
}

as_root() {
    if [[ $(id -u) == 0 ]]; then "$@"; else sudo -n "$@"; fi
}

# Keeps the packages from starting their services: the tests start their own, on free ports.
without_services() {
    local policy=/usr/sbin/policy-rc.d status=0
    if [[ -e $policy ]]; then
        as_root "$@"
        return
    fi
    printf '#!/bin/sh\nexit 101\n' | as_root tee "$policy" >/dev/null
    as_root chmod 755 "$policy"
    as_root "$@" || status=$?
    as_root rm -f "$policy"
    return "$status"
}

install_system() {
    local wanted name
    mapfile -t wanted < <(missing_packages | grep . || true)
    if ((${#wanted[@]} == 0)); then return; fi
    command -v apt-get >/dev/null || fail "apt-get is not there; install by other means: ${wanted[*]}"
    [[ $(id -u) == 0 ]] || sudo -n true 2>/dev/null || fail "run as root (or allow sudo) to install: ${wanted[*]}"
    as_root apt-get update -qq || echo "tests/components/install.sh: apt-get update failed; trying the known lists" >&2
    mapfile -t wanted < <(missing_packages | grep . || true)
    for name in "${wanted[@]}"; do
        has_candidate "$name" || fail "no package named $name here; is the network reachable?"
    done
    echo "installing ${wanted[*]} ..."
    without_services env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        "${wanted[@]}" >/dev/null || fail "apt-get could not install ${wanted[*]}; is the network reachable?"
    mapfile -t wanted < <(missing_packages | grep . || true)
    ((${#wanted[@]} == 0)) || fail "the programs of ${wanted[*]} are still not on PATH=$PATH"
}

have_python() {
    "$python" -c 'from importlib.metadata import version
import etcd3gw, ray, redis
number = lambda name: tuple(int(part) for part in version(name).split(".")[:2])
assert number("ray")[0] == 2 and number("etcd3gw") >= (2, 4) and number("redis") >= (5, 2)' 2>/dev/null
}

install_python() {
    if have_python; then return; fi
    "$python" -m pip --version >/dev/null 2>&1 || fail "$python has no pip; give the interpreter as first argument"
    local report
    report=$(mktemp)
    "$python" -m pip install --quiet --disable-pip-version-check --dry-run --report "$report" "${packages[@]}" ||
        fail "pip cannot resolve ${packages[*]}; is the network reachable?"
    "$python" - "$report" <<'CHECK' || fail "installing ${packages[*]} would replace torch; nothing was installed"
import json
import sys

with open(sys.argv[1], encoding="utf-8") as file:
    names = [item["metadata"]["name"].lower() for item in json.load(file)["install"]]
sys.exit(any(name in ("torch", "numpy", "transformers") for name in names))
CHECK
    rm -f "$report"
    echo "installing ${packages[*]} into $python ..."
    "$python" -m pip install --quiet --disable-pip-version-check "${packages[@]}" ||
        fail "pip could not install ${packages[*]}; is the network reachable?"
    have_python || fail "ray, etcd3gw or redis does not import in $python"
}

command -v "$python" >/dev/null || fail "$python does not exist; run  make install  first or name an interpreter"
install_system
install_python
echo "components are installed: redis-server, etcd, munge, slurm, ray, etcd3gw, redis"
