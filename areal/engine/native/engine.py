"""The embedded inference engine: the calls that other threads make.

Callers submit :class:`ModelRequest` objects from any thread or event loop and get :class:`ModelResponse` futures; a
worker thread (``worker``) computes them.

Weights are double-buffered. :meth:`NativeEngine.stage_weights` copies into the spare buffer on the caller's thread
while decoding goes on; :meth:`NativeEngine.commit_weights` has the worker exchange the buffers between two steps,
paused or not. Requests in flight go on under the new version; each of their tokens carries the version that drew it.

A version may also be an adapter of the weights in service (``adapter``): then the buffers are not exchanged.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from areal.api.config.inference import NativeConfig
from areal.engine.core.hf_checkpoint import HfDirectory
from areal.engine.core.weight_receiver import SourceReceiver
from areal.engine.core.weight_sync import ParamRecord
from areal.engine.native.adapter import is_adapter_name, read_adapter
from areal.engine.native.kv_cache import SlotCache
from areal.engine.native.model import CausalLM
from areal.engine.native.products import LowRank, Product
from areal.engine.native.requests import Limits, build_sequence
from areal.engine.native.scheduler import NativeStats, Scheduler
from areal.engine.native.weights import ModelSpec, Weights, adapt
from areal.engine.native.worker import Worker
from areal.utils import logging
from areal.utils.errors import EngineError, WeightSyncError
from areal.utils.threads import release_thread_pool

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from areal.api.io_struct import ModelRequest, ModelResponse

logger = logging.getLogger("NativeEngine")

_LONGEST_DEFAULT = 4096  # tokens of a sequence when native.max_seq_len is null


class NativeEngine(SourceReceiver):
    """Continuous batching over one model on one device.

    Args:
        config: limits and budgets (``native`` section).
        model: Hugging Face directory or model; its weights are copied.
        tokenizer: used for stop strings of requests that bring none, and for its eos id.
        dtype: overrides ``config.dtype``; default: the model's.
        device: default: the GPU if there is one, else the CPU.

    Attributes:
        on_failure: told once, on the worker thread, when that thread has failed; must not block. Who sets it late
            looks at ``failure`` too.
    """

    def __init__(
        self,
        config: NativeConfig,
        model: str | os.PathLike[str] | PreTrainedModel,
        *,
        tokenizer: Any = None,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        hf_config, pairs, own_dtype, generation = _open_model(model)
        spec = ModelSpec.from_hf_config(hf_config)
        dtype = _resolve_dtype(dtype or config.dtype or own_dtype)
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        longest = min(config.max_seq_len or _LONGEST_DEFAULT, spec.max_positions)
        self.config, self.spec, self.dtype, self.device, self.tokenizer = config, spec, dtype, device, tokenizer
        self._limits = Limits(spec.vocab_size, longest, _eos_ids(hf_config, generation, tokenizer))
        self._stats = NativeStats()
        with torch.inference_mode():
            weights = Weights(spec, dtype, device)
            self._spare = Weights(spec, dtype, device, twin=weights)
            self.keeps_sources = weights.packs  # a large matrix is brought into its layout before the first step
            weights.load_all(pairs)
            cache = SlotCache(spec, dtype, device, max_slots=config.max_running_requests, max_capacity=longest)
            lm = CausalLM(spec, longest, device, dtype)
            self._scheduler = Scheduler(config, lm, weights, cache, self._stats)
        self.on_failure: Callable[[BaseException], None] | None = None
        self._worker = Worker(
            self._scheduler,
            config.num_threads,
            lambda error: None if self.on_failure is None else self.on_failure(error),
        )
        self._staging = threading.RLock()
        self._staged: int | None = None  # version in the spare buffer, complete but not committed
        self._adapter: list[tuple[Product, LowRank]] | None = None  # the staged version, where it is an adapter

    def start(self) -> None:
        """Start the worker thread; does nothing if it runs. The caller's idle OpenMP team makes room for its own."""
        if self.device.type == "cpu":
            release_thread_pool()
        self._worker.start()

    def stop(self) -> None:
        """Stop and join the worker; pending requests resolve as aborted with what they have. Idempotent."""
        self._worker.stop()

    def submit(self, req: ModelRequest) -> Future[ModelResponse]:
        """Queue a request.

        Raises:
            InvalidRequestError: something about the request cannot be served, or its rid is live already.
            EngineStoppedError: the engine does not run.
        """
        self._worker.check_alive()
        sequence = build_sequence(req, self._limits, self.tokenizer)
        self._worker.submit(sequence)
        return sequence.future

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Submit and wait without blocking the event loop; cancelling the task aborts the request."""
        future = self.submit(req)
        try:
            return await asyncio.shield(asyncio.wrap_future(future))
        except asyncio.CancelledError:
            self.abort(req.rid)
            raise

    def abort(self, rid: str | None = None) -> None:
        """End one request (None: all) with the tokens it has; an unknown rid is no error. Returns at once."""
        self._worker.abort(rid)

    def pause(self) -> None:
        """Freeze between two steps; returns when frozen. Pauses nest: each needs its own resume."""
        self._worker.pause()

    def resume(self) -> None:
        """Undo one pause."""
        self._worker.resume()

    def hold_admission(self) -> None:
        """Queue requests without admitting them; running ones go on."""
        self._worker.call(setattr, self._scheduler, "admission_held", True)

    def release_admission(self) -> None:
        """Admit what is queued, in order of (``order``, arrival)."""
        self._worker.call(setattr, self._scheduler, "admission_held", False)

    def receive_weights(self, pairs: Iterable[tuple[str, Tensor]], version: int) -> list[ParamRecord]:
        """Stage and commit in one call; returns when the new weights are in place. Concurrent calls take turns."""
        with self._staging:
            records = self.stage_weights(pairs, version)
            self.commit_weights(version)
        return records

    def stage_weights(
        self, pairs: Iterable[tuple[str, Tensor]], version: int, lasting: bool = False
    ) -> list[ParamRecord]:
        """Copy a complete set of weights into the spare buffer while decoding goes on.

        Args:
            pairs: (checkpoint name, full tensor), any dtype, any order; a tied head may be left out. Or an adapter of
                the weights that are in service, which stay as they are.
            version: their version.
            lasting: the tensors stay as they are until the next call: some of the work is left for the first step.
        Returns: what was received, one record per pair.
        Raises:
            WeightSyncError: a name is unknown, a shape is wrong, or weights are missing; the current ones serve on.
        """
        with self._staging, torch.inference_mode():
            self._worker.check_alive()
            self._staged, self._adapter = None, None
            self._worker.call(self._scheduler.weights.settle)
            first, pairs = _first_name(pairs)
            if is_adapter_name(first):
                self._adapter, records = read_adapter(self._scheduler.weights, pairs)
            else:
                records = self._spare.load_all(pairs, torch.get_num_threads(), lasting)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self._staged = version
        return records

    def commit_weights(self, version: int) -> None:
        """Switch to the staged weights between two steps, even while paused; returns when it is done."""
        with self._staging:
            if self._staged != version:
                raise WeightSyncError(f"version {version} is not staged (staged: {self._staged})")
            self._worker.call(self._exchange, version)
            self._staged = None

    def discard_weights(self) -> None:
        """Forget what was staged."""
        with self._staging:
            self._staged, self._adapter = None, None

    def _exchange(self, version: int) -> None:
        current = self._scheduler.weights
        if self._adapter is not None:
            adapt(current, self._adapter)
            self._adapter = None
            self._scheduler.swap(current, version)
            return
        self._spare.take_memory(current)
        self._scheduler.swap(self._spare, version)
        self._spare = current
        logger.debug(f"weights v{version} in place, {self._stats.running} requests go on")

    @property
    def failure(self) -> BaseException | None:
        """What the worker thread died of."""
        return self._worker.failure

    def get_version(self) -> int:
        """Version of the weights that draw the next token."""
        return self._scheduler.version

    def set_version(self, v: int) -> None:
        """Rename the current weights, between two steps."""
        if v != self._scheduler.version:
            self._worker.call(setattr, self._scheduler, "version", v)

    @property
    def limits(self) -> Limits:
        """What a request may ask for."""
        return self._limits

    @property
    def stats(self) -> NativeStats:
        """Counters; read them any time."""
        return self._stats


def _open_model(model: str | os.PathLike[str] | PreTrainedModel) -> tuple[Any, Iterable[tuple[str, Tensor]], Any, Any]:
    """(config, weight pairs, dtype, generation config or None) of a directory or a model."""
    if not isinstance(model, (str, os.PathLike)):
        skip = model.config.tie_word_embeddings
        pairs = ((n, p) for n, p in model.state_dict().items() if not (skip and n == "lm_head.weight"))
        return model.config, pairs, model.dtype, getattr(model, "generation_config", None)
    from transformers import AutoConfig, GenerationConfig

    config = AutoConfig.from_pretrained(os.fspath(model))
    generation = None
    if os.path.isfile(os.path.join(model, "generation_config.json")):
        generation = GenerationConfig.from_pretrained(os.fspath(model))
    return config, HfDirectory(os.fspath(model)).tensors(), config.dtype or torch.float32, generation


def _first_name(pairs: Iterable[tuple[str, Tensor]]) -> tuple[str, Iterable[tuple[str, Tensor]]]:
    """Name of the first pair (empty: there is none), and the pairs, which are still all there."""
    if isinstance(pairs, Sequence):
        return (pairs[0][0] if pairs else ""), pairs
    rest = iter(pairs)
    head = list(itertools.islice(rest, 1))
    return (head[0][0] if head else ""), itertools.chain(head, rest)


def _resolve_dtype(dtype: torch.dtype | str) -> torch.dtype:
    resolved = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    if resolved not in (torch.float32, torch.bfloat16, torch.float16):
        raise EngineError(f"dtype={dtype}: the native engine runs float32, bfloat16 and float16")
    return resolved


def _eos_ids(config: Any, generation: Any, tokenizer: Any) -> frozenset[int]:
    """End-of-text ids named by the generation config, else the model's, and the tokenizer's."""
    found = getattr(generation, "eos_token_id", None)
    if found is None:
        found = getattr(config, "eos_token_id", None)
    ids = set(found) if isinstance(found, (list, tuple)) else {found}
    ids.add(getattr(tokenizer, "eos_token_id", None))
    return frozenset(i for i in ids if i is not None)
