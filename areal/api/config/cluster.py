"""Machines, discovery and the scheduler; read by ``areal.infra`` and ``areal.utils.name_resolve``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from areal.api.config.fields import ConfigSection, opt, section


@dataclass
class NameResolveConfig(ConfigSection):
    """Key-value store through which processes find each other."""

    type: Literal["memory", "redis", "nfs", "etcd3", "ray"] = opt(
        "nfs", "Store: memory (one process), nfs (a shared directory), redis, etcd3 or ray."
    )
    nfs_record_root: str = opt("/tmp/areal/name_resolve", "Directory of the file backend.")
    etcd3_addr: str = opt("localhost:2379", "Address of etcd, host:port.")
    ray_actor_name: str = opt("ray_kv_store", "Name of the detached Ray actor.")
    redis_addr: str = opt("localhost:6379", "Address of Redis, host:port.")


@dataclass
class ClusterSpecConfig(ConfigSection):
    """The machines and the storage they share."""

    name_resolve: NameResolveConfig = section(NameResolveConfig, "How processes find each other.")
    fileroot: str = opt("/tmp/areal/", "Root of logs, checkpoints and everything else a run writes.")
    n_nodes: int = opt(32, "Used by Ray/Slurm launchers.", ge=1)
    n_gpus_per_node: int = opt(8, "Devices of one machine.", unit="devices", ge=0)
    cluster_name: str = opt("local", "Name of the cluster; a label only.")


@dataclass
class SchedulerConfig(ConfigSection):
    """Who hosts the engines."""

    type: Literal["inline", "local", "ray", "slurm"] | None = opt(
        None,
        "Who hosts the engines: inline = this process; local = child processes; ray; slurm. Null: SPMD under "
        "a launcher, else local.",
    )
    startup_timeout_s: float = opt(
        120.0,
        "From the start of a worker process until it answers; waiting in a cluster's queue not counted.",
        unit="s",
        gt=0,
    )
    heartbeat_interval_s: float = opt(1.0, "Between two questions whether a worker is alive.", unit="s", gt=0)
    heartbeat_timeout_s: float = opt(30.0, "Silence after which a worker counts as failed.", unit="s", gt=0)
    host: str | None = opt(
        None,
        "Address that workers listen on. Null: loopback for local, the machine's own address elsewhere.",
    )
    endpoint: str = opt("http://localhost:8081", "Not read (kept for 1.x files).")
    deploy_mode: str = opt("separation", "Not read (kept for 1.x files).")
    functioncall_service_domain: str = opt("http://localhost:8080", "Not read (kept for 1.x files).")
    reward_functioncall_config: dict[str, Any] = opt(help="Not read (kept for 1.x files).", factory=dict)
    reward_model_path: str = opt("", "Not read (kept for 1.x files).")
    reward_model_service_url: str = opt("http://localhost:30000/classify", "Not read (kept for 1.x files).")
