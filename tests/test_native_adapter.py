"""Adapters in the native engine: log-probs of the merged model, swaps while requests run, bad adapters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from areal.engine.core.lora_layout import SCALING
from areal.engine.core.weight_sync import InProcessPublisher
from areal.utils.errors import WeightSyncError
from tests.fakes import tiny_model
from tests.native_helpers import (
    assert_greedy_match,
    assert_logprobs_match,
    before_step,
    generate,
    random_prompts,
    reference_logprobs,
    request,
    running,
    weights_of,
)

Pairs = list[tuple[str, Tensor]]


def adapter(arch: str, seed: int, targets: list[str] | str = "all-linear", **overrides: Any) -> tuple[Any, Pairs]:
    """The merged model, and what a trainer would send of its adapter."""
    config = LoraConfig(r=4, lora_alpha=6, target_modules=targets, lora_dropout=0.0)
    model = get_peft_model(tiny_model(arch, **overrides), config)
    generator = torch.Generator().manual_seed(seed)
    pairs: Pairs = []
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
            pairs.append((name.replace(".default", ""), parameter.detach().clone()))
    pairs.append((SCALING, torch.tensor([1.5])))
    return model.merge_and_unload().eval(), pairs


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj"], ["k_proj", "up_proj", "o_proj"]], ids=str)
def test_adapter_every_target_draws_and_scores_as_the_merged_model(arch: str, targets: Any) -> None:
    merged, pairs = adapter(arch, 1, targets)
    base = tiny_model(arch)
    with running(base) as engine:
        records = engine.receive_weights(pairs, 1)
        responses = generate(
            engine, [request(p, seed=i, max_new_tokens=12) for i, p in enumerate(random_prompts((9, 5)))]
        )
        (greedy,) = generate(engine, [request([5, 6, 7], greedy=True, max_new_tokens=12)])
    assert [record.name for record in records] == [name for name, _ in pairs]
    for response in responses:
        assert response.output_versions == [1] * 12
        assert_logprobs_match(merged, response)
        rows = reference_logprobs(base, response).gather(-1, torch.tensor(response.output_tokens)[:, None])[:, 0]
        assert (rows - torch.tensor(response.output_logprobs)).abs().max() > 1e-2  # the base alone draws otherwise
    assert_greedy_match(merged, greedy)


def test_adapter_of_large_packed_matrices_scores_as_the_merged_model() -> None:
    size = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 2}
    merged, pairs = adapter("qwen2", 1, **size)
    with running(tiny_model("qwen2", **size)) as engine:
        assert engine.keeps_sources  # packed indeed
        engine.receive_weights(pairs, 1)
        (response,) = generate(engine, [request([5, 6, 7, 8], max_new_tokens=10)])
    assert_logprobs_match(merged, response)


def test_adapter_swapped_at_token_ten_of_thirty_tags_and_scores_each_version() -> None:
    base, (first, pairs), (second, others) = tiny_model("qwen2"), adapter("qwen2", 1), adapter("qwen2", 2)
    with running(base) as engine:
        actions = {
            9: lambda: engine.receive_weights(pairs, 1),
            19: lambda: engine.receive_weights(others, 2),
        }
        before_step(engine, actions)
        (response,) = generate(engine, [request([5, 6, 7, 8], max_new_tokens=30)])
    assert response.output_versions == [0] * 10 + [1] * 10 + [2] * 10
    rows = [reference_logprobs(model, response) for model in (base, first, second)]
    versions, tokens = response.output_versions, response.output_tokens
    expected = [rows[v][t, token] for t, (v, token) in enumerate(zip(versions, tokens, strict=True))]
    torch.testing.assert_close(torch.tensor(response.output_logprobs), torch.stack(expected), rtol=0, atol=1e-4)


def test_whole_weights_after_an_adapter_are_served_without_it() -> None:
    (merged, pairs), other = adapter("qwen2", 1), tiny_model("qwen2", seed=5)
    with running(tiny_model("qwen2")) as engine:
        engine.receive_weights(pairs, 1)
        engine.receive_weights(weights_of(other), 2)
        (response,) = generate(engine, [request([5, 6, 7, 8], max_new_tokens=8)])
        engine.receive_weights(weights_of(tiny_model("qwen2")), 3)  # into the buffer that had the adapter
        (plain,) = generate(engine, [request([5, 6, 7, 8], max_new_tokens=8)])
        engine.receive_weights(pairs, 4)
        (again,) = generate(engine, [request([5, 6, 7, 8], max_new_tokens=8)])
    assert_logprobs_match(other, response)
    assert_logprobs_match(tiny_model("qwen2"), plain)
    assert_logprobs_match(merged, again)


def test_discarded_adapter_leaves_the_one_in_service() -> None:
    (merged, pairs), (_, others) = adapter("qwen2", 1), adapter("qwen2", 2)
    with running(tiny_model("qwen2")) as engine:
        engine.receive_weights(pairs, 1)
        engine.stage_weights(others, 2)
        engine.discard_weights()
        (response,) = generate(engine, [request([5, 6, 7, 8], max_new_tokens=8)])
    assert response.output_versions == [1] * 8
    assert_logprobs_match(merged, response)


def test_publisher_proves_what_an_adapter_became() -> None:
    _, pairs = adapter("qwen2", 1)
    with running(tiny_model("qwen2")) as engine:
        records = InProcessPublisher(lambda: iter(pairs), engine).publish(3)
        assert engine.get_version() == 3
    assert len(records) == len(pairs)


def _without(pairs: Pairs, part: str) -> Pairs:
    return [(name, tensor) for name, tensor in pairs if part not in name]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda pairs: _without(pairs, SCALING), "without lora_scaling"),
        (lambda pairs: _without(pairs, "layers.0.self_attn.q_proj.lora_B"), "lora_A alone"),
        (lambda pairs: [(n, t[:-1] if "lora_B" in n else t) for n, t in pairs], "this model has a layer of"),
        (lambda pairs: [(n.replace("q_proj", "x_proj"), t) for n, t in pairs], "is no linear layer"),
        (lambda pairs: [(n.replace("lora_A", "lora_magnitude"), t) for n, t in pairs], "no tensor of an adapter"),
    ],
)
def test_bad_adapter_is_refused_and_the_old_weights_serve_on(change: Any, message: str) -> None:
    _, pairs = adapter("qwen2", 1)
    with running(tiny_model("qwen2")) as engine:
        with pytest.raises(WeightSyncError, match=message):
            engine.receive_weights(change(pairs), 1)
        (response,) = generate(engine, [request([5, 6, 7, 8], max_new_tokens=8)])
    assert response.output_versions == [0] * 8
    assert_logprobs_match(tiny_model("qwen2"), response)
