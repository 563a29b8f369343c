"""What a launcher is to start: read from the command line and the part of the config that it understands.

In: ``script.py --config c.yaml key=value …``. Out: a :class:`LaunchPlan`, or an error that names the key. The script's
config class is not known here, so only the sections below are checked; the script checks all of it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal.api.alloc_mode import ModelAllocation
from areal.api.cli_args import PPOConfig
from areal.api.config.cluster import ClusterSpecConfig, SchedulerConfig
from areal.api.config.convert import build
from areal.api.config.fields import MISSING, ConfigSection, MissingValueError, opt, section
from areal.api.config.scheduling import SchedulingSpec
from areal.api.config.timers import RecoverConfig
from areal.api.config_loader import parse_argv, resolve
from areal.utils import environ, logging
from areal.utils.errors import ConfigError

logger = logging.getLogger("Launcher")

WORKER_COMMAND = "python -m areal.infra.rpc.rpc_server"
_SHARED_SYSTEMS = re.compile(r"nfs4?|lustre|(fuse\.)?(ceph|glusterfs)|beegfs|gpfs|cifs|smb3|9p|virtiofs")
_CACHES = {"PYTORCH_KERNEL_CACHE_PATH": "torch_kernels", "TRITON_CACHE_DIR": "triton", "VLLM_CACHE_ROOT": "vllm"}


class LaunchError(ConfigError, RuntimeError):
    """A launch that cannot work; nothing was started."""


class MissingPathError(ConfigError, FileNotFoundError):
    """A file or directory that a launch needs is not there; nothing was started."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass
class RoleConfig(ConfigSection):
    """What a launcher reads of ``actor`` and ``rollout``."""

    backend: str = opt("", "Allocation string.")
    scheduling_spec: list[SchedulingSpec] = opt(help="Resources of a worker.", factory=lambda: [SchedulingSpec()])


@dataclass
class LaunchConfig(ConfigSection):
    """What a launcher reads of a config file."""

    experiment_name: str = opt(MISSING, "Name of the experiment.")
    trial_name: str = opt(MISSING, "Name of the trial.")
    allocation_mode: str = opt("", "Layout of all roles.")
    cluster: ClusterSpecConfig = section(ClusterSpecConfig, "Machines and shared storage.")
    scheduler: SchedulerConfig = section(SchedulerConfig, "Time limits of workers; type is not read.")
    recover: RecoverConfig = section(RecoverConfig, "Whether a failed run is started again.")
    actor: RoleConfig | None = section(None, "The trained model.")
    rollout: RoleConfig | None = section(None, "What generates.")


@dataclass(frozen=True)
class LaunchPlan:
    """A launch that can be tried.

    Attributes:
        arguments: of the script, with what the launcher adds.
        ranks: copies of the script.
        replicas: rollout workers; 0 without a rollout.
        actor, rollout: resources of a worker.
    """

    script: Path
    arguments: list[str]
    config: LaunchConfig
    ranks: int
    replicas: int
    actor: SchedulingSpec
    rollout: SchedulingSpec

    @property
    def workers(self) -> str:
        """Roles and their numbers of workers, as the scripts are told: ``actor=2,rollout=1``."""
        return f"actor={self.ranks}" + (f",rollout={self.replicas}" if self.replicas else "")


def read_plan(argv: Sequence[str]) -> LaunchPlan:
    """The plan of a command line; contacts nothing, writes nothing.

    Raises:
        MissingPathError: the script, or a directory that the config names.
        LaunchError: sections or sizes that do not fit together.
        ConfigError: anything else that is wrong with the config.
    """
    script, arguments = _split(argv)
    tree, _ = parse_argv(arguments)
    config = _config(tree)
    actor, rollout, added = _backends(config)
    if tree.get("scheduler") and tree["scheduler"].get("type") is not None:
        added.append("scheduler.type=null")  # this launcher's workers, whatever the file is written for
    specs = [
        side.scheduling_spec[0] if side is not None else SchedulingSpec() for side in (config.actor, config.rollout)
    ]
    check_path("cluster.fileroot", config.cluster.fileroot)
    if config.cluster.name_resolve.type == "nfs":
        check_path("cluster.name_resolve.nfs_record_root", config.cluster.name_resolve.nfs_record_root)
    return LaunchPlan(
        script=script,
        arguments=[*arguments, *added],
        config=config,
        ranks=actor.parallel.world_size,
        replicas=rollout.parallel.dp_size if rollout is not None else 0,
        actor=_job_spec(specs[0]),
        rollout=_job_spec(specs[1], rollout.parallel.tp_size * rollout.parallel.pp_size if rollout is not None else 1),
    )


def check_nodes(plan: LaunchPlan) -> None:
    """Refuse more devices than ``cluster`` describes, before a queue or a placement group waits for them.

    Raises:
        LaunchError: names the keys.
    """
    cluster = plan.config.cluster
    wanted = plan.ranks * plan.actor.gpu + plan.replicas * plan.rollout.gpu
    if wanted > cluster.n_nodes * cluster.n_gpus_per_node:
        raise LaunchError(
            f"{plan.ranks} ranks with actor.scheduling_spec.gpu={plan.actor.gpu} and {plan.replicas} rollout workers "
            f"with rollout.scheduling_spec.gpu={plan.rollout.gpu} need {wanted} devices; cluster.n_nodes="
            f"{cluster.n_nodes} with cluster.n_gpus_per_node={cluster.n_gpus_per_node} has fewer"
        )


def warn_if_not_shared(plan: LaunchPlan) -> None:
    """Say so when a directory that every machine must see lies on a file system that only this one has."""
    cluster = plan.config.cluster
    paths = {"cluster.fileroot": cluster.fileroot}
    if cluster.name_resolve.type == "nfs":
        paths["cluster.name_resolve.nfs_record_root"] = cluster.name_resolve.nfs_record_root
    for key, path in paths.items():
        kind = _file_system(Path(path))
        if kind is not None and not _SHARED_SYSTEMS.fullmatch(kind):
            logger.warning(f"{key}={path} is on {kind}; on more than one machine it must be a directory that all share")


def check_path(key: str, path: str) -> None:
    """Refuse a directory that does not exist.

    Raises:
        MissingPathError: names key and value.
    """
    if not Path(path).is_dir():
        raise MissingPathError(
            f"{key}={path!r} is not an existing directory; make it on storage that every machine of the run sees, or "
            "name another one"
        )


def _split(argv: Sequence[str]) -> tuple[Path, list[str]]:
    if not argv or argv[0].startswith("-") or "=" in argv[0]:
        raise LaunchError(
            "the script is missing: python -m areal.infra.launcher.local script.py --config c.yaml key=value …"
        )
    script = Path(argv[0])
    if not script.is_file():
        raise MissingPathError(f"script {argv[0]!r} does not exist; give the path of a Python file first")
    return script.resolve(), list(argv[1:])


def _config(tree: Mapping[str, Any]) -> LaunchConfig:
    """The sections that a launcher reads; what the script's own class adds is left out."""
    resolved = resolve(dict(tree), PPOConfig)
    known = {spec.name for spec in dataclasses.fields(LaunchConfig)}
    part = {key: value for key, value in resolved.items() if key in known}
    for role in ("actor", "rollout"):
        fields = {spec.name for spec in dataclasses.fields(RoleConfig)}
        if isinstance(part.get(role), Mapping):
            part[role] = {key: value for key, value in part[role].items() if key in fields}
    config: LaunchConfig = build(LaunchConfig, part)
    config.scheduler.type = None
    absent = [name for name in ("experiment_name", "trial_name") if getattr(config, name) == MISSING]
    if absent:
        raise MissingValueError(
            f"mandatory values are missing: {', '.join(absent)}; add them to the YAML or as key=value"
        )
    return config


def _backends(config: LaunchConfig) -> tuple[ModelAllocation, ModelAllocation | None, list[str]]:
    """Layouts of actor and rollout, and the overrides by which the script learns what ``allocation_mode`` says."""
    if config.actor is None:
        raise LaunchError("the config has no section actor; a launcher needs one to know how many ranks there are")
    sides = {"actor": config.actor, "rollout": config.rollout}
    mode = f"allocation_mode={config.allocation_mode!r}"
    found = {
        role: ModelAllocation.from_str(side.backend, name=role)
        for role, side in sides.items()
        if side is not None and side.backend
    }
    added = []
    for role, text in _components(config.allocation_mode).items():
        side = sides[role]
        if side is None:
            raise LaunchError(f"{mode} has {text!r} and the config no section {role}")
        layout = ModelAllocation.from_str(text, name=role)
        if role in found and found[role] != layout:
            raise LaunchError(f"{mode} and {role}.backend={side.backend!r} contradict each other; delete one of them")
        if role not in found:
            found[role] = layout
            added.append(f"{role}.backend={text}")
    if "actor" not in found or (config.rollout is not None and "rollout" not in found):
        raise LaunchError(
            f"{mode} does not say how many workers actor and rollout have; set it, for example to 'native:d1+fsdp:d2', "
            "or set actor.backend and rollout.backend"
        )
    rollout = found.get("rollout")
    return found["actor"], rollout, added


def _components(text: str) -> dict[str, str]:
    """``native:d1+fsdp:d2`` by role; empty without a text."""
    found: dict[str, str] = {}
    for part in text.split("+") if text.strip() else ():
        layout = ModelAllocation.from_str(part)
        role = "rollout" if layout.is_inference else "actor"
        if role in found:
            raise LaunchError(f"allocation_mode={text!r} has two components for {role}; a launcher starts one of each")
        found[role] = "".join(part.split())
    return found


def _job_spec(spec: SchedulingSpec, devices: int = 1) -> SchedulingSpec:
    """The spec with a command, and with what every job of a launcher has in its environment; what is set wins.

    Cores, devices and memory are given per device of a worker.
    """
    spec = dataclasses.replace(spec, cpu=spec.cpu * devices, gpu=spec.gpu * devices, mem=spec.mem * devices)
    common = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", **{name: f"{environ.cache_dir()}/{d}" for name, d in _CACHES.items()}}
    kept = {name: environ.get_env(name) or value for name, value in common.items()}
    return dataclasses.replace(spec, cmd=spec.cmd or WORKER_COMMAND, env_vars={**kept, **spec.env_vars})


def _file_system(path: Path) -> str | None:
    """Type of the file system that holds ``path``; None where the system does not tell."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return None
    real = path.resolve()
    holding = [(len(point), kind) for point, kind in mounts if real.is_relative_to(point)]
    return max(holding)[1] if holding else None
