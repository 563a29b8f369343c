"""A server under test, the models it went through, and a trainer's side small enough to fit here.

A :class:`Peer` keeps the transformers model of every version it has published, so that each token can be checked
against a forward pass of the version it is tagged with. Used by ``suite`` and the modules that run it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from areal.api.config.rollout import GenerationHyperparameters, InferenceEngineConfig
from areal.api.io_struct import ModelRequest, ModelResponse, ParamSpec
from areal.engine.core.shared_weights import WeightWriter
from areal.engine.core.weight_groups import Membership, enter_group, open_store
from areal.engine.core.weight_heads import head_names
from areal.engine.core.weight_sources import DiskSource, WeightGroup, WeightSource, XcclSource
from areal.engine.core.weight_sync import ParamRecord
from areal.engine.core.weight_transfer import compare_ranks
from areal.engine.core.weight_wire import make_buckets, send_buckets
from areal.engine.inference.http_client import ServerHttp
from areal.engine.inference.protocol import ServerCall, ServerProtocol
from areal.engine.inference.remote import RemoteSampler
from areal.engine.native.requests import Limits
from tests.fakes import VOCAB, char_tokenizer, tiny_model

TIMEOUT_S = 120.0
BUCKET_BYTES = 64 << 10
LONGEST = 1024
MODEL = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LONGEST,
}
_group_numbers = itertools.count()


def suite_model(seed: int, tied: bool) -> Any:
    """The model of the suite: float32, heads of 32, about 200 k parameters, 64 tokens."""
    return tiny_model("qwen2", seed, tie_word_embeddings=tied, **MODEL)


def suite_tokenizer() -> Any:
    """The character tokenizer with a text for every token of the vocabulary, so that any pair makes a stop string."""
    tokenizer = char_tokenizer()
    tokenizer.add_tokens([f"<{token}>" for token in range(len(tokenizer), VOCAB)])
    return tokenizer


def save_suite_model(path: Path, seed: int, tied: bool) -> str:
    """Save it with the character tokenizer; returns the directory."""
    suite_model(seed, tied).save_pretrained(path)
    suite_tokenizer().save_pretrained(path)
    return str(path)


def named_weights(model: Any) -> list[tuple[str, torch.Tensor]]:
    """What a trainer publishes: every parameter once, a tied head left out."""
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def records_of(model: Any) -> list[ParamRecord]:
    """What it says of them."""
    pairs = named_weights(model)
    shown = head_names({name: tensor.shape for name, tensor in pairs})
    return [ParamRecord.of(name, tensor, head=name in shown) for name, tensor in pairs]


class Peer:
    """A server that runs the model of seed 0, and a sampler on it.

    Attributes:
        use_lora: whether its versions are adapters.

    Args:
        protocol, address: of the server; it belongs to whoever made the peer.
        tied: whether the suite's model has its embedding as head.
        directory: for checkpoints.
        build: makes another model than the suite's, from a seed.
    """

    use_lora = False

    def __init__(
        self,
        protocol: ServerProtocol,
        address: str,
        tied: bool,
        directory: Path,
        build: Callable[[int], Any] | None = None,
    ) -> None:
        self.protocol, self.address, self.tied, self.directory = protocol, address, tied, directory
        self._build = build or (lambda seed: suite_model(seed, tied))
        self.models: dict[int, Any] = {0: self._build(0)}
        self.failures: list[BaseException] = []
        self.torch_helper = protocol.name == "sglang"
        self.sampler = self._connect("auto", 0)
        self._mode = "auto"
        self._threads = ThreadPoolExecutor(4)
        self._writer = WeightWriter()

    def repair(self) -> None:
        """Connect again to a server that may hold anything, and give it a version that is whole."""
        self.sampler.stop()
        self.failures.clear()
        self.sampler = self._connect(self._mode, max(self.models))
        self.publish("disk", *self.next_model())

    def close(self) -> None:
        """Disconnect."""
        self.sampler.stop()
        self._writer.close()

    @property
    def version(self) -> int:
        """In service."""
        return self.sampler.get_version()

    @property
    def model(self) -> Any:
        """In service."""
        return self.models[self.version]

    def on_update(self, mode: str) -> None:
        """Use a sampler that keeps or aborts running requests."""
        if mode != self._mode:
            version = self.version
            self.sampler.stop()
            self.sampler, self._mode = self._connect(mode, version), mode

    def _connect(self, mode: Any, version: int) -> RemoteSampler:
        config = InferenceEngineConfig(
            backend=f"{self.protocol.name}:d1",
            on_weight_update=mode,
            request_timeout=TIMEOUT_S,
            setup_timeout=60.0,
            use_lora=self.use_lora,
        )
        longest = LONGEST - getattr(self.protocol, "CONTEXT_MARGIN", 0)
        limits = Limits(self.models[version].config.vocab_size, longest, frozenset({1}))
        sampler = RemoteSampler(self.protocol, [self.address], config, limits, tokenizer=suite_tokenizer())
        sampler.on_failure = self.failures.append
        sampler.set_version(version)
        sampler.start()
        return sampler

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Frozen as long as the block runs."""
        self.sampler.pause()
        try:
            yield
        finally:
            self.sampler.resume()

    def call(self, call: ServerCall) -> Any:
        """The reply to a call, past the sampler."""

        async def send() -> Any:
            http = ServerHttp(self.address, TIMEOUT_S, 1, self.protocol.headers())
            try:
                return await http.send(call)
            finally:
                await http.close()

        return asyncio.run(send())

    # -- generation ----------------------------------------------------------------------------------------------------

    def generate(self, *requests: ModelRequest) -> list[ModelResponse]:
        """Send all at once, wait for all."""
        return self.start(*requests).result(TIMEOUT_S)

    def start(self, *requests: ModelRequest) -> Future[list[ModelResponse]]:
        """The same in a thread of its own."""

        async def work() -> list[ModelResponse]:
            return list(await asyncio.gather(*(self.sampler.agenerate(request) for request in requests)))

        return self._threads.submit(asyncio.run, work())

    def start_running(self, *requests: ModelRequest, tokens: int = 60) -> Future[list[ModelResponse]]:
        """The same; returns when each of them has drawn about ``tokens``: one more of that length has ended."""
        for _ in range(5):  # a busy machine may hold up the short one until the others have ended
            running = self.start(*requests)
            self.generate(request(PROMPTS[0], max_new_tokens=tokens))
            if not running.done():
                return running
        raise AssertionError("the requests are too short")

    # -- updates -------------------------------------------------------------------------------------------------------

    def next_model(self) -> tuple[int, Any]:
        """The next version and a model for it, unlike all before."""
        version = max(self.models) + 1
        return version, self._build(1000 + version)

    def publish(self, mode: str, version: int, model: Any) -> None:
        """Bring the server to ``model`` by ``mode``, as the trainer's side does, and check the records."""
        self.models[version] = model
        pairs = named_weights(model)
        sent = records_of(model)
        try:
            with self._source(mode, version, model, pairs) as source:
                self._transfer(source, version, sent)
        except BaseException:
            self.models.pop(version)
            raise

    def _transfer(self, source: WeightSource, version: int, sent: list[ParamRecord]) -> None:
        while_paused = self.protocol.name != "native"  # servers receive when paused
        with self.paused() if while_paused else contextlib.nullcontext():
            received = self.sampler.stage_source(source, version)
            compare_ranks(sent, received, version, self.address)
            with self.paused():
                self.sampler.commit_weights(version)

    def _source(self, mode: str, version: int, model: Any, pairs: list[tuple[str, torch.Tensor]]) -> _Sending:
        if mode == "shm":
            return _Sending(self._writer.write(pairs, version))
        if mode == "disk":
            path = str(self.directory / f"v{version}")
            model.save_pretrained(path)
            return _Sending(DiskSource(version, path, records_of(model)))
        sender = Broadcast(self, version, pairs)
        return _Sending(sender.source, sender)


class Broadcast:
    """Rank 0 of a group with a peer's sampler, and a thread that sends.

    Args:
        pairs: what is sent; fewer than ``announced`` for a trainer that dies on the way.
        announced: what the receivers are told.
    """

    def __init__(
        self,
        peer: Peer,
        version: int,
        pairs: Sequence[tuple[str, torch.Tensor]],
        announced: Sequence[tuple[str, torch.Tensor]] | None = None,
    ) -> None:
        self._peer, self._pairs = peer, pairs
        store = open_store("127.0.0.1", TIMEOUT_S)
        name = f"suite-{os.getpid()}-{next(_group_numbers)}"
        size = 1 + peer.sampler.group_ranks
        self.group = WeightGroup(name, "127.0.0.1", store.port, size, torch_helper=peer.torch_helper, timeout_s=30.0)
        specs = [ParamSpec(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in announced or pairs]
        self.source = XcclSource(version, dataclasses.replace(self.group, rank=1), make_buckets(specs, BUCKET_BYTES))
        self._threads = ThreadPoolExecutor(1)
        member = self._threads.submit(enter_group, self.group, store)
        peer.sampler.join_group(self.source.group)
        self._member: Membership = member.result(TIMEOUT_S)

    def send(self) -> Future[Any]:
        """Start to send; a trainer that has less than it announced leaves the group."""
        return self._threads.submit(send_buckets, self._member, iter(self._pairs), self.source.buckets)

    def close(self, failed: bool) -> None:
        """Leave the group."""
        if not failed:
            self._peer.sampler.leave_group(self.source.group)
        self._member.abort()
        self._threads.shutdown()


class _Sending:
    """A source whose bytes travel as long as the block runs."""

    def __init__(self, source: WeightSource, sender: Broadcast | None = None) -> None:
        self._source, self._sender = source, sender
        self._sent: Future[Any] | None = None

    def __enter__(self) -> WeightSource:
        if self._sender is not None:
            self._sent = self._sender.send()
        return self._source

    def __exit__(self, kind: Any, *_: object) -> None:
        if self._sender is not None:
            self._sender.close(failed=kind is not None)
            if kind is None and self._sent is not None:
                self._sent.result(TIMEOUT_S)


# -- requests and the right answer -------------------------------------------------------------------------------------


def request(ids: Sequence[int], *, seed: int | None = 1, **settings: Any) -> ModelRequest:
    """A request that ignores eos unless told otherwise."""
    settings.setdefault("ignore_eos", True)
    return ModelRequest(input_ids=list(ids), gconfig=GenerationHyperparameters(**settings), seed=seed)


def _prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCAB, (length,), generator=generator).tolist()


PROMPTS = [_prompt(3 + 5 * i, i) for i in range(8)]


def rows_of(model: Any, response: ModelResponse, temperature: float = 1.0) -> torch.Tensor:
    """Log-probs ``[output, V]`` of one plain forward pass over prompt and output."""
    ids = torch.tensor([response.input_tokens + response.output_tokens])
    with torch.no_grad():
        logits = model(ids).logits[0, response.input_len - 1 : -1].float()
    return torch.log_softmax(logits / temperature, -1)


def error_of(models: dict[int, Any], response: ModelResponse, temperature: float = 1.0) -> float:
    """Largest difference between a token's log-prob and the one of the version that it is tagged with."""
    assert len(response.output_tokens) == len(response.output_logprobs) == len(response.output_versions) > 0
    rows = {version: rows_of(models[version], response, temperature) for version in set(response.output_versions)}
    picked = zip(response.output_versions, response.output_tokens, strict=True)
    expected = torch.stack([rows[version][i, token] for i, (version, token) in enumerate(picked)])
    return float((torch.tensor(response.output_logprobs) - expected).abs().max())
