"""What all processes of one run share: names, directories, the identity that keeps runs apart, and time limits.

``RunContext.from_config`` is called once by the controller, before anything is loaded; what cannot work is refused here
with the key, its value and the remedy. Schedulers and launchers take the context.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal.api.config.cluster import NameResolveConfig
from areal.infra.rpc.identity import RunIdentity, set_identity, write_token
from areal.utils import name_resolve, names
from areal.utils.errors import ArealError, ConfigError, NameEntryNotFoundError, UnsupportedFeatureError
from areal.utils.fs import aside_path, get_log_path
from areal.utils.network import new_run_id, new_token


class StorageError(ConfigError, OSError):
    """A directory or a store that every process of the run needs cannot be used."""


@dataclass
class RunContext:
    """One run, as its controller sees it.

    Attributes:
        log_dir: where workers write ``{role}-{index}.log`` and all of them ``merged.log``.
        token_path: file with the run's bearer token, readable by the owner only.
        host: address that workers listen on; None = loopback for local workers, their machine's own address elsewhere.
        startup_timeout_s: from the start of a worker process until it answers.
        heartbeat_interval_s: between two questions whether a worker is alive.
        heartbeat_timeout_s: silence after which a worker counts as failed.
        joined: another process began the run and ends it.
    """

    experiment_name: str
    trial_name: str
    fileroot: str
    log_dir: Path
    identity: RunIdentity
    token_path: Path
    name_resolve: NameResolveConfig
    n_gpus_per_node: int = 8
    host: str | None = None
    startup_timeout_s: float = 120.0
    heartbeat_interval_s: float = 1.0
    heartbeat_timeout_s: float = 30.0
    joined: bool = False

    @classmethod
    def from_config(cls, config: Any) -> RunContext:
        """Begin a run: make its identity and directories, connect to name_resolve and clear the trial's keys.

        Args:
            config: experiment root (``PPOConfig``, ``SFTConfig``, ...).

        Raises:
            StorageError: fileroot or the name_resolve store cannot be used.
            ConfigError: name_resolve.type=memory with worker processes.
        """
        cluster, scheduler = config.cluster, config.scheduler
        if cluster.name_resolve.type == "memory" and scheduler.type != "inline":
            raise ConfigError(
                f"cluster.name_resolve.type='memory' holds names of one process only, and scheduler.type="
                f"{scheduler.type or 'local'!r} starts others; set it to 'nfs' (a shared directory), 'redis' or 'etcd3'"
            )
        log_dir = _writable_log_dir(config)
        connect_names(cluster.name_resolve, config.experiment_name, config.trial_name)
        identity = RunIdentity(run_id=new_run_id(), token=new_token())
        token_path = log_dir / f".token-{identity.run_id}"
        write_token(token_path, identity.token)
        return cls._of(config, log_dir, identity, token_path)

    @classmethod
    def join(cls, config: Any, identity: RunIdentity, token_path: Path) -> RunContext:
        """Take part in a run that another process (a launcher) has begun; ``config`` is the script's."""
        store = config.cluster.name_resolve
        try:
            name_resolve.reconfigure(store)
        except (ArealError, OSError) as exc:
            raise StorageError(f"{_store_key(store)} cannot be used as the store of names: {exc}") from exc
        context = cls._of(config, _writable_log_dir(config), identity, token_path)
        context.joined = True
        return context

    @classmethod
    def _of(cls, config: Any, log_dir: Path, identity: RunIdentity, token_path: Path) -> RunContext:
        cluster, scheduler = config.cluster, config.scheduler
        set_identity(identity)
        return cls(
            experiment_name=config.experiment_name,
            trial_name=config.trial_name,
            fileroot=str(cluster.fileroot),
            log_dir=log_dir,
            identity=identity,
            token_path=token_path,
            name_resolve=cluster.name_resolve,
            n_gpus_per_node=cluster.n_gpus_per_node,
            host=scheduler.host,
            startup_timeout_s=scheduler.startup_timeout_s,
            heartbeat_interval_s=scheduler.heartbeat_interval_s,
            heartbeat_timeout_s=scheduler.heartbeat_timeout_s,
        )

    def close(self) -> None:
        """Remove the token; no worker of the run can be started or reached by others any more."""
        if not self.joined:
            self.token_path.unlink(missing_ok=True)


def connect_names(config: NameResolveConfig, experiment_name: str, trial_name: str) -> None:
    """Use the store that ``config`` describes, check that it works, and clear what earlier runs of the trial left.

    Raises:
        StorageError: the store cannot be reached or written.
        UnsupportedFeatureError: the store's type is not available.
    """
    probe = f"{names.trial_root(experiment_name, trial_name)}/probe-{new_run_id()}"
    try:
        name_resolve.reconfigure(config)
        name_resolve.add(probe, "1", delete_on_exit=True, replace=True)
        if name_resolve.get(probe) != "1":
            raise NameEntryNotFoundError(f"{probe!r} was written and cannot be read")
        name_resolve.clear_subtree(names.trial_root(experiment_name, trial_name))
    except UnsupportedFeatureError:
        raise
    except (ArealError, OSError) as exc:
        raise StorageError(
            f"{_store_key(config)} cannot be used as the store of names: {type(exc).__name__}: {exc}. "
            "Start it, correct the address, or set cluster.name_resolve.type=nfs with a directory that all machines see"
        ) from exc


def _store_key(config: NameResolveConfig) -> str:
    """The key and value that say where the store is."""
    key = {"nfs": "nfs_record_root", "redis": "redis_addr", "etcd3": "etcd3_addr", "ray": "ray_actor_name"}.get(
        config.type, "type"
    )
    return f"cluster.name_resolve.{key}={getattr(config, key)!r}"


def _writable_log_dir(config: Any) -> Path:
    fileroot = config.cluster.fileroot
    try:
        log_dir = get_log_path(fileroot, config.experiment_name, config.trial_name)
        trial = aside_path(log_dir / "probe")
        try:
            trial.write_bytes(b"probe")
        finally:
            with contextlib.suppress(OSError):
                trial.unlink(missing_ok=True)
    except OSError as exc:
        raise StorageError(
            f"cluster.fileroot={fileroot!r} cannot be written: {exc}. Name a directory that every machine of the run "
            "shares, with free space and write permission"
        ) from exc
    return log_dir
