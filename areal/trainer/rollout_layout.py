"""Which samplers a run has: embedded engines or servers, how many, on what, and how weights reach them.

In: the config of an RL run. Out: the rollout controller of its workers. Called by ``remote_builder``; after it no code
asks which backend it is running.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal.api.alloc_mode import ModelAllocation
from areal.engine.core.weight_transfer import TransferSettings
from areal.engine.inference.backends import protocol_class
from areal.engine.inference.discovery import find_servers, token_file
from areal.engine.inference.request_parts import check_settings
from areal.engine.inference.rollout_worker import NATIVE_SAMPLER, RolloutSetup
from areal.engine.native.requests import InvalidRequestError
from areal.infra.controller.rollout_controller import RolloutController, RolloutSpec
from areal.trainer.resources import worker_specs
from areal.utils import logging
from areal.utils.errors import ConfigError, UnsupportedFeatureError
from areal.utils.fs import get_log_path
from areal.utils.network import address_towards, split_hostport
from areal.utils.saver import Saver

if TYPE_CHECKING:
    from areal.api.cli_args import PPOConfig
    from areal.engine.inference.protocol import ServerProtocol
    from areal.infra.scheduler.base import BaseScheduler

logger = logging.getLogger("Builder")

SERVER_SAMPLER = "areal.engine.inference.server_sampler.server_sampler"
_LOOPBACK = {"127.0.0.1", "localhost", "::1"}
_SGLANG_TRAIN_ENV = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}  # as SGLang sets them for its own ranks
_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what its --max-lora-rank takes


@dataclass(frozen=True)
class RolloutLayout:
    """The samplers of a run.

    Attributes:
        backend: ``native``, ``vllm`` or ``sglang``.
        replicas: rollout workers; each has one embedded engine or one server.
        tensor, pipeline: devices of one server, along each.
        addresses: of servers that somebody else runs; empty: each worker starts its own.
        train_env: environment that the ranks of train roles need to talk to these servers.
    """

    backend: str
    replicas: int
    tensor: int = 1
    pipeline: int = 1
    addresses: tuple[str, ...] = ()
    train_env: dict[str, str] = field(default_factory=dict)

    @property
    def protocol(self) -> type[ServerProtocol]:
        """What speaks to the servers."""
        return protocol_class(self.backend)

    @property
    def other_hosts(self) -> set[str]:
        """Hosts of external servers that are named by another address than this machine's own loopback."""
        return {split_hostport(address)[0] for address in self.addresses} - _LOOPBACK

    @property
    def served(self) -> bool:
        """Whether samplers are servers, not embedded engines."""
        return self.backend != "native" or bool(self.addresses)


def read_layout(config: PPOConfig) -> RolloutLayout:
    """The layout that ``rollout.backend`` and the environment ask for.

    Raises:
        UnsupportedFeatureError: a generation setting that the backend cannot honour; names the backend that can.
        ConfigError: as many addresses of external servers as there are replicas are needed.
    """
    allocation = ModelAllocation.from_str(config.rollout.backend, name="rollout")
    parallel = allocation.parallel
    addresses = tuple(find_servers(None, config.experiment_name, config.trial_name))
    if addresses and len(addresses) % parallel.dp_size:
        raise ConfigError(
            f"there are {len(addresses)} servers by address ({', '.join(addresses)}) for rollout.backend="
            f"{config.rollout.backend}: give a multiple of d={parallel.dp_size}, so that every rollout worker has as "
            "many"
        )
    layout = RolloutLayout(
        backend=allocation.backend,
        replicas=parallel.dp_size,
        tensor=parallel.tp_size,
        pipeline=parallel.pp_size,
        addresses=addresses,
        train_env=dict(_SGLANG_TRAIN_ENV) if allocation.backend == "sglang" else {},
    )
    if layout.served:
        _check_generation(config, layout)
    return layout


def _check_generation(config: PPOConfig, layout: RolloutLayout) -> None:
    protocol = layout.protocol()
    for name, settings in (("gconfig", config.gconfig), ("eval_gconfig", config.eval_gconfig)):
        if settings is not None:
            try:
                check_settings(settings, protocol)
            except InvalidRequestError as exc:
                raise UnsupportedFeatureError(f"{name} with rollout.backend={config.rollout.backend}: {exc}") from exc
    if not protocol.capabilities.seeds:
        logger.warning(
            f"{layout.backend} does not take a seed per request: a run with the same seed samples other tokens"
        )


def weight_mode(config: PPOConfig, layout: RolloutLayout, *, one_host: bool) -> str:
    """How weights travel: ``actor.weight_update_mode``, or for ``auto`` shared memory on one host, else a collective.

    Raises:
        UnsupportedFeatureError: a way that the servers cannot receive on.
    """
    wanted = config.actor.weight_update_mode
    able = layout.protocol.capabilities.weight_modes
    if config.rollout.use_lora and layout.backend != "native":
        able = ("disk",)  # their routes for adapters read directories
        wanted = "disk" if wanted == "auto" else wanted
    if wanted == "auto":
        return "shm" if one_host and "shm" in able else "xccl"
    if wanted not in able:
        raise UnsupportedFeatureError(
            f"actor.weight_update_mode={wanted}: {layout.backend} receives weights by {', '.join(able)}; use one of "
            "them or auto"
        )
    return wanted


def transfer_settings(config: PPOConfig, layout: RolloutLayout, first_rank: str) -> TransferSettings:
    """Limits and places of the transfer; a directory that trainer and samplers share.

    Args:
        first_rank: address of the trainer's first rank, as its workers know it.
    """
    host = None
    if layout.other_hosts and first_rank in _LOOPBACK:  # known by a name that means something else elsewhere
        host = address_towards(next(a for a in layout.addresses if split_hostport(a)[0] in layout.other_hosts))
    root = Saver.get_model_save_root(config.experiment_name, config.trial_name, config.cluster.fileroot)
    return TransferSettings(
        bucket_bytes=config.actor.weight_chunked_mem_mb << 20,
        timeout_s=config.actor.weight_update_timeout_s,
        directory=str(Path(root).absolute()),
        torch_helper=layout.protocol.capabilities.torch_groups,
        host=host,
        lora_name=config.gconfig.lora_name if config.rollout.use_lora else "",
    )


def build_rollout_controller(
    scheduler: BaseScheduler, config: PPOConfig, layout: RolloutLayout, env: dict[str, str]
) -> RolloutController:
    """The rollout workers of a run, and a training and an evaluation rollout on them."""
    eval_rows = config.valid_dataset.batch_size if config.valid_dataset is not None else 1
    eval_config = replace(
        config.rollout,
        max_concurrent_rollouts=max(eval_rows, config.rollout.max_concurrent_rollouts or 1),
        queue_size=None,
    )
    setup = RolloutSetup(
        rollout=config.rollout,
        native=config.native,
        model_path=config.actor.path,
        tokenizer_path=config.tokenizer_path,
        dtype=config.native.dtype or config.actor.dtype,
        run_seed=config.seed,
        sampler=SERVER_SAMPLER if layout.served else NATIVE_SAMPLER,
        perf_tracer=config.perf_tracer,
        arguments=_server_arguments(config, layout) if layout.served else {},
    )
    spec = RolloutSpec(
        role="rollout",
        replicas=layout.replicas,
        setup=setup,
        specs=worker_specs(config.rollout.scheduling_spec, layout.tensor * layout.pipeline),
        placement=config.rollout.scheduling_strategy,
        env=env,
        max_deaths=config.recover.retries,
    )
    return RolloutController(scheduler, spec, config.rollout, eval_config)


def _server_arguments(config: PPOConfig, layout: RolloutLayout) -> dict[str, Any]:
    from areal.engine.inference.server_sampler import ServerSetup

    return {
        "server": ServerSetup(
            backend=layout.backend,
            section=_with_lora(config, getattr(config, layout.backend)),
            tensor=layout.tensor,
            pipeline=layout.pipeline,
            addresses=list(layout.addresses),
            token_file=token_file() if layout.addresses else "",
            log_dir=str(get_log_path(config.cluster.fileroot, config.experiment_name, config.trial_name)),
            replicas=layout.replicas,
        )
    }


def _with_lora(config: PPOConfig, section: Any) -> Any:
    """The servers' section, with room for the adapters of a run that sends them."""
    if not config.rollout.use_lora:
        return section
    rank = max(section.max_lora_rank or 1, config.actor.lora_rank)
    if config.rollout.backend.startswith("vllm"):
        rank = next((known for known in _VLLM_RANKS if known >= rank), rank)
    return replace(section, enable_lora=True, max_lora_rank=rank)
