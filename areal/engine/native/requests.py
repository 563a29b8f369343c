"""What one generation request is inside the native engine, and the checks it passes on the way in.

:func:`build_sequence` turns a :class:`ModelRequest` into a :class:`Sequence`, which the scheduler advances and
:meth:`Sequence.respond` turns into a :class:`ModelResponse`. Called by ``engine`` (on the caller's thread) and
``scheduler``.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from areal.api.io_struct import ModelRequest, ModelResponse
from areal.engine.native.sampling import SamplingParams
from areal.utils.errors import ArealError

if TYPE_CHECKING:
    from areal.api.io_struct import StopReason


class InvalidRequestError(ArealError, ValueError):
    """A request that the engine cannot serve; the message names the field."""


@dataclass(frozen=True)
class Limits:
    """What a request is checked against."""

    vocab_size: int
    max_seq_len: int
    eos_ids: frozenset[int]


@dataclass(eq=False, slots=True)
class Sequence:
    """One live request. ``tokens`` is prompt plus output; the first ``kv_len`` of them are in the cache at ``slot``."""

    request: ModelRequest
    future: Future[ModelResponse]
    prompt: tuple[int, ...]
    tokens: list[int]
    max_len: int
    params: SamplingParams
    stop_ids: frozenset[int]
    stop_text: StopStrings | None
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    slot: int = -1
    kv_len: int = 0
    arrival: int = 0
    abort: bool = False
    submitted: float = field(default_factory=time.monotonic)
    first_token: float = float("inf")

    @property
    def ready(self) -> bool:
        """Whether everything but the newest drawn token is in the cache."""
        return self.kv_len == len(self.tokens) - 1

    def take(self, tokens: Iterable[int], logprobs: Iterable[float], versions: Iterable[int]) -> bool:
        """Take drawn tokens, at least one; True when the last of them ends the request (none before it may)."""
        self.output += tokens
        self.logprobs += logprobs
        self.versions += versions
        self.tokens += self.output[len(self.tokens) - len(self.prompt) :]
        if self.output[-1] in self.stop_ids or len(self.tokens) >= self.max_len:
            return True
        return self.stop_text is not None and self.stop_text.hit(self.output, self.params.min_new_tokens)

    def stop_reason(self) -> StopReason:
        """Why a request that :meth:`take` ended has ended."""
        if self.output[-1] in self.stop_ids:
            return "stop"
        if self.stop_text is not None and self.stop_text.hit(self.output, self.params.min_new_tokens):
            return "stop"
        return "length"

    def respond(self, reason: StopReason) -> ModelResponse:
        """The reply, with what was drawn so far."""
        request = self.request
        now = time.monotonic()
        return ModelResponse(
            input_tokens=list(self.prompt),
            output_tokens=self.output,
            output_logprobs=self.logprobs,
            output_versions=self.versions,
            stop_reason=reason,
            tokenizer=request.tokenizer,
            processor=request.processor,
            latency=now - self.submitted,
            ttft=self.first_token - self.submitted,
        )


class StopStrings:
    """Looks for stop strings in the text of what was drawn, decoding only its tail.

    A token may hold part of a character, so each look decodes the last tokens again, from a point where the text was
    whole.
    """

    def __init__(self, strings: list[str], tokenizer: Any) -> None:
        self.strings = strings
        self._tokenizer = tokenizer
        self._longest = max(len(s) for s in strings)
        self._anchor = 0  # tokens before it are not decoded any more, except as context
        self._seen = 0
        self._text = ""
        self._found = False

    def hit(self, output: list[int], min_new_tokens: int = 0) -> bool:
        """Whether the text of ``output`` holds a stop string that ends after ``min_new_tokens`` tokens."""
        if self._found or len(output) == self._seen:
            return self._found
        self._seen = len(output)
        context = self._decode(output[max(0, self._anchor - 4) : self._anchor])
        fresh = self._decode(output[max(0, self._anchor - 4) :])[len(context) :]
        if len(output) >= max(1, min_new_tokens):
            window = self._text + fresh
            known = len(self._text)  # searched before: a match must end in what is new
            self._found = any(window.find(s, max(0, known - len(s) + 1)) >= 0 for s in self.strings)
        if not fresh.endswith("\ufffd"):  # whole characters: keep only what a stop string could still begin in
            self._text = (self._text + fresh)[-(self._longest - 1) :] if self._longest > 1 else ""
            self._anchor = len(output)
        return self._found

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""


def build_sequence(request: ModelRequest, limits: Limits, tokenizer: Any) -> Sequence:
    """Check a request and resolve its settings.

    Args:
        request: kept by reference, not changed.
        limits: of the model and the engine.
        tokenizer: used when the request names none; only stop strings need one.
    Raises:
        InvalidRequestError: naming the field, its value and what is allowed.
    """
    settings = request.gconfig
    ids = request.input_ids
    _check_supported(request)
    if not ids:
        raise InvalidRequestError("input_ids is empty: a request needs at least one token")
    if min(ids) < 0 or max(ids) >= limits.vocab_size:
        wrong = next(i for i in ids if not 0 <= i < limits.vocab_size)
        raise InvalidRequestError(f"input_ids holds {wrong}: token ids are 0..{limits.vocab_size - 1}")
    if len(ids) >= limits.max_seq_len:
        raise InvalidRequestError(
            f"input_ids has {len(ids)} tokens: prompt and output together may have {limits.max_seq_len} "
            "(native.max_seq_len)"
        )
    new_tokens = min(settings.max_new_tokens, settings.max_tokens - len(ids), limits.max_seq_len - len(ids))
    if new_tokens <= 0:
        raise InvalidRequestError(
            f"nothing to generate: max_new_tokens={settings.max_new_tokens}, max_tokens={settings.max_tokens}, "
            f"prompt of {len(ids)} tokens"
        )
    stop_ids: frozenset[int] = frozenset()
    if not settings.ignore_eos:  # as in SGLang: with ignore_eos no stop id ends the text, stop strings still do
        stop_ids = frozenset(settings.stop_token_ids) | limits.eos_ids
    tokenizer = request.tokenizer if request.tokenizer is not None else tokenizer
    stop_text = None
    if settings.stop:
        if tokenizer is None:
            raise InvalidRequestError("gconfig.stop needs a tokenizer: set ModelRequest.tokenizer or the engine's")
        strings = list(settings.stop)
        if not all(strings):
            raise InvalidRequestError("gconfig.stop holds an empty string")
        stop_text = StopStrings(strings, tokenizer)
    future: Future[ModelResponse] = Future()
    future.set_running_or_notify_cancel()  # only abort ends a request; a cancelled future could not take its reply
    return Sequence(
        request=request,
        future=future,
        prompt=tuple(ids),
        tokens=list(ids),
        max_len=len(ids) + new_tokens,
        params=_sampling_params(request, limits, stop_ids),
        stop_ids=stop_ids,
        stop_text=stop_text,
    )


def _check_supported(request: ModelRequest) -> None:
    settings = request.gconfig
    if settings.n_samples != 1:
        raise InvalidRequestError(f"gconfig.n_samples={settings.n_samples}: one request is one sample; send several")
    if settings.use_beam_search:
        raise InvalidRequestError("gconfig.use_beam_search: the native engine samples, it has no beam search")
    if request.image_data or request.vision_msg_vllm:
        raise InvalidRequestError("image_data: the native engine runs text models only")


def _sampling_params(request: ModelRequest, limits: Limits, stop_ids: frozenset[int]) -> SamplingParams:
    settings = request.gconfig
    if settings.temperature < 0:
        raise InvalidRequestError(f"gconfig.temperature={settings.temperature} must be >= 0")
    if not 0 < settings.top_p <= 1:
        raise InvalidRequestError(f"gconfig.top_p={settings.top_p} must be in (0, 1]")
    if settings.top_k == 0 or settings.top_k < -1:
        raise InvalidRequestError(f"gconfig.top_k={settings.top_k} must be >= 1, or -1 for off")
    off = settings.top_k == -1 or settings.top_k >= limits.vocab_size
    banned = tuple(sorted(i for i in stop_ids if 0 <= i < limits.vocab_size))
    if settings.min_new_tokens > 0 and len(banned) == limits.vocab_size:
        raise InvalidRequestError("gconfig.min_new_tokens: every token is a stop token")
    return SamplingParams(
        seed=secrets.randbits(63) if request.seed is None else request.seed,
        greedy=settings.greedy or settings.temperature == 0,
        temperature=settings.temperature or 1.0,
        top_p=settings.top_p,
        top_k=0 if off else settings.top_k,
        frequency_penalty=settings.frequency_penalty,
        min_new_tokens=settings.min_new_tokens,
        banned=banned,
    )
