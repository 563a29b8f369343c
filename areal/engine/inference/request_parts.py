"""One request to a server as a series of parts: what is asked for next, and what the replies add up to.

A weight update may cut a request into parts. Each part continues prompt plus output with the budget and stop rules that
are left and a seed of its own. In: a :class:`ModelRequest` and the replies. Out: a :class:`ModelResponse`. Used by
``remote``, one object per request, on the loop of its connections.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from areal.api.config.rollout import GenerationHyperparameters
from areal.api.io_struct import ModelRequest, ModelResponse
from areal.engine.inference.protocol import ReplyError
from areal.engine.native.requests import InvalidRequestError, StopStrings
from areal.utils.seeding import derive_named_seed

if TYPE_CHECKING:
    from areal.api.io_struct import StopReason
    from areal.engine.inference.protocol import GenerationPart, ServerProtocol

_STOP_REASONS = ("length", "stop", "tool_calls", "abort")
_POSITIVE_LOGPROB = 1e-3  # rounding in bf16 may lift a log-prob of 0 a little


class SequenceLimits(Protocol):
    """What a request is checked against before it is sent."""

    @property
    def vocab_size(self) -> int:
        """Ids are below it."""
        ...

    @property
    def max_seq_len(self) -> int:
        """Most tokens of prompt plus output."""
        ...


@dataclass(frozen=True)
class Ask:
    """One part to generate.

    Attributes:
        request: with the prompt of the part; its ``gconfig`` holds what is left.
        seed: of the part; None leaves it to the server.
        short: a slice of what is left, so that it ends soon.
    """

    request: ModelRequest
    seed: int | None
    short: bool


@dataclass
class PartedRequest:
    """A request on its way; make it with :func:`open_request`.

    Attributes:
        request: as the caller gave it.
        budget: most tokens of the output.
        fruitless: aborts in a row that added nothing.
        failures: failed sendings in a row.
    """

    request: ModelRequest
    budget: int
    stop_text: StopStrings | None
    seeds: bool
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    stop_reason: StopReason = "abort"
    fruitless: int = 0
    failures: int = 0
    submitted: float = field(default_factory=time.monotonic)
    first_token: float = float("inf")

    @property
    def starts_over(self) -> bool:
        """Whether an aborted part is thrown away: servers count occurrences in what they generated themselves."""
        return self.request.gconfig.frequency_penalty != 0

    @property
    def left(self) -> int:
        """Tokens that may still be generated."""
        return self.budget - len(self.output)

    def ask(self, rid: str, slice_tokens: int | None) -> Ask:
        """The next part, under the wire id ``rid``.

        Args:
            slice_tokens: ask for at most so many.
        """
        done = len(self.output)
        short = slice_tokens is not None and slice_tokens < self.left and not self.starts_over
        most = slice_tokens if short and slice_tokens is not None else self.left
        least = min(max(0, self.request.gconfig.min_new_tokens - done), most)
        part = self.request.copy()
        part.rid = rid
        part.input_ids = part.input_ids + self.output
        part.gconfig = part.gconfig.new(
            max_new_tokens=most, min_new_tokens=least, max_tokens=len(part.input_ids) + most, n_samples=1
        )
        part.seed = self._seed(done)
        return Ask(part, part.seed, short)

    def take(self, ask: Ask, reply: GenerationPart, version: int) -> bool:
        """Add a reply that :func:`check_reply` has passed; True when the request is complete.

        Args:
            version: of the weights when the part was sent, for servers that stamp none.
        """
        self.failures = 0
        count = len(reply.tokens)
        aborted = reply.stop_reason == "abort" and count < self.left
        if aborted and (count == 0 or self.starts_over):
            self.lost()
            return False
        self.fruitless = 0
        if not self.output:
            self.first_token = time.monotonic()
        kept = self._until_stop_string(reply.tokens)
        self.output += reply.tokens[: kept or count]
        self.logprobs += reply.logprobs[: kept or count]
        self.versions += (reply.versions or [version] * count)[: kept or count]
        if kept is not None:
            self.stop_reason = "stop"
            return True
        self.stop_reason = "length" if reply.stop_reason == "abort" else reply.stop_reason
        if aborted:
            return False
        asked = ask.request.gconfig.max_new_tokens
        return not (ask.short and reply.stop_reason == "length" and count == asked)

    def lost(self) -> None:
        """A part came back without anything that can be kept."""
        self.fruitless += 1

    def respond(self) -> ModelResponse:
        """The reply to the caller."""
        request = self.request
        return ModelResponse(
            input_tokens=list(request.input_ids),
            output_tokens=self.output,
            output_logprobs=self.logprobs,
            output_versions=self.versions,
            stop_reason=self.stop_reason,
            tokenizer=request.tokenizer,
            processor=request.processor,
            latency=time.monotonic() - self.submitted,
            ttft=self.first_token - self.submitted,
        )

    def _seed(self, done: int) -> int | None:
        seed = self.request.seed
        if seed is None or not self.seeds or done == 0:
            return seed if self.seeds else None
        return derive_named_seed(seed, "part", done)

    def _until_stop_string(self, tokens: Sequence[int]) -> int | None:
        """How many of ``tokens`` there are up to the end of the first stop string.

        Servers see the text of one part only, and differ in where they begin to look.
        """
        if self.stop_text is None:
            return None
        seen = list(self.output)
        for count, token in enumerate(tokens, 1):
            seen.append(token)
            if self.stop_text.hit(seen, self.request.gconfig.min_new_tokens):
                return count
        return None


def open_request(
    request: ModelRequest, limits: SequenceLimits, protocol: ServerProtocol, tokenizer: Any
) -> PartedRequest:
    """Check a request before anything is sent.

    Args:
        limits: of the model; ids outside the vocabulary kill some servers.
        tokenizer: used when the request names none; only stop strings need one.
    Raises:
        InvalidRequestError: naming the field, its value and what is allowed.
    """
    backend = protocol.name
    settings, ids = request.gconfig, request.input_ids
    if settings.n_samples != 1:
        raise InvalidRequestError(f"gconfig.n_samples={settings.n_samples}: one request is one sample; send several")
    if request.image_data or request.vision_msg_vllm:
        raise InvalidRequestError(f"image_data: the backend {backend} is used with text models only")
    check_settings(settings, protocol)
    if not ids:
        raise InvalidRequestError("input_ids is empty: a request needs at least one token")
    if min(ids) < 0 or max(ids) >= limits.vocab_size:
        wrong = next(i for i in ids if not 0 <= i < limits.vocab_size)
        raise InvalidRequestError(f"input_ids holds {wrong}: token ids are 0..{limits.vocab_size - 1}")
    budget = min(settings.max_new_tokens, settings.max_tokens - len(ids), limits.max_seq_len - len(ids))
    if budget <= 0:
        raise InvalidRequestError(
            f"nothing can be generated: the prompt has {len(ids)} tokens, max_new_tokens={settings.max_new_tokens}, "
            f"max_tokens={settings.max_tokens}, and prompt plus output may have {limits.max_seq_len} (context of the "
            f"{backend} server)"
        )
    stop_text = None
    if settings.stop:
        tokenizer = request.tokenizer if request.tokenizer is not None else tokenizer
        if tokenizer is None:
            raise InvalidRequestError("gconfig.stop needs a tokenizer: set ModelRequest.tokenizer or the engine's")
        if not all(settings.stop):
            raise InvalidRequestError("gconfig.stop holds an empty string")
        stop_text = StopStrings(list(settings.stop), tokenizer)
    return PartedRequest(request, budget, stop_text, protocol.capabilities.seeds)


def check_settings(settings: GenerationHyperparameters, protocol: ServerProtocol) -> None:
    """Refuse what a backend cannot honour; at start-up, and again for every request.

    Raises:
        InvalidRequestError: names each setting, its value, and the backend that can.
    """
    values = dataclasses.asdict(settings)
    usual = dataclasses.asdict(GenerationHyperparameters())
    refused = [
        f"gconfig.{name}={values[name]}: {why}"
        for name, why in protocol.capabilities.refusals.items()
        if values[name] != usual[name]
    ]
    if refused:
        raise InvalidRequestError("; ".join(refused))
    protocol.check(settings)


def check_reply(reply: GenerationPart, ask: Ask, vocab_size: int, where: str) -> None:
    """Refuse a reply that would spoil training.

    Raises:
        ReplyError: naming the server, what it sent and what is allowed.
    """
    tokens, logprobs = reply.tokens, reply.logprobs
    asked = ask.request.gconfig.max_new_tokens
    if reply.stop_reason not in _STOP_REASONS:
        raise ReplyError(f"{where}: stop reason {reply.stop_reason!r} is none of {', '.join(_STOP_REASONS)}")
    if len(tokens) != len(logprobs):
        raise ReplyError(f"{where}: {len(tokens)} tokens but {len(logprobs)} log-probs")
    if reply.versions is not None and len(reply.versions) != len(tokens):
        raise ReplyError(f"{where}: {len(tokens)} tokens but versions for {len(reply.versions)}")
    if len(tokens) > asked:
        raise ReplyError(f"{where}: {len(tokens)} tokens, {asked} were asked for")
    if not tokens and reply.stop_reason != "abort":
        raise ReplyError(f"{where}: no token, yet the stop reason is {reply.stop_reason!r}")
    for token in tokens:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ReplyError(f"{where}: token {token!r} is not in the vocabulary (0..{vocab_size - 1})")
    for position, logprob in enumerate(logprobs):
        if not _is_logprob(logprob):
            raise ReplyError(f"{where}: log-prob {logprob!r} of token {position}; it must be finite and at most 0")


def _is_logprob(value: Any) -> bool:
    return isinstance(value, float | int) and math.isfinite(value) and value <= _POSITIVE_LOGPROB
