"""The inference engine over servers, as workflows and 1.x scripts see it: a sampler plus a rollout executor.

    initialize: addresses given, else own servers, else registered ones, else AREAL_LLM_SERVER_ADDRS

Weight updates return futures and run one after the other on a thread of their own: pause, bring the weights, switch,
resume. Given to workflows as ``engine``; subclassed per kind of server in ``areal.engine.{vllm,sglang,native}_remote``.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from areal.api.alloc_mode import ModelAllocation
from areal.api.engine_api import RemoteWeightUpdate
from areal.api.io_struct import LocalInfServerInfo
from areal.engine.core.weight_sources import DiskSource, WeightGroup, XcclSource
from areal.engine.inference.backends import protocol_class
from areal.engine.inference.discovery import find_servers, server_token
from areal.engine.inference.episode_sampler import EpisodeSampler
from areal.engine.inference.readiness import check_external
from areal.engine.inference.remote import RemoteSampler
from areal.infra.rollout.executor import WorkflowExecutor
from areal.infra.rollout.facade import ExecutorFacade
from areal.utils import logging
from areal.utils.errors import ConfigError, EngineError, WeightSyncError

if TYPE_CHECKING:
    from areal.api.cli_args import InferenceEngineConfig
    from areal.api.io_struct import ModelRequest, ModelResponse, ParamSpec, WeightUpdateMeta
    from areal.engine.core.weight_sources import WeightSource
    from areal.engine.core.weight_sync import Received
    from areal.engine.inference.launch import LaunchOrder, RunningServer
    from areal.engine.inference.protocol import ServerProtocol
    from areal.engine.inference.request_parts import SequenceLimits

logger = logging.getLogger("RemoteInfEngine")

_POLL_S = 0.1
_FIRST_GROUP = "update_weight_group"


class RemoteInfEngine(ExecutorFacade, RemoteWeightUpdate):
    """Runs episodes against inference servers.

    Args:
        config: section ``rollout``.
        backend: protocol of the servers, or the name of their kind; None: the kind in ``config.backend``.
        limits: vocabulary and context; None reads them from ``config.tokenizer_path`` (a model directory).
        tokenizer: for stop strings and dumps; None loads ``config.tokenizer_path``, if that is set.
        run_seed: seed of the run.
        is_eval: evaluation: no staleness bound.
    """

    backend_name: ClassVar[str] = "native"
    """Kind of server of an engine that is made without a config."""

    def __init__(  # noqa: PLR0913 - the pieces it joins
        self,
        config: InferenceEngineConfig,
        backend: ServerProtocol | str | None = None,
        *,
        limits: SequenceLimits | None = None,
        tokenizer: Any = None,
        run_seed: int = 1,
        is_eval: bool = False,
    ) -> None:
        if backend is None or isinstance(backend, str):
            backend = protocol_class(backend or config.backend.partition(":")[0])(server_token())
        self.config, self.protocol = config, backend
        if tokenizer is None and config.tokenizer_path:
            from areal.utils.hf_utils import load_hf_tokenizer

            tokenizer = load_hf_tokenizer(config.tokenizer_path)
        self._limits, self._tokenizer = limits, tokenizer
        self._sampler: RemoteSampler | None = None
        self._servers: list[RunningServer] = []
        self._launched: LaunchOrder | None = None
        self._group: WeightGroup | None = None
        self._ending = threading.Event()
        self._updates = ThreadPoolExecutor(1, thread_name_prefix="weight-update")
        self.executor = WorkflowExecutor(
            config, self, run_seed=run_seed, tokenizer=tokenizer, is_eval=is_eval, dump_dir=config.dump_dir
        )

    # -- life ----------------------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(
        cls,
        tokenizer_path: str | None = None,
        dp_size: int = 1,
        max_concurrent_rollouts: int | None = None,
        **settings: Any,
    ) -> Self:
        """An engine without a config file.

        Args:
            tokenizer_path: directory of the model.
            dp_size: servers.
            max_concurrent_rollouts: episodes in flight.
            settings: further fields of the ``rollout`` section.
        """
        from areal.api.config.rollout import InferenceEngineConfig

        settings.setdefault("backend", f"{cls.backend_name}:d{dp_size}")
        config = InferenceEngineConfig(
            tokenizer_path=tokenizer_path or "", max_concurrent_rollouts=max_concurrent_rollouts, **settings
        )
        return cls(config)

    @property
    def initialized(self) -> bool:
        """Whether it is connected."""
        return self._sampler is not None

    @property
    def sampler(self) -> RemoteSampler:
        """The client of the servers.

        Raises:
            EngineError: before ``initialize``.
        """
        if self._sampler is None:
            raise EngineError(f"{type(self).__name__} is not connected: call initialize() first")
        return self._sampler

    @property
    def workflow_executor(self) -> WorkflowExecutor:
        """What runs the episodes."""
        return self.executor

    def initialize(
        self,
        engine_id: str | None = None,
        addr: str | Sequence[str] | None = None,
        train_data_parallel_size: int | None = None,
    ) -> None:
        """Connect to the servers and start the rollout thread.

        Args:
            engine_id: for 1.x; not used.
            addr: ``host:port`` of one or several servers that somebody else runs.
            train_data_parallel_size: for 1.x; limits are global.
        Raises:
            EngineError: there are no servers, or one cannot be used (naming the setting that gives it more time).
        """
        if self._sampler is not None:
            return
        own = [server.address for server in self._servers]
        addresses = own
        if addr or not own:
            addresses = find_servers(addr, self.config.experiment_name, self.config.trial_name)
            for address in addresses:
                check_external(address, self.protocol, self.config.setup_timeout)
        if not addresses:
            raise EngineError(
                "no inference server: give initialize() an address, call launch_server(), or set AREAL_LLM_SERVER_ADDRS"
            )
        order = self._launched if addresses is own else None
        sampler = RemoteSampler(
            self.protocol,
            addresses,
            self.config,
            self._limits or self._read_limits(),
            tokenizer=self._tokenizer,
            watch=self._ended if addresses is own else None,
            ranks_per_server=order.tensor * order.pipeline if order is not None else ranks_of(self.config.backend),
        )
        sampler.on_failure = self.executor.lost_groups.fail  # nobody starts these servers again
        sampler.start()
        self._sampler = sampler
        self.executor.initialize(train_data_parallel_size)

    def launch_server(self, server_args: LaunchOrder) -> LocalInfServerInfo:
        """Start a server as a child of this process; returns when it serves. ``initialize`` connects to it.

        Args:
            server_args: what it is to be.
        Raises:
            ServerStartError: with the end of its log.
        """
        from areal.engine.inference.launch import launch_server
        from areal.utils.network import split_hostport

        running = launch_server(server_args, self.protocol)
        self._servers.append(running)
        self._launched = server_args
        host, port = split_hostport(running.address)
        return LocalInfServerInfo(host, port)

    def teardown_server(self) -> None:
        """Stop the servers that were started here; safe to call twice."""
        servers, self._servers = self._servers, []
        for server in servers:
            server.process.stop()

    def destroy(self) -> None:
        """Stop the rollout thread, disconnect, stop own servers; safe to call twice."""
        self._ending.set()
        self.executor.destroy()
        if self._sampler is not None:
            self._sampler.stop()
        self._updates.shutdown(wait=False, cancel_futures=True)
        self.teardown_server()

    def _read_limits(self) -> SequenceLimits:
        order = self._launched
        section, path = (None, "") if order is None else (order.section, order.model_path)
        return read_limits(self.protocol.name, section, path or self.config.tokenizer_path, self._tokenizer)

    def _ended(self) -> str | None:
        """How one of the own servers ended."""
        return next((how for server in self._servers if (how := server.process.ended()) is not None), None)

    # -- generation ----------------------------------------------------------------------------------------------------

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """One continuation; seed and admission order come from the running episode unless the request names them."""
        return await EpisodeSampler(self.sampler).agenerate(req)

    def pause_generation(self) -> None:
        self.sampler.pause()

    def continue_generation(self) -> None:
        self.sampler.resume()

    def set_version(self, version: int) -> None:
        """Count staleness from ``version``, and have the servers stamp it."""
        if self._sampler is not None:
            self._sampler.set_version(version)
        self.executor.set_version(version)

    # -- weights -------------------------------------------------------------------------------------------------------

    def update_weights_from_disk(
        self, meta: WeightUpdateMeta, check: Callable[[Received], None] | None = None
    ) -> Future[Received]:
        """Load the Hugging Face directory ``meta.path``; it may still have to appear (it must do so complete).

        The future has what the servers tell of it, and fails with WeightSyncError when the old version serves on.

        Args:
            check: raises WeightSyncError if what the servers tell is wrong; asked before the version is in service,
                where the servers can wait.
        """
        if meta.path is None:
            raise ConfigError("update_weights_from_disk: meta.path is None; it names a Hugging Face directory")
        return self._updates.submit(
            self._update,
            meta,
            lambda version: disk_source(meta, version, self.config.setup_timeout, self._ending),
            check,
        )

    def init_weights_update_group(self, meta: WeightUpdateMeta, rank_ids: Sequence[int] | None = None) -> Future[None]:
        """Join the collective group of ``meta``, as the ranks from ``rank_ids[0]`` on (default 1)."""
        host, port = meta.nccl_master_address, meta.nccl_master_port
        if host is None or port is None:
            raise ConfigError("init_weights_update_group: meta needs nccl_master_address and nccl_master_port")
        import torch

        sampler, first = self.sampler, min(rank_ids) if rank_ids else 1
        group = WeightGroup(
            meta.nccl_group_name or _FIRST_GROUP,
            host,
            port,
            world_size=first + sampler.group_ranks,
            rank=first,
            backend="nccl" if torch.cuda.is_available() else "gloo",
            torch_helper=self.protocol.capabilities.torch_groups,
            timeout_s=meta.timeout_s or self.config.request_timeout,
        )

        def join() -> None:
            sampler.join_group(group)
            self._group = group

        return self._updates.submit(join)

    def update_weights_from_distributed(
        self,
        meta: WeightUpdateMeta,
        param_specs: list[ParamSpec],
        check: Callable[[Received], None] | None = None,
    ) -> Future[Received]:
        """Receive a version that rank 0 of the group broadcasts; the future as that of ``update_weights_from_disk``.

        A group in which that failed was left: join another one.

        Args:
            meta: ``weight_chunked_mem_mb`` cuts the tensors into buckets, here and at the sender.
            param_specs: every tensor of the version, in the order of sending.
            check: as in ``update_weights_from_disk``.
        """
        from areal.engine.core.weight_wire import make_buckets

        buckets = make_buckets(param_specs, meta.weight_chunked_mem_mb << 20)

        def source(version: int) -> WeightSource:
            if self._group is None:
                raise WeightSyncError("the servers are in no weight group: call init_weights_update_group() first")
            return XcclSource(version, self._group, buckets)

        return self._updates.submit(self._update, meta, source, check)

    def _update(
        self,
        meta: WeightUpdateMeta,
        source: Callable[[int], WeightSource],
        check: Callable[[Received], None] | None,
    ) -> Received:
        """Bring a version into service; on the updates' thread, hence one at a time."""
        sampler = self.sampler
        version = sampler.get_version() + 1 if meta.version is None else meta.version
        found = source(version)
        sampler.pause()
        try:
            try:
                received = sampler.stage_source(found, version)
                if check is not None:
                    check(received)
            except WeightSyncError:
                self._leave(found)
                sampler.discard_weights()
                raise
            sampler.commit_weights(version)
        finally:
            sampler.resume()
        if isinstance(found, DiskSource) and meta.clear_checkpoint_after_load:
            shutil.rmtree(found.path, ignore_errors=True)
        return received

    def _leave(self, source: WeightSource) -> None:
        """Leave the group of a broadcast that failed: it is of no use any more, and its sender may still wait in it."""
        if isinstance(source, XcclSource) and self._group is not None:
            group, self._group = self._group, None
            try:
                self.sampler.leave_group(group)
            except EngineError as exc:
                logger.debug(f"weight group {group.name} was gone already: {exc}")


def ranks_of(backend: str) -> int:
    """Ranks that one server of an allocation (``vllm:d2t4``) takes in a weight group.

    Raises:
        ConfigError: it is no allocation of one component.
    """
    parallel = ModelAllocation.from_str(backend, name="rollout").parallel
    return parallel.tp_size * parallel.pp_size


def disk_source(meta: WeightUpdateMeta, version: int, limit_s: float, ending: threading.Event) -> DiskSource:
    """The directory of ``meta``, once it is there.

    Args:
        ending: ends the wait when it is set.
    Raises:
        WeightSyncError: it is not within the limit (``rollout.setup_timeout``), or ``ending`` was set.
    """
    path = Path(str(meta.path))
    deadline = time.monotonic() + limit_s
    while not path.is_dir():
        if time.monotonic() > deadline:
            raise WeightSyncError(
                f"weights v{version}: {path} is not there after {limit_s:g} s (rollout.setup_timeout); the old version "
                "serves on"
            )
        if ending.wait(_POLL_S):
            raise WeightSyncError(f"weights v{version}: the engine was destroyed before {path} was there")
    return DiskSource(version, str(path), timeout_s=meta.timeout_s)


def read_limits(backend: str, section: Any, model_path: str, tokenizer: Any) -> SequenceLimits:
    """Vocabulary and context of servers of the model in a directory.

    Args:
        backend: kind of server.
        section: its config section; None if it is not known.
    Raises:
        ConfigError: neither the model's ``config.json`` nor a tokenizer tells the vocabulary.
    """
    from areal.api.config.server_args import model_vocabulary
    from areal.engine.inference.launch import read_model
    from areal.engine.inference.server_sampler import ServerSetup, sequence_limits

    if tokenizer is None and not (model_path and model_vocabulary(read_model(model_path))):
        raise ConfigError(
            "the vocabulary of the servers' model is not known: set rollout.tokenizer_path to its directory, or give "
            "the engine limits= or a tokenizer"
        )
    return sequence_limits(ServerSetup(backend, section, unwritten=[]), model_path, tokenizer)
