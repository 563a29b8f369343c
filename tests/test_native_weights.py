"""Weight updates while requests are in flight: versions, log-probs, caches, budgets, ownership."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from areal.api.io_struct import ModelResponse
from areal.engine.core.weight_sync import InProcessPublisher
from areal.engine.native import weights as native_weights
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


def assert_versions_match(models: list, response: ModelResponse, temperature: float = 1.0) -> None:
    """Each token's log-prob is that of a full forward pass under the version that drew it."""
    rows = [reference_logprobs(model, response, temperature) for model in models]
    expected = [
        rows[v][t, token]
        for t, (v, token) in enumerate(zip(response.output_versions, response.output_tokens, strict=True))
    ]  # noqa: E501
    torch.testing.assert_close(torch.tensor(response.output_logprobs), torch.stack(expected), rtol=0, atol=1e-4)


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "llama"])
def test_update_at_token_ten_of_thirty_tags_and_scores_each_version(arch: str) -> None:
    models = [tiny_model(arch, seed=s) for s in (0, 1)]
    with running(models[0]) as engine:
        before_step(engine, {9: lambda: engine.receive_weights(weights_of(models[1]), 1)})
        (response,) = generate(engine, [request([5, 6, 7, 8], max_new_tokens=30)])
    assert response.output_versions == [0] * 10 + [1] * 20
    assert_versions_match(models, response)


def test_update_with_many_requests_recomputes_each_prompt_once() -> None:
    models = [tiny_model("qwen2", seed=s) for s in (0, 1)]
    prompts = random_prompts((20, 13))
    sent = [
        request(p, seed=i, temperature=0.8, max_new_tokens=30)
        for i, p in enumerate(p for p in prompts for _ in range(4))
    ]  # noqa: E501
    with running(models[0]) as engine:
        engine.hold_admission()
        before_step(engine, {9: lambda: engine.receive_weights(weights_of(models[1]), 1)})
        futures = [engine.submit(s) for s in sent]
        engine.release_admission()
        responses = [f.result(60) for f in futures]
    for response in responses:
        assert response.output_versions == [0] * 10 + [1] * 20
        assert_versions_match(models, response, 0.8)
    # before step 9 each has 10 tokens: 9 of them and the prompt were in the cache; prompts are computed once each
    assert engine.stats.recomputed_tokens == (20 + 13) + 8 * 9
    assert engine.stats.prefill_tokens == 20 + 13


def test_recompute_budget_is_kept_and_nothing_is_drawn_from_a_stale_cache() -> None:
    models = [tiny_model("qwen2", seed=s) for s in (0, 1)]
    prompts = random_prompts((40, 30, 20, 10, 5))
    with running(models[0], recompute_tokens_per_step=16) as engine:
        before_step(engine, {7: lambda: engine.receive_weights(weights_of(models[1]), 1)})
        responses = generate(engine, [request(p, seed=i, max_new_tokens=40) for i, p in enumerate(prompts)])
    assert 0 < engine.stats.max_recomputed_in_step <= 16
    for response in responses:
        assert response.output_versions == sorted(response.output_versions)
        assert set(response.output_versions) == {0, 1}
        assert_versions_match(models, response)


def test_updates_during_a_budgeted_recompute_coalesce() -> None:
    models = [tiny_model("qwen2", seed=s) for s in (0, 1, 2)]
    prompts = random_prompts((40, 30, 20))
    with running(models[0], recompute_tokens_per_step=16) as engine:
        engine.hold_admission()
        before_step(
            engine,
            {
                5: lambda: engine.receive_weights(weights_of(models[1]), 1),
                6: lambda: engine.receive_weights(weights_of(models[2]), 2),
            },
        )
        futures = [engine.submit(request(p, seed=i, max_new_tokens=20)) for i, p in enumerate(prompts)]
        engine.release_admission()
        responses = [f.result(60) for f in futures]
    # 16 tokens of version 1 were computed before version 2 replaced it; no request waited for the rest of version 1
    assert engine.stats.recomputed_tokens == 16 + sum(len(p) + 5 for p in prompts)
    for response in responses:
        assert set(response.output_versions) == {0, 2}
        assert_versions_match(models, response)


def test_two_updates_while_paused_recompute_once() -> None:
    models = [tiny_model("qwen2", seed=s) for s in (0, 1, 2)]
    with running(models[0]) as engine:
        future = engine.submit(request([5, 6, 7], max_new_tokens=400))
        while engine.stats.decode_steps < 20:
            time.sleep(0.001)
        engine.pause()
        drawn = engine.stats.generated_tokens
        engine.receive_weights(weights_of(models[1]), 1)
        engine.receive_weights(weights_of(models[2]), 2)
        assert engine.get_version() == 2
        assert engine.stats.generated_tokens == drawn
        engine.resume()
        response = future.result(60)
    assert engine.stats.recomputed_tokens == 3 + drawn - 1
    assert response.output_versions == [0] * drawn + [2] * (400 - drawn)
    assert_versions_match(models, response)


def test_updates_from_another_thread_never_mix_weights() -> None:
    models = [tiny_model("qwen2", seed=s) for s in range(6)]
    prompts = random_prompts((6, 9, 3, 15, 6))
    with running(models[0]) as engine:
        futures = [engine.submit(request(p, seed=i, max_new_tokens=300)) for i, p in enumerate(prompts)]
        for version in range(1, 6):
            time.sleep(0.03)
            engine.receive_weights(weights_of(models[version]), version)
        responses = [f.result(60) for f in futures]
    for response in responses:
        assert response.output_versions == sorted(response.output_versions)
        assert_versions_match(models, response)


def test_concurrent_updates_take_turns() -> None:
    models = [tiny_model("qwen2", seed=s) for s in range(5)]
    with running(models[0]) as engine:
        future = engine.submit(request([5, 6, 7], max_new_tokens=400))
        threads = [
            threading.Thread(target=engine.receive_weights, args=(weights_of(models[v]), v)) for v in range(1, 5)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        response = future.result(60)
        (last,) = generate(engine, [request([9, 8], greedy=True, max_new_tokens=10)])
        final = engine.get_version()
    assert_versions_match(models, response)
    assert_greedy_match(models[final], last)
    assert engine.stats.weight_swaps == 4


def test_same_prompt_after_an_update_equals_a_fresh_engine() -> None:
    old, new = (tiny_model("qwen2", seed=s) for s in (0, 1))
    probe = request([5, 6, 7, 8, 9], seed=3, max_new_tokens=25)
    with running(old) as engine:
        generate(engine, [probe])
        background = engine.submit(request([5, 6, 7, 8, 9], seed=4, max_new_tokens=450))  # keeps the prompt live
        engine.receive_weights(weights_of(new), 1)
        (updated,) = generate(engine, [request([5, 6, 7, 8, 9], seed=3, max_new_tokens=25)])
        engine.abort()
        background.result(60)
    with running(new) as fresh:
        (expected,) = generate(fresh, [request([5, 6, 7, 8, 9], seed=3, max_new_tokens=25)])
    assert updated.output_tokens == expected.output_tokens
    torch.testing.assert_close(
        torch.tensor(updated.output_logprobs), torch.tensor(expected.output_logprobs), rtol=0, atol=1e-4
    )
    assert set(updated.output_versions) == {1}


def test_update_with_equal_weights_changes_nothing_but_the_version() -> None:
    model = tiny_model("qwen2")
    with running(model) as engine:
        (plain,) = generate(engine, [request([5, 6], max_new_tokens=20)])
        before_step(engine, {4: lambda: engine.receive_weights(weights_of(model), 1)})
        (updated,) = generate(engine, [request([5, 6], max_new_tokens=20)])
    assert updated.output_tokens == plain.output_tokens
    assert updated.output_versions == [0] * 5 + [1] * 15


@pytest.mark.parametrize("width", [32, 256])  # plain and packed weights
def test_sampler_owns_its_copy(width: int) -> None:
    model = tiny_model("qwen2", hidden_size=width, intermediate_size=2 * width)
    trainer = {
        name: tensor.clone()
        for name, tensor in weights_of(tiny_model("qwen2", 1, hidden_size=width, intermediate_size=2 * width))
    }  # noqa: E501
    expected = tiny_model("qwen2", 1, hidden_size=width, intermediate_size=2 * width)
    with running(model) as engine:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        (first,) = generate(engine, [request([5, 6, 7], greedy=True, max_new_tokens=10)])
        engine.receive_weights(trainer.items(), 1)
        for tensor in trainer.values():
            tensor.mul_(-2.0)
        (second,) = generate(engine, [request([5, 6, 7], greedy=True, max_new_tokens=10)])
    assert_greedy_match(tiny_model("qwen2", 0, hidden_size=width, intermediate_size=2 * width), first)
    assert_greedy_match(expected, second)
    assert_logprobs_match(expected, second)


def test_records_equal_what_was_sent() -> None:
    for arch, overrides in (("qwen3", {}), ("llama", {"tie_word_embeddings": False}), ("qwen2", {})):
        sender = tiny_model(arch, seed=1, **overrides)
        with running(tiny_model(arch, **overrides)) as engine:
            publisher = InProcessPublisher(lambda s=sender: iter(weights_of(s)), engine)
            records = publisher.publish(3)
            assert engine.get_version() == 3
        assert [r.name for r in records] == [name for name, _ in weights_of(sender)]


def test_bfloat16_weights_are_cast_and_recorded_as_sent() -> None:
    sender = tiny_model("qwen2", seed=1).to(torch.bfloat16)
    with running(tiny_model("qwen2")) as engine:
        InProcessPublisher(lambda: iter(weights_of(sender)), engine).publish(1)
        (response,) = generate(engine, [request([5, 6], greedy=True, max_new_tokens=10)])
    assert_greedy_match(sender.float(), response)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda pairs: pairs[:-1], "did not arrive: model.norm.weight"),
        (lambda pairs: [*pairs, ("model.extra", torch.zeros(1))], "model.extra"),
        (lambda pairs: [(pairs[0][0], torch.zeros(3, 3)), *pairs[1:]], "shape"),
    ],
)
def test_incomplete_or_foreign_weights_are_refused_and_the_old_ones_serve(change: Callable, message: str) -> None:
    model = tiny_model("qwen2")
    with running(model) as engine:
        with pytest.raises(WeightSyncError, match=message):
            engine.receive_weights(change(weights_of(tiny_model("qwen2", seed=1))), 1)
        (response,) = generate(engine, [request([5, 6], greedy=True, max_new_tokens=10)])
        assert engine.get_version() == 0
    assert_greedy_match(model, response)


def test_stage_does_nothing_until_commit_and_discard_forgets() -> None:
    old, new = (tiny_model("qwen2", seed=s) for s in (0, 1))
    with running(old) as engine:
        engine.stage_weights(weights_of(new), 1)
        (before,) = generate(engine, [request([5, 6], greedy=True, max_new_tokens=10)])
        engine.discard_weights()
        with pytest.raises(WeightSyncError, match="not staged"):
            engine.commit_weights(1)
        engine.stage_weights(weights_of(new), 1)
        engine.pause()
        engine.commit_weights(1)
        engine.resume()
        (after,) = generate(engine, [request([5, 6], greedy=True, max_new_tokens=10)])
    assert_greedy_match(old, before)
    assert_greedy_match(new, after)


def wide_model(seed: int, **overrides: object) -> torch.nn.Module:
    """A model whose matrices are kept in the packed layout."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 1024, **overrides}
    return tiny_model("qwen2", seed, **sizes)


def copies(model: torch.nn.Module, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {name: tensor.to(dtype, copy=True) for name, tensor in weights_of(model)}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("later_from", [2**20, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lasting_weights_are_not_read_after_the_first_step(
    tied: bool, later_from: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_weights, "_LATER_FROM", later_from)
    new = wide_model(1, tie_word_embeddings=tied)
    source = copies(new, dtype)
    for parameter in new.parameters():
        parameter.data = parameter.data.to(dtype).float()
    with running(wide_model(0, tie_word_embeddings=tied)) as engine:
        assert engine.keeps_sources
        engine.stage_weights(source.items(), 1, lasting=True)
        engine.commit_weights(1)
        (first,) = generate(engine, [request([5, 6, 7], greedy=True, max_new_tokens=5)])
        for tensor in source.values():
            tensor.zero_()
        (second,) = generate(engine, [request([5, 6, 7], greedy=True, max_new_tokens=5)])
    for response in (first, second):
        assert_greedy_match(new, response)
        assert_logprobs_match(new, response)


def test_lasting_weights_are_not_read_after_the_next_ones_are_staged() -> None:
    first, second = wide_model(1), wide_model(2)
    source, later = copies(first), copies(second)
    with running(wide_model(0)) as engine:
        engine.stage_weights(source.items(), 1, lasting=True)
        engine.commit_weights(1)  # and nothing is generated
        engine.stage_weights(later.items(), 2, lasting=True)
        for tensor in source.values():
            tensor.zero_()
        engine.discard_weights()
        (old,) = generate(engine, [request([5, 6], greedy=True, max_new_tokens=5)])
        engine.stage_weights(later.items(), 3, lasting=True)
        engine.commit_weights(3)
        (new,) = generate(engine, [request([5, 6], greedy=True, max_new_tokens=5)])
    assert_greedy_match(first, old)
    assert_greedy_match(second, new)
    assert_logprobs_match(second, new)


def test_lasting_weights_take_over_the_packed_memory_of_the_old_ones() -> None:
    new = wide_model(1)
    with running(wide_model(0)) as engine:
        before = engine._scheduler.weights.layers[0].down._packed
        engine.stage_weights(copies(new).items(), 1, lasting=True)
        engine.commit_weights(1)
        (response,) = generate(engine, [request([5, 6], greedy=True, max_new_tokens=5)])
        assert engine._scheduler.weights.layers[0].down._packed is before
        assert engine._spare.layers[0].down._packed is None
    assert_greedy_match(new, response)
