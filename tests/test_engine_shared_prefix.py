"""Prefixes that sequences share, computed once: the numbers are those of computing them every time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from areal.api.cli_args import MicroBatchSpec, OptimizerConfig, TrainEngineConfig
from areal.engine.core import model as model_module
from areal.engine.core import shared_prefix
from areal.engine.core.shared_prefix import distinct_predictions, find_shared_prefixes, split_by_trees
from areal.engine.fsdp_engine import FSDPEngine
from areal.experimental.engine.archon_engine import ArchonEngine
from areal.utils.batch import PackedBatch
from areal.utils.errors import ConfigError, DataError, UnsupportedFeatureError
from tests.fakes import save_tiny_model
from tests.tree_rows import branches, packed, trie

TREES: dict[str, Any] = {"enable_tree_training": True, "pad_to_maximum": True}


def build(path: str, backend: str = "fsdp:d1", limit: int | None = 128, **settings: Any) -> Any:
    """An engine in training mode; plain SGD, so that weights tell gradients apart."""
    config = TrainEngineConfig(
        experiment_name="t", trial_name="t", backend=backend, path=path, dtype="float32",
        optimizer=OptimizerConfig(type="sgd", lr=0.1), mb_spec=MicroBatchSpec(max_tokens_per_mb=limit), **settings,
    )  # fmt: skip
    engine: Any = ArchonEngine(config) if backend.startswith("archon") else FSDPEngine(config)
    engine.create_process_group()
    engine.initialize(None, None)
    return engine.train()


def step(engine: Any, batch: PackedBatch) -> tuple[dict[str, float], dict[str, torch.Tensor], torch.Tensor, float]:
    """Statistics of one step, the weights after it, log-probs and loss before it."""

    def loss_fn(logprobs: torch.Tensor, entropy: torch.Tensor, fields: dict[str, Any]) -> torch.Tensor:
        # Each position has a weight of its own: shared tokens must get the sum of what their sequences send.
        place = torch.arange(logprobs.shape[0], device=logprobs.device) + fields["cu_seqlens"].shape[0]
        weight = torch.cos(place) * (fields["loss_mask"] != 0)
        return -((logprobs + 0.1 * entropy) * weight).sum() / fields["loss_mask"].sum()

    def weight_fn(fields: dict[str, Any]) -> torch.Tensor:
        return fields["loss_mask"].count_nonzero()

    logprobs = engine.forward_batch(batch)
    loss = float(engine.eval_batch(batch, loss_fn, weight_fn, token_mask="loss_mask"))
    stats = engine.train_batch(batch, loss_fn, weight_fn, token_mask="loss_mask")
    weights = {name: tensor.clone() for name, tensor in engine.named_full_tensors()}
    engine.destroy()
    return stats, weights, logprobs, loss


def assert_equal_steps(shared: Any, plain: Any) -> None:
    torch.testing.assert_close(shared[2], plain[2], rtol=0, atol=1e-5)
    assert shared[3] == pytest.approx(plain[3], abs=1e-5)
    assert shared[0]["grad_norm"] == pytest.approx(plain[0]["grad_norm"], rel=1e-5)
    for name, expected in plain[1].items():
        torch.testing.assert_close(shared[1][name], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("backend", ["fsdp:d1", "archon:d1"])
def test_train_batch_with_trees_equals_every_token_computed(
    arch: str, checkpointing: bool, backend: str, tmp_path: Any
) -> None:
    path = save_tiny_model(tmp_path / "model", arch)
    sequences = branches(roots=3)
    batch = packed(sequences)
    settings: dict[str, Any] = {"gradient_checkpointing": checkpointing, "backend": backend, "path": path}

    plain = step(build(limit=None, **settings), batch)
    shared = step(build(limit=256, **settings, **TREES), batch)

    assert_equal_steps(shared, plain)
    assert shared[0]["num_micro_batches"] == plain[0]["num_micro_batches"] == 1
    assert shared[0]["tree_token_ratio"] == pytest.approx(len(trie(sequences)[0]) / batch.n_tokens)
    assert shared[0]["tree_token_ratio"] < 0.7
    assert "tree_token_ratio" not in plain[0]


@pytest.mark.parametrize("backend", ["fsdp:d1", "archon:d1"])
def test_train_batch_cut_into_several_trees_equals_one_batch(backend: str, tmp_path: Any) -> None:
    path = save_tiny_model(tmp_path / "model")
    batch = packed(branches(roots=8))

    def loss_fn(logprobs: torch.Tensor, entropy: torch.Tensor, fields: dict[str, Any]) -> torch.Tensor:
        return -((logprobs + 0.1 * entropy) * fields["loss_mask"]).sum() / fields["loss_mask"].sum()

    results = []
    for settings in ({"limit": None}, TREES):
        engine = build(path, backend, **settings)
        logprobs = engine.forward_batch(batch)
        stats = engine.train_batch(batch, loss_fn, lambda fields: fields["loss_mask"].count_nonzero())
        results.append((stats, dict(engine.named_full_tensors()), logprobs, 0.0))

    assert results[1][0]["num_micro_batches"] > 1
    assert_equal_steps(results[1], results[0])


def test_train_batch_with_groups_shares_prompts_unasked(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_tiny_model(tmp_path / "model")
    sequences = branches()
    batch = packed(sequences, groups=[0] * 6 + [1] * 6)
    widths = []
    compute = model_module.CausalLm.hidden_states

    def watched(self: Any, model_input: Any) -> Any:
        hidden, source = compute(self, model_input)
        widths.append(hidden.shape[0])
        return hidden, source

    monkeypatch.setattr(model_module.CausalLm, "hidden_states", watched)
    shared = step(build(path, limit=None), batch)
    assert set(widths) == {len(trie(sequences)[0])}
    monkeypatch.setattr(model_module, "share_automatically", lambda model_input: model_input)
    plain = step(build(path, limit=None), batch)

    assert widths[-1] == batch.n_tokens
    assert_equal_steps(shared, plain)
    assert "tree_token_ratio" not in shared[0]


@pytest.mark.parametrize("backend", ["fsdp:d1", "archon:d1"])
def test_train_batch_without_common_prefixes_stays_off_and_says_so_once(
    backend: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_tiny_model(tmp_path / "model")
    batch = packed([[2 + i, *range(3, 9 + i)] for i in range(6)])
    monkeypatch.setattr(shared_prefix, "_said", set())
    said: list[str] = []
    monkeypatch.setattr(shared_prefix.logger, "info", said.append)

    shared = step(build(path, backend, **TREES), batch)

    assert shared[0]["tree_token_ratio"] == 1.0
    assert said == ["sequences share less than 10% of a batch's tokens: trained without trees"]
    assert_equal_steps(shared, step(build(path, backend, limit=None), batch))


def test_split_by_trees_that_do_not_pay_keeps_the_ordinary_cut() -> None:
    batch = packed([[2 + i, *range(3, 9 + i)] for i in range(6)])
    parts = split_by_trees(batch, MicroBatchSpec(max_tokens_per_mb=128, n_mbs=3))
    assert len(parts) == 3


def test_split_by_trees_fits_more_sequences_than_tokens_allow() -> None:
    batch = packed([[*range(2, 32), 40 + i] for i in range(20)])  # 620 tokens, 50 distinct
    parts = split_by_trees(batch, MicroBatchSpec(max_tokens_per_mb=128))
    assert [part.indices for part in parts] == [list(range(20))]


def test_find_shared_prefixes_a_little_in_common_does_not_pay_unless_room_is_short() -> None:
    batch = packed([[5, *range(10, 30)], [5, *range(30, 50)]])
    assert find_shared_prefixes(batch) is None
    assert find_shared_prefixes(batch, 42) is None
    assert find_shared_prefixes(batch, 41) is not None


def test_distinct_predictions_equal_beginnings_and_next_tokens_are_asked_once() -> None:
    # rows 5 6 7 | 5 6 8 | 5 6 7 9: the tree numbers them 0 1 2 | 0 1 3 | 0 1 2 4
    source = torch.tensor([0, 1, 2, 0, 1, 3, 0, 1, 2, 4])
    rows, index = distinct_predictions(source, torch.tensor([0, 1, 3, 4, 6, 7, 8]))
    assert rows.tolist() == [0, 1, 4, 8]
    assert index.tolist() == [0, 1, 2, 0, 4, 5, 0, 1, 8, 9]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"limit": None}, ("mb_spec.max_tokens_per_mb=None", "multiple of 128")),
        ({"limit": 200}, ("mb_spec.max_tokens_per_mb=200", "multiple of 128")),
        ({"pad_to_maximum": False}, ("pad_to_maximum=false",)),
        ({"is_critic": True}, ("enable_tree_training", "is_critic")),
    ],
)
def test_tree_training_settings_that_do_not_fit_are_refused_by_name(
    settings: dict[str, Any], words: tuple[str, ...], tmp_path: Any
) -> None:
    with pytest.raises(ConfigError) as caught:
        build(save_tiny_model(tmp_path / "model"), **{**TREES, **settings})
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("backend", "word"), [("fsdp:c2", "c2"), ("archon:c2", "c2"), ("archon:p2", "p2"), ("archon:d2c2", "c2")]
)
def test_tree_training_layouts_with_c_or_p_are_refused_by_name(backend: str, word: str, tmp_path: Any) -> None:
    with pytest.raises(UnsupportedFeatureError, match=f"enable_tree_training=true does not work with {word}"):
        build(save_tiny_model(tmp_path / "model"), backend, **TREES)


def test_tree_training_archon_pads_to_maximum_by_itself(tmp_path: Any) -> None:
    engine = build(save_tiny_model(tmp_path / "model"), "archon:d1", enable_tree_training=True)
    assert engine.config.pad_to_maximum


def test_tree_training_dropout_is_refused(tmp_path: Any) -> None:
    path = save_tiny_model(tmp_path / "model", attention_dropout=0.1)
    with pytest.raises(ConfigError, match="disable_dropout=false"):
        build(path, **TREES)
    build(path, disable_dropout=True, **TREES)


def test_tree_training_layers_that_do_not_attend_are_refused(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_tiny_model(tmp_path / "model")
    engine = build(path, **TREES)
    layer = engine.module.model.layers[1].self_attn
    monkeypatch.setattr(layer, "forward", lambda hidden_states, **kwargs: (hidden_states, None))
    with pytest.raises(UnsupportedFeatureError, match="1 of 2 layers did not use the tree.s attention"):
        engine.forward_batch(packed(branches()))


def test_tree_training_sequence_above_the_limit_is_a_value_error(tmp_path: Any) -> None:
    engine = build(save_tiny_model(tmp_path / "model"), **TREES)
    batch = packed([[2] * 130, [2] * 129 + [3], [2] * 128 + [4, 5]])
    with pytest.raises(ValueError, match=r"sequence 0 has 130 distinct tokens, more than mb_spec\.max_tokens_per_mb"):
        engine.forward_batch(batch)


def test_tree_training_shifted_positions_are_refused(tmp_path: Any) -> None:
    engine = build(save_tiny_model(tmp_path / "model"), **TREES)
    batch = packed(branches())
    batch = batch.with_tokens(position_ids=batch.tokens["position_ids"] + 3)
    with pytest.raises(DataError, match="position_ids"):
        engine.forward_batch(batch)


def test_tree_training_images_are_refused() -> None:
    batch = packed(branches())
    batch.lists["multi_modal_input"] = [{}] * batch.n_sequences
    with pytest.raises(UnsupportedFeatureError, match="multi_modal_input"):
        split_by_trees(batch, MicroBatchSpec(max_tokens_per_mb=128))
