"""Placement and resources of worker processes; read by the schedulers (``areal.infra.scheduler``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from areal.api.config.fields import ConfigSection, FieldError, opt


@dataclass
class SchedulingStrategy(ConfigSection):
    """Whether a role gets resources of its own."""

    type: Literal["separation", "colocation"] = opt("separation", "Own resources, or share another role's.")
    target: str | None = opt(None, "Role shared with (needed for colocation).")
    fork: bool = opt(
        True, "Colocated role gets its own process on the same devices; false = reuse the target's processes."
    )


@dataclass
class SchedulingSpec(ConfigSection):
    """What one worker process needs and how it is started."""

    cpu: int = opt(
        8,
        "CPU cores per worker (rollout multiplies by instance size); also sets the thread env vars.",
        unit="cores",
        ge=1,
    )
    gpu: int = opt(0, "Devices per worker process.", unit="devices", ge=0)
    mem: int = opt(32, "Host memory per worker (rollout multiplies it by the instance size).", unit="GB", ge=1)
    port_count: int = opt(
        2, "Ports reserved per worker; first is the HTTP port, second the torch master port.", unit="ports", ge=1
    )
    env_vars: dict[str, str] = opt(help="Extra environment of the worker.", factory=dict)
    cmd: str | None = opt(None, "Command that starts a worker; must not contain --port.")
    image: str = opt("/storage/openpsi/images/areal-latest.sif", "Container image of Slurm jobs.")
    task_type: Literal["worker", "engine"] = opt("worker", "Label only; not read (kept for 1.x files).")
    srun_additional_args: str = opt("--unbuffered --mpi=pmi2 -K --chdir $PWD", "Slurm: extra srun flags.")
    additional_bash_cmds: list[str] | None = opt(None, "Slurm: commands run before the worker command.")
    container_type: Literal["apptainer", "none"] = opt("apptainer", "Slurm container runtime.")
    mount: str = opt("/storage:/storage", "Slurm container bind mount.")
    nodelist: str | None = opt(None, "Nodes for Slurm's --nodelist.")
    exclude: str | None = opt(None, "Nodes for Slurm's --exclude.")
    ray_placement_strategy: Literal["shared", "separate", "deferred"] = opt(
        "shared",
        "Ray placement groups: one for the role, one per worker, or per worker with late device binding "
        "(rollout turns shared into separate).",
    )


def check_placement(specs: list[SchedulingSpec], counts: tuple[int, ...], strategy: SchedulingStrategy) -> None:
    """Check what every engine section has: how many specs, and a target when it shares another role's devices.

    Raises:
        FieldError: names the field.
    """
    if len(specs) not in counts:
        allowed = f"a list of {' or '.join(map(str, counts))} specs"
        raise FieldError("Engine.scheduling_spec", specs and f"{len(specs)} specs", allowed)
    if strategy.type == "colocation" and not strategy.target:
        raise FieldError("Engine.scheduling_strategy.target", strategy.target, "a role, because type is colocation")
