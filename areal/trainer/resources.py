"""What worker processes get: devices, cores, threads, the command that starts them.

Read from the config by the builders of runs in worker processes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from areal.api.alloc_mode import ModelAllocation
from areal.api.config.scheduling import SchedulingSpec

WORKER_COMMAND = "python -m areal.infra.rpc.rpc_server"


def worker_specs(specs: Sequence[SchedulingSpec], devices: int = 1) -> list[SchedulingSpec]:
    """The spec of a role's workers: the command is ours unless the user names one, and a spec that says nothing else
    asks for devices where this machine has some.

    Args:
        specs: as the user gave them.
        devices: of one worker; cores, devices and memory of the spec are per device.
    """
    first = specs[0] if specs else SchedulingSpec()
    if not first.cmd:
        first = replace(first, cmd=WORKER_COMMAND)
    if first == SchedulingSpec(cmd=WORKER_COMMAND) and torch.cuda.is_available():
        first = replace(first, gpu=1)
    return [replace(first, cpu=first.cpu * devices, gpu=first.gpu * devices, mem=first.mem * devices)]


def thread_env(config: Any, replicas: int) -> dict[str, dict[str, str]]:
    """Thread settings of train ranks and rollout workers that compute on the CPUs of this machine.

    A synchronous run takes turns, so each side may use every core; else they share them. With devices, or a user's own
    setting in ``env_vars``, nothing is changed.
    """
    ranks = ModelAllocation.from_str(config.actor.backend, name="actor").parallel.world_size
    rollout = getattr(config, "rollout", None)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = ranks + replicas if rollout is not None and not rollout.synchronous else None

    def env(specs: Sequence[SchedulingSpec], processes: int) -> dict[str, str]:
        spec = specs[0] if specs else None
        if spec is not None and (spec.gpu or "OMP_NUM_THREADS" in spec.env_vars):
            return {}
        threads = str(max(1, cores // max(1, share or processes)))
        return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), threads)

    return {
        "train": env(config.actor.scheduling_spec, ranks),
        "rollout": env(rollout.scheduling_spec, replicas) if rollout is not None else {},
    }
