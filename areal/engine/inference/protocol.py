"""What an inference server is to the one remote engine: calls it understands and replies it gives.

A :class:`ServerProtocol` only builds requests and reads replies; connections, retries, deadlines, interruption, routing
and health live in ``remote``. One subclass per kind of server: ``areal.engine.{vllm,sglang,native}_remote``.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from areal.utils.errors import EngineError

if TYPE_CHECKING:
    from areal.api.config.rollout import GenerationHyperparameters
    from areal.api.io_struct import ModelRequest, StopReason
    from areal.engine.core.weight_heads import ServerHeads
    from areal.engine.core.weight_sources import WeightGroup, WeightSource
    from areal.engine.core.weight_sync import ParamRecord


class ReplyError(EngineError, ValueError):
    """A server's reply that cannot be used: garbage, wrong counts, a log-prob that is not finite."""


@dataclass(frozen=True)
class ServerCall:
    """One HTTP call.

    Attributes:
        method, path, body: of the request; ``body`` is sent as JSON, None sends none.
        timeout_s: limit of one attempt; None: ``rollout.request_timeout``.
        once: must not be sent twice (it changes something, or other processes join it).
        harmless: words of a refusal (4xx) that counts as an empty reply; empty: none does.
    """

    method: str
    path: str
    body: dict[str, Any] | None = None
    timeout_s: float | None = None
    once: bool = False
    harmless: str = ""


@dataclass
class GenerationPart:
    """What one reply adds to a request.

    Attributes:
        tokens, logprobs: equally long; log-probs are natural logs at the sampling temperature.
        stop_reason: ``abort`` if the server was told to stop early.
        versions: per token, if the server stamps them; None: all tokens are of the version that served.
    """

    tokens: list[int]
    logprobs: list[float]
    stop_reason: StopReason
    versions: list[int] | None = None


@dataclass(frozen=True)
class Capabilities:
    """What a kind of server can do.

    Attributes:
        keeps_requests: running requests survive a weight update in place.
        weight_modes: of ``shm``, ``xccl``, ``disk``.
        seeds: a request's seed fixes its tokens.
        applies_at_once: :meth:`ServerProtocol.stage` puts the weights in service itself, and there is no way back.
        stamps: every token of a reply bears the version that it was told; one without comes from a server that was
            started again behind our back.
        torch_groups: its ranks build weight groups with torch's helper, see :class:`WeightGroup`.
        named_adapters: it loads adapters under names, which requests carry; else an adapter is a weight version.
        refusals: generation setting -> why it cannot be honoured and which backend can; asked for any value that
            differs from the default.
    """

    keeps_requests: bool
    weight_modes: tuple[str, ...]
    seeds: bool
    refusals: Mapping[str, str] = field(default_factory=dict)
    applies_at_once: bool = False
    torch_groups: bool = False
    stamps: bool = False
    named_adapters: bool = False


class ServerHooks:
    """What a kind of server may add to the contract; the defaults suit one that needs nothing of it.

    Args:
        token: of the servers; None: they want none.
    """

    def __init__(self, token: str | None = None) -> None:
        self.token = token

    def headers(self) -> dict[str, str]:
        """Sent with every call: the bearer token, if there is one."""
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def check(self, gconfig: GenerationHyperparameters) -> None:
        """Refuse values that the server would bend in silence; asked at start-up and before anything is sent.

        Raises:
            InvalidRequestError: names the setting, its value and what is allowed.
        """
        return

    def stamp(self, version: int) -> list[ServerCall]:
        """Have the server stamp ``version`` on the weights that it serves already; empty: it stamps none."""
        return []

    def confirm(self, replies: Sequence[Any]) -> None:
        """Read the replies to :meth:`commit`, :meth:`discard`, :meth:`join_group` or :meth:`leave_group`.

        Raises:
            WeightSyncError: one of them says that it failed.
        """
        return

    def heads(self, shapes: Mapping[str, Sequence[int]]) -> list[ServerCall]:
        """Calls that ask a server that keeps no records what tensors begin with, by name and shape; empty: it does not
        tell. A refusal of any of them means the same.
        """
        return []

    def read_heads(self, names: Sequence[str], replies: Sequence[Any]) -> ServerHeads:
        """Read the replies to the calls of :meth:`heads`, all of which were answered.

        Raises:
            ReplyError: one of them makes no sense.
        """
        raise NotImplementedError

    def load_adapter(self, name: str, path: str) -> list[ServerCall]:
        """Have a server with named adapters offer the one in the directory ``path`` beside those it has; one of this
        name goes first, for servers refuse a name that they know.
        """
        raise NotImplementedError

    def unload_adapter(self, name: str) -> list[ServerCall]:
        """Have it forget one that no request asks for any more; one that it does not know is no error."""
        raise NotImplementedError

    def with_adapter(self, call: ServerCall, name: str) -> ServerCall:
        """A call of :meth:`generate` that asks for an adapter."""
        raise NotImplementedError

    def harmed(self, source: WeightSource, error: BaseException) -> bool:
        """Whether a server may hold a mix of versions after a call of :meth:`stage` failed with ``error``."""
        return False


class ServerProtocol(ServerHooks, abc.ABC):
    """Requests and replies of one kind of server; has no state but what its constructor was given."""

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]
    endpoints: ClassVar[tuple[str, ...]]
    """Paths that must be in the server's ``/openapi.json``; empty: the server is ours."""

    @abc.abstractmethod
    def health(self) -> ServerCall:
        """Answers 200 when the server can serve (also while paused, where the server allows it)."""

    @abc.abstractmethod
    def generate(self, req: ModelRequest, gconfig: GenerationHyperparameters, seed: int | None) -> ServerCall:
        """Continue ``req.input_ids`` under ``gconfig``, whose limits are those that are left."""

    @abc.abstractmethod
    def parse(self, reply: Any) -> GenerationPart:
        """Read the JSON reply to :meth:`generate`.

        Raises:
            ReplyError: names the field that is missing or wrong.
        """

    @abc.abstractmethod
    def abort(self, rid: str) -> ServerCall:
        """End one request early; an unknown one is no error."""

    @abc.abstractmethod
    def pause(self, keep: bool) -> list[ServerCall]:
        """Freeze generation: running requests return with what they have, or stay in place (``keep``)."""

    @abc.abstractmethod
    def resume(self) -> list[ServerCall]:
        """Go on."""

    @abc.abstractmethod
    def join_group(self, group: WeightGroup) -> list[ServerCall]:
        """Join a collective group as ranks ``group.rank ..``; returns only when rank 0 has joined too."""

    @abc.abstractmethod
    def leave_group(self, group: WeightGroup) -> list[ServerCall]:
        """Leave it."""

    @abc.abstractmethod
    def stage(self, source: WeightSource, version: int) -> list[ServerCall]:
        """Bring a version's bytes to the server; in service only after :meth:`commit`, where the server can wait."""

    @abc.abstractmethod
    def records(self, replies: Sequence[Any]) -> list[list[ParamRecord]] | None:
        """What each rank of the server recorded of the tensors it received, from the replies to :meth:`stage`; None
        where the server cannot tell.

        Raises:
            WeightSyncError: a reply says that it failed.
        """

    @abc.abstractmethod
    def commit(self, version: int) -> list[ServerCall]:
        """Switch to the staged weights, clear every cache, and stamp ``version`` on what follows; sent while paused."""

    @abc.abstractmethod
    def discard(self) -> list[ServerCall]:
        """Forget what was staged."""
