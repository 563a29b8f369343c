"""The sampler of a rollout worker whose model runs in inference servers: one of its own, or external ones.

In: a :class:`RolloutSetup` with a :class:`ServerSetup`. Out: a started :class:`RemoteSampler`. A server of its own is
started here, is a child of the worker and ends with the sampler; external servers are checked and left running.
Named by ``RolloutSetup.sampler``, called by ``RolloutWorker``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal.api.config.server_args import model_limit, model_vocabulary, unwritten_fields
from areal.engine.inference.backends import protocol_class
from areal.engine.inference.discovery import find_servers, server_token
from areal.engine.inference.launch import LaunchOrder, RunningServer, launch_server, read_model
from areal.engine.inference.readiness import check_external
from areal.engine.inference.remote import RemoteSampler
from areal.engine.native.requests import Limits
from areal.engine.sglang_remote import SGLangProtocol
from areal.utils.errors import ConfigError

if TYPE_CHECKING:
    from areal.engine.inference.protocol import ServerProtocol
    from areal.engine.inference.rollout_worker import RolloutSetup

_LENGTH_FIELDS = {"native": "max_seq_len", "sglang": "context_length", "vllm": "max_model_len"}
_MARGINS = {"sglang": SGLangProtocol.CONTEXT_MARGIN}
_DEFAULT_LENGTH = 32768


@dataclass
class ServerSetup:
    """The servers of a run; travels to each rollout worker.

    Attributes:
        backend: ``vllm``, ``sglang`` or ``native``.
        section: its config section.
        tensor, pipeline: devices of one server, along each.
        addresses: of all external servers; empty: each worker starts one.
        token_file: with the token that external servers want; empty: they want none.
        log_dir: where logs of servers go.
        replicas: rollout workers; each takes its share of the addresses.
        unwritten: fields of the section that nobody wrote; read from the section, whose marks do not travel.
    """

    backend: str
    section: Any
    tensor: int = 1
    pipeline: int = 1
    addresses: list[str] = field(default_factory=list)
    token_file: str = ""
    log_dir: str = ""
    replicas: int = 1
    unwritten: list[str] | None = None

    def __post_init__(self) -> None:
        if self.unwritten is None:
            self.unwritten = unwritten_fields(self.section)


class OwnServerSampler(RemoteSampler):
    """A sampler whose server ends with it; arguments as :class:`RemoteSampler`, after the server."""

    def __init__(self, server: RunningServer, protocol: ServerProtocol, *args: Any, **kwargs: Any) -> None:
        self.server = server
        super().__init__(protocol, [server.address], *args, watch=server.process.ended, **kwargs)

    def stop(self) -> None:
        """Disconnect, then end the server."""
        try:
            super().stop()
        finally:
            self.server.process.stop()


def server_sampler(setup: RolloutSetup) -> RemoteSampler:
    """The sampler of worker ``setup.index``, started.

    Raises:
        ServerStartError: its server could not be started.
        UnfitServerError, ServerUnavailableError: an external server cannot be used.
        ConfigError: there are fewer external servers than workers, or the file with their token cannot be read.
    """
    from areal.utils.hf_utils import load_hf_tokenizer

    server: ServerSetup = setup.arguments["server"]
    config, protocol = setup.rollout, protocol_class(server.backend)(server_token(server.token_file))
    tokenizer = load_hf_tokenizer(setup.tokenizer_path or setup.model_path)
    limits = sequence_limits(server, setup.model_path, tokenizer)
    options = {"tokenizer": tokenizer, "ranks_per_server": server.tensor * server.pipeline}
    if server.addresses:
        addresses = _share(server, setup.index)
        for address in addresses:
            check_external(address, protocol, config.setup_timeout)
        sampler = RemoteSampler(protocol, addresses, config, limits, **options)
    else:
        running = launch_server(_order(setup, server), protocol)
        try:
            sampler = OwnServerSampler(running, protocol, config, limits, **options)
        except BaseException:
            running.process.stop()
            raise
    try:
        sampler.start()
    except BaseException:
        sampler.stop()
        raise
    return sampler


def sequence_limits(server: ServerSetup, model_path: str, tokenizer: Any) -> Limits:
    """What requests are checked against before they are sent: the model's vocabulary, the server's context."""
    model = read_model(model_path)
    written = getattr(server.section, _LENGTH_FIELDS[server.backend], None)
    lengths = [length for length in (written, model_limit(model)) if length is not None]
    vocabulary = model_vocabulary(model) or len(tokenizer)
    eos = getattr(tokenizer, "eos_token_id", None)
    longest = min(lengths, default=_DEFAULT_LENGTH) - _MARGINS.get(server.backend, 0)
    return Limits(vocabulary, longest, frozenset(() if eos is None else (eos,)))


def _share(server: ServerSetup, index: int) -> list[str]:
    addresses = find_servers(server.addresses)[index :: server.replicas]
    if not addresses:
        raise ConfigError(
            f"{len(server.addresses)} inference servers for {server.replicas} rollout workers: worker {index} has "
            "none; name as many (AREAL_LLM_SERVER_ADDRS) or lower d in rollout.backend"
        )
    return addresses


def _order(setup: RolloutSetup, server: ServerSetup) -> LaunchOrder:
    return LaunchOrder(
        backend=server.backend,
        section=server.section,
        model_path=setup.model_path,
        log_path=Path(server.log_dir or ".") / f"{server.backend}-{setup.index}.log",
        tensor=server.tensor,
        pipeline=server.pipeline,
        dtype=setup.dtype,
        index=setup.index,
        timeout_s=setup.rollout.setup_timeout,
        unwritten=server.unwritten,
    )
