"""The native engine against transformers in float32: the same tokens, the same log-probs."""

from __future__ import annotations

import time

import pytest
import torch

from areal.api.config.inference import NativeConfig
from areal.engine.native.engine import NativeEngine
from areal.utils.errors import UnsupportedFeatureError
from tests.fakes import save_tiny_model, tiny_model
from tests.native_helpers import (
    assert_greedy_match,
    assert_logprobs_match,
    generate,
    random_prompts,
    reference_logprobs,
    request,
    running,
)

LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
MODELS = {
    "qwen2": ("qwen2", {}),
    "qwen2-untied": ("qwen2", {"tie_word_embeddings": False}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "llama": ("llama", {}),
    "llama3-rope-untied-biases": (
        "llama",
        {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3_ROPE},
    ),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1, "num_attention_heads": 4}),
    "packed-weights": ("qwen2", {"hidden_size": 256, "intermediate_size": 640}),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> object:
    arch, overrides = MODELS[request.param]
    return tiny_model(arch, **overrides)


def test_greedy_mixed_lengths_match_transformers(model: object) -> None:
    prompts = random_prompts((3, 9, 1, 40, 7, 7, 12, 4))
    requests = [request(p, greedy=True, max_new_tokens=6 + 5 * i) for i, p in enumerate(prompts)]
    with running(model, max_running_requests=5) as engine:
        responses = generate(engine, requests)
    for sent, response in zip(requests, responses, strict=True):
        assert response.output_len == sent.gconfig.max_new_tokens
        assert response.stop_reason == "length"
        assert_greedy_match(model, response)
        assert_logprobs_match(model, response)


def test_greedy_prompt_longer_than_budget_is_filled_in_pieces(model: object) -> None:
    prompts = random_prompts((50, 3, 21))
    with running(model, prefill_tokens_per_step=16) as engine:
        responses = generate(engine, [request(p, greedy=True, max_new_tokens=8) for p in prompts])
    for response in responses:
        assert_greedy_match(model, response)
        assert_logprobs_match(model, response)


def test_sampled_logprobs_match_transformers_at_their_temperature() -> None:
    model = tiny_model("qwen2")
    prompts = random_prompts((5, 2, 9))
    heats = (0.7, 1.0, 1.5)
    with running(model) as engine:
        requests = [request(p, temperature=t, max_new_tokens=40) for p, t in zip(prompts, heats, strict=True)]
        responses = generate(engine, requests)
    for response, heat in zip(responses, heats, strict=True):
        assert_logprobs_match(model, response, heat)


def test_midstream_admission_matches_transformers() -> None:
    model = tiny_model("qwen2")
    long, *short = random_prompts((6, 11, 3, 17))
    with running(model) as engine:
        first = engine.submit(request(long, greedy=True, max_new_tokens=300))
        later = []
        for prompt in short:
            target = engine.stats.decode_steps + 20
            while engine.stats.decode_steps < target and not first.done():
                time.sleep(0.001)
            later.append(engine.submit(request(prompt, greedy=True, max_new_tokens=25)))
        responses = [first.result(60), *(future.result(60) for future in later)]
    for response in responses:
        assert_greedy_match(model, response)
        assert_logprobs_match(model, response)


def test_cache_growth_keeps_long_sequences_right() -> None:
    model = tiny_model("qwen2")
    with running(model) as engine:
        responses = generate(engine, [request(p, greedy=True, max_new_tokens=200) for p in random_prompts((4, 90))])
    for response in responses:
        assert_greedy_match(model, response)


def test_checkpoint_directory_gives_the_same_as_the_model(tmp_path) -> None:
    model = tiny_model("qwen3", tie_word_embeddings=False)
    path = save_tiny_model(tmp_path / "m", "qwen3", tie_word_embeddings=False)
    with running(path) as engine:
        (response,) = generate(engine, [request([5, 6, 7], greedy=True, max_new_tokens=12)])
    assert_greedy_match(model, response)
    assert_logprobs_match(model, response)


def test_bfloat16_engine_follows_transformers_bfloat16() -> None:
    model = tiny_model("qwen3").to(torch.bfloat16)
    engine = NativeEngine(NativeConfig(), model, device="cpu")
    assert engine.dtype is torch.bfloat16
    engine.start()
    (response,) = generate(engine, [request([5, 6, 7, 8], max_new_tokens=20)])
    engine.stop()
    rows = reference_logprobs(model, response)
    expected = rows.gather(-1, torch.tensor(response.output_tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(response.output_logprobs), expected, rtol=0, atol=0.15)


def test_model_outside_the_supported_ones_is_refused_by_name() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16))
    with pytest.raises(UnsupportedFeatureError, match=r"gpt2.*qwen2"):
        NativeEngine(NativeConfig(), model, device="cpu")
