"""Backend cells: the quickstart, as a user starts it, with each kind of sampler and each train backend; every one must
learn to add.

The interpreters of the servers' environments are named by ``AREAL_VLLM_PYTHON`` and ``AREAL_SGLANG_PYTHON``; where one
is not set, the environment is built with ``areal install-server`` into the summary's directory, once.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from areal.utils import environ
from tests.full import schedulers
from tests.full.cell import CellContext

STEPS = 150
_LIGHT = ("rollout.max_concurrent_rollouts=32", "rollout.setup_timeout=900")


def settings_of(backend: str, shared: Path) -> list[str]:
    """Overrides of the quickstart for one cell: samplers as ``kind`` or ``kind-mode``, trainers as ``archon-d2``."""
    kind, _, mode = backend.partition("-")
    if kind in ("archon", "megatron"):
        return ["rollout.backend=native:d1", f"actor.backend={kind}:{mode}"]
    overrides = [f"rollout.backend={kind}:d1", f"actor.weight_update_mode={mode or 'auto'}"]
    if kind != "native":
        overrides += [*_LIGHT, f"{kind}.python={interpreter(kind, shared)}"]
    return overrides


def interpreter(kind: str, shared: Path) -> str:
    """Python of the environment that the server is installed in."""
    given = environ.get_env(f"AREAL_{kind.upper()}_PYTHON")
    if given:
        return given
    place = shared / f"{kind}-environment"
    command = [sys.executable, "-m", "areal.cli", "install-server", kind, str(place)]
    subprocess.run(command, check=True)
    return str(place / "bin" / "python")


def run(context: CellContext, backend: str) -> None:
    """Run the quickstart with one backend; shorter than a user's: enough to pass the bar."""
    try:
        more = settings_of(backend, context.shared)
    except subprocess.CalledProcessError as exc:
        context.expect(False, f"the server's environment cannot be built: {exc}")
        return
    schedulers.run(context, "local", STEPS, more)
