"""Scheduler cells: the whole quickstart, as a user starts it, on every scheduler that has worker processes.

A cell starts the cluster that its scheduler needs, real Ray or Slurm of two nodes on this machine, runs
``examples/quickstart/quickstart.py`` in a process of its own, and stops the cluster. Nothing of the run may be left.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from tests.full.accuracy import SEED
from tests.full.cell import ROOT, CellContext

STEPS = 700  # of the quickstart's second stage
BAR = 0.85  # of the held-out problems; the quickstart's warm start has 0.64
GONE_WITHIN_S = 10.0
SMALL = "{cpu: 1, mem: 1, container_type: none}"  # one worker; the virtual nodes are small
ROLES = ("actor", "rollout")

Left = Callable[[], list[str]]


@contextlib.contextmanager
def _no_cluster() -> Iterator[Left]:
    yield list


@contextlib.contextmanager
def _ray() -> Iterator[Left]:
    from tests.components.ray_cluster import running_cluster

    with running_cluster() as cluster:

        def left() -> list[str]:
            import ray
            from ray.util import placement_group_table

            ray.init(address=cluster.address, ignore_reinit_error=True, log_to_driver=False)
            groups = [group for group in placement_group_table().values() if group["state"] != "REMOVED"]
            free, whole = ray.available_resources(), ray.cluster_resources()
            taken = {name: whole[name] - free.get(name, 0.0) for name in ("CPU", "GPU")}
            found = [f"Ray placement group {group['placement_group_id']}" for group in groups]
            return [*found, *(f"{count:g} {name} of Ray in use" for name, count in taken.items() if count)]

        yield left


@contextlib.contextmanager
def _slurm() -> Iterator[Left]:
    from tests.components.slurm import running_cluster

    with running_cluster() as cluster:
        yield lambda: [f"Slurm job {job}" for job in cluster.jobs()]


CLUSTERS: dict[str, Callable[[], contextlib.AbstractContextManager[Left]]] = {
    "local": _no_cluster,
    "ray": _ray,
    "slurm": _slurm,
}


def run(context: CellContext, scheduler: str, steps: int = STEPS, more: Sequence[str] = ()) -> None:
    """Run the quickstart on ``scheduler``; it must learn as it does everywhere, and leave nothing there.

    ``steps`` and ``more`` (overrides) make a shorter run to look at by hand.
    """
    output = context.work / "quickstart"
    settings = [f"scheduler.type={scheduler}", f"cluster.name_resolve.nfs_record_root={context.work / 'names'}"]
    if scheduler != "local":
        settings += [f"{role}.scheduling_spec=[{SMALL}]" for role in ROLES]
    script = str(ROOT / "examples" / "quickstart" / "quickstart.py")
    try:
        with CLUSTERS[scheduler]() as left:
            began = time.monotonic()
            command = [sys.executable, script, f"seed={SEED}", f"output={output}", f"steps={steps}", *settings, *more]
            code = subprocess.run(command, cwd=ROOT, check=False).returncode
            context.facts["seconds"] = round(time.monotonic() - began)
            context.expect(code == 0, f"the quickstart ended with exit code {code}")
            context.failures += [f"left after the end: {what}" for what in _after_a_while(left)]
    except pytest.skip.Exception as exc:  # a component that a test would skip without
        context.expect(False, str(exc))
        return
    if code == 0:
        _check(context, json.loads((output / "summary.json").read_text()), steps)


def _after_a_while(left: Left) -> list[str]:
    """What is left at most ``GONE_WITHIN_S`` seconds later."""
    deadline = time.monotonic() + GONE_WITHIN_S
    while (found := left()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


def _check(context: CellContext, summary: dict[str, Any], steps: int) -> None:
    for key in ("accuracy_before", "accuracy_after", "train_seconds", "steps", "sequences_per_second"):
        context.facts[key] = round(summary[key], 4)
    context.expect(summary["steps"] == steps, f"{summary['steps']} of {steps} steps in stats.jsonl")
    reached = summary["accuracy_after"]
    context.expect(reached >= BAR, f"greedy accuracy {reached:.1%} is below {BAR:.0%}")
