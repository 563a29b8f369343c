"""What the tests of the native engine share: small engines, requests, and transformers as the right answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from areal.api.config.inference import NativeConfig
from areal.api.config.rollout import GenerationHyperparameters
from areal.api.io_struct import ModelRequest, ModelResponse
from areal.engine.native.engine import NativeEngine

TIMEOUT_S = 60


@contextmanager
def running(model: Any, tokenizer: Any = None, **settings: Any) -> Iterator[NativeEngine]:
    """A started engine on the CPU; stopped at the end."""
    engine = NativeEngine(NativeConfig(**settings), model, tokenizer=tokenizer, device="cpu")
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def request(ids: Sequence[int], *, seed: int | None = 1, order: tuple[int, ...] = (), **settings: Any) -> ModelRequest:
    """A request that ignores eos unless told otherwise."""
    settings.setdefault("ignore_eos", True)
    return ModelRequest(input_ids=list(ids), gconfig=GenerationHyperparameters(**settings), seed=seed, order=order)


def generate(engine: NativeEngine, requests: Sequence[ModelRequest]) -> list[ModelResponse]:
    """Submit all, wait for all."""
    futures = [engine.submit(req) for req in requests]
    return [future.result(TIMEOUT_S) for future in futures]


def before_step(engine: NativeEngine, actions: dict[int, Callable[[], object]]) -> None:
    """Run ``actions[n]`` on the worker thread right before its n-th step (from 0).

    Step 0 draws two tokens (the first from the prompt), every later step one: before step n a request has n + 1.
    """
    scheduler = engine._scheduler
    plain, count = scheduler.step, 0

    def step() -> None:
        nonlocal count
        if count in actions:
            actions[count]()
        count += 1
        plain()

    scheduler.step = step  # type: ignore[method-assign]


def random_prompts(lengths: Sequence[int], vocab: int = 64, seed: int = 0) -> list[list[int]]:
    """Prompts of the given lengths without the special ids 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, vocab, (length,), generator=generator).tolist() for length in lengths]


def reference_logprobs(model: Any, response: ModelResponse, temperature: float = 1.0) -> torch.Tensor:
    """Log-probs ``[output_len, V]`` of one plain forward pass over prompt and output."""
    ids = torch.tensor([response.input_tokens + response.output_tokens])
    with torch.no_grad():
        logits = model(ids).logits[0, response.input_len - 1 : -1].float()
    return torch.log_softmax(logits / temperature, -1)


def assert_logprobs_match(model: Any, response: ModelResponse, temperature: float = 1.0) -> None:
    """Every reported log-prob is the model's own, within 1e-4."""
    rows = reference_logprobs(model, response, temperature)
    expected = rows.gather(-1, torch.tensor(response.output_tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(response.output_logprobs), expected, rtol=0, atol=1e-4)


def assert_greedy_match(model: Any, response: ModelResponse) -> None:
    """Every token is the most likely one after the tokens before it."""
    assert response.output_tokens == reference_logprobs(model, response).argmax(-1).tolist()


def weights_of(model: Any) -> list[tuple[str, torch.Tensor]]:
    """What a trainer would publish of ``model``."""
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]
