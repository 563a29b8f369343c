"""FSDPEngine in one process against plain transformers in float32 on the same batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from areal.api.io_struct import FinetuneSpec, WeightUpdateMeta
from areal.engine.fsdp_engine import FSDPEngine
from areal.utils.batch import pack, split_micro_batches
from areal.utils.errors import ConfigError, DataError, EngineError, UnsupportedFeatureError
from tests.engine_fakes import (
    LENGTHS,
    adamw,
    batch,
    build_engine,
    engine_config,
    loss_fn,
    reference_logprobs,
    reference_step,
    weight_fn,
)
from tests.fakes import tiny_model

ARCHES = ("qwen2", "qwen3", "llama")


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    for arch in ARCHES:
        tiny_model(arch).save_pretrained(root / arch)
    return {arch: str(root / arch) for arch in ARCHES}


def _reference(path: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")


def _assert_same_parameters(engine: FSDPEngine, reference: Any, atol: float = 1e-5) -> None:
    for (name, ours), theirs in zip(engine.module.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("n_mbs", [1, 2, 5])
def test_train_batch_micro_batches_equal_one_plain_step(model_dirs: dict[str, str], arch: str, n_mbs: int) -> None:
    path, data = model_dirs[arch], batch()
    engine, reference = build_engine(path, mb_spec={"n_mbs": n_mbs}), _reference(path)
    optimizer = adamw(reference)
    for _ in range(2):  # the second step also compares the optimizer state
        loss = engine.eval_batch(data, loss_fn, weight_fn)
        result = engine.train_batch(data, loss_fn, weight_fn)
        expected_loss, expected_norm = reference_step(reference, data, optimizer)
        assert loss.item() == pytest.approx(expected_loss, rel=1e-5)
        assert result["grad_norm"] == pytest.approx(expected_norm, rel=1e-5)
        assert (result["update_successful"], result["num_micro_batches"]) == (1.0, n_mbs)
        _assert_same_parameters(engine, reference)


@pytest.mark.parametrize("attn_impl", ["eager", "sdpa", None])
@pytest.mark.parametrize("arch", ARCHES)
def test_forward_batch_packed_sequences_do_not_see_each_other(
    model_dirs: dict[str, str], arch: str, attn_impl: str | None
) -> None:
    settings = {} if attn_impl is None else {"attn_impl": attn_impl}
    engine, reference = build_engine(model_dirs[arch], temperature=0.7, **settings), _reference(model_dirs[arch])
    data = batch()
    results = engine.forward_batch(data)
    assert [r.shape for r in results] == [t["input_ids"].shape for t in data]
    for trajectory, result in zip(data, results, strict=True):
        with torch.no_grad():
            expected, _ = reference_logprobs(reference, trajectory, 0.7)
        torch.testing.assert_close(result[0, : len(expected)], expected, rtol=1e-5, atol=1e-5)
        assert not result[0, len(expected) :].any()


@pytest.mark.parametrize("attn_impl", ["eager", "sdpa"])
def test_train_batch_written_attention_equals_default(model_dirs: dict[str, str], attn_impl: str) -> None:
    ours, other = build_engine(model_dirs["qwen2"]), build_engine(model_dirs["qwen2"], attn_impl=attn_impl)
    for engine in (ours, other):
        engine.train_batch(batch(), loss_fn, weight_fn)
    _assert_same_parameters(ours, other.module)


def test_forward_batch_every_input_form_agrees(model_dirs: dict[str, str]) -> None:
    engine = build_engine(model_dirs["qwen2"], mb_spec={"max_tokens_per_mb": 20})
    data = batch((4, 6, 4))
    width = max(t["input_ids"].shape[1] for t in data)
    padded = {
        key: torch.cat([torch.nn.functional.pad(t[key], (0, width - t[key].shape[1])) for t in data]) for key in data[0]
    }
    as_list, as_dict, as_packed = engine.forward(data), engine.forward(padded), engine.forward(pack(data))
    assert as_dict.shape == padded["input_ids"].shape
    for i, row in enumerate(as_list):
        torch.testing.assert_close(as_dict[i, : row.shape[1]], row[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(as_dict[padded["attention_mask"]], as_packed, rtol=0, atol=1e-6)


def test_train_batch_token_mask_changes_nothing_but_work(model_dirs: dict[str, str]) -> None:
    def rolled_loss(logprobs: Any, entropy: Any, packed_input: dict[str, Any]) -> Any:
        mask = packed_input["rolled"].float()
        return ((-logprobs - 0.01 * entropy) * mask).sum() / mask.sum()

    data = batch()
    for trajectory in data:
        trajectory["rolled"] = torch.roll(trajectory["loss_mask"], -1, dims=1)
    full, selected = build_engine(model_dirs["qwen2"]), build_engine(model_dirs["qwen2"])
    weight = lambda packed_input: packed_input["rolled"].sum()  # noqa: E731
    a = full.train_batch(data, rolled_loss, weight)
    b = selected.train_batch(data, rolled_loss, weight, token_mask="rolled")
    assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-6)
    _assert_same_parameters(full, selected.module)


def test_train_batch_masked_values_change_no_bit(model_dirs: dict[str, str]) -> None:
    def weighted_loss(logprobs: Any, entropy: Any, packed_input: dict[str, Any]) -> Any:
        mask = packed_input["loss_mask"].bool()
        return torch.where(mask, logprobs * packed_input["advantages"], 0.0).sum() / mask.sum()

    norms = []
    for noise in (0.0, 1e6):
        data = batch()
        for trajectory in data:
            mask = trajectory["loss_mask"].bool()
            trajectory["advantages"] = torch.where(mask, torch.ones(mask.shape), torch.full(mask.shape, noise))
        engine = build_engine(model_dirs["qwen2"])
        norms.append(engine.train_batch(data, weighted_loss, lambda p: p["loss_mask"].sum())["grad_norm"])
    assert norms[0] == norms[1]


def test_train_batch_all_masked_micro_batch_and_batch_stay_finite(model_dirs: dict[str, str]) -> None:
    path = model_dirs["qwen2"]
    data = batch()
    for trajectory in data[2:5]:
        trajectory["loss_mask"].zero_()
    engine, reference = build_engine(path, mb_spec={"n_mbs": 7}), _reference(path)
    result = engine.train_batch(data, loss_fn, weight_fn)
    _, norm = reference_step(reference, data, adamw(reference))
    assert result["grad_norm"] == pytest.approx(norm, rel=1e-5)
    _assert_same_parameters(engine, reference)

    for trajectory in data:
        trajectory["loss_mask"].zero_()
    result = engine.train_batch(data, loss_fn, weight_fn)
    assert (result["update_successful"], result["grad_norm"]) == (0.0, 0.0)
    assert engine.eval_batch(data, loss_fn, weight_fn).item() == 0.0
    _assert_same_parameters(engine, reference)


def test_train_batch_nan_loss_skips_the_step_and_lr_goes_on(model_dirs: dict[str, str]) -> None:
    spec = FinetuneSpec(total_train_epochs=1, dataset_size=10, train_batch_size=1)
    optimizer = {"lr": 1e-2, "lr_scheduler_type": "linear", "warmup_steps_proportion": 0.0}
    engine = build_engine(model_dirs["qwen2"], optimizer=optimizer, ft_spec=spec)
    before = {n: p.clone() for n, p in engine.module.named_parameters()}
    result = engine.train_batch(batch(), lambda *a: loss_fn(*a) * float("nan"), weight_fn)
    engine.lr_scheduler_step()
    assert (result["update_successful"], result["grad_norm"], result["lr"]) == (0.0, 0.0, 1e-2)
    assert all(torch.equal(p, before[n]) for n, p in engine.module.named_parameters())
    result = engine.train_batch(batch(), loss_fn, weight_fn)
    assert result["update_successful"] == 1.0
    assert result["lr"] == pytest.approx(9e-3)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_train_batch_gradient_checkpointing_and_dropout(
    model_dirs: dict[str, str], checkpointing: bool, tmp_path: Path
) -> None:
    tiny_model("qwen2", attention_dropout=0.5).save_pretrained(tmp_path)
    engine = build_engine(str(tmp_path), gradient_checkpointing=checkpointing, disable_dropout=True)
    reference = _reference(str(tmp_path))  # in eval mode: no dropout
    result = engine.train_batch(batch(), loss_fn, weight_fn)
    _, norm = reference_step(reference, batch(), adamw(reference))
    assert result["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_train_batch_bfloat16_keeps_fp32_masters_and_learns(model_dirs: dict[str, str]) -> None:
    engine = build_engine(model_dirs["qwen2"], dtype="bfloat16", mb_spec={"n_mbs": 3})
    exact = build_engine(model_dirs["qwen2"])
    losses = []
    for _ in range(8):
        losses.append(engine.eval_batch(batch(), loss_fn, weight_fn).item())
        engine.train_batch(batch(), loss_fn, weight_fn)
        exact.train_batch(batch(), loss_fn, weight_fn)
    assert losses[-1] < losses[0] - 0.5
    assert losses[0] == pytest.approx(4.4, abs=1.0)
    assert {p.dtype for p in engine.module.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in engine.module.buffers()} == {torch.float32}
    exact_loss = exact.eval_batch(batch(), loss_fn, weight_fn).item()
    assert engine.eval_batch(batch(), loss_fn, weight_fn).item() == pytest.approx(exact_loss, rel=0.05)


def test_forward_backward_batch_materialises_logits_for_callbacks(model_dirs: dict[str, str]) -> None:
    path, data = model_dirs["qwen2"], batch()
    engine, reference = build_engine(path), _reference(path)
    packed = pack(data)
    micro_batches = split_micro_batches(packed, engine_config(path, mb_spec={"n_mbs": 2}).mb_spec)
    total = weight_fn(packed.as_loss_input())

    def process(logits: Any, packed_input: dict[str, Any]) -> Any:
        logp = torch.log_softmax(logits, -1)
        labels = torch.roll(packed_input["input_ids"], -1)
        chosen, entropy = logp.gather(1, labels[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)
        return loss_fn(chosen, entropy, packed_input) * weight_fn(packed_input) / total

    engine.optimizer_zero_grad()
    engine.forward_backward_batch(micro_batches, process)
    result = engine.optimizer_step()
    engine.step_lr_scheduler()
    _, norm = reference_step(reference, data, adamw(reference))
    assert result["grad_norm"] == pytest.approx(norm, rel=1e-5)
    _assert_same_parameters(engine, reference)


def test_loss_fn_vocab_range_is_passed_when_it_is_named(model_dirs: dict[str, str]) -> None:
    seen = {}

    def with_range(logprobs: Any, entropy: Any, packed_input: Any, vocab_min_logits: Any, vocab_max_logits: Any) -> Any:
        seen["ok"] = bool((vocab_min_logits <= vocab_max_logits).all())
        return loss_fn(logprobs, entropy, packed_input)

    build_engine(model_dirs["qwen2"]).eval_batch(batch(), with_range, weight_fn)
    assert seen == {"ok": True}


def test_engine_without_optimizer_scores_and_refuses_to_train(model_dirs: dict[str, str]) -> None:
    engine = build_engine(model_dirs["qwen2"], optimizer=None)
    assert len(engine.forward_batch(batch())) == len(LENGTHS)
    with pytest.raises(EngineError, match="optimizer"):
        engine.train_batch(batch(), loss_fn, weight_fn)


def test_init_from_scratch_ignores_the_weights(model_dirs: dict[str, str]) -> None:
    torch.manual_seed(7)
    engine = build_engine(model_dirs["qwen2"], init_from_scratch=True)
    loaded = build_engine(model_dirs["qwen2"])
    a, b = engine.module.get_input_embeddings().weight, loaded.module.get_input_embeddings().weight
    assert not torch.equal(a, b)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"backend": "fsdp:d2"}, ConfigError, "scheduler.type=local"),
        ({"backend": "fsdp:d2t2"}, ConfigError, "fsdp:d2t2 needs 4 processes"),
        ({"backend": "fsdp:c2"}, ConfigError, "needs 2 processes"),
        ({"attn_impl": "flash_attention_2"}, ConfigError, "attn_impl=flash_attention_2"),
        ({"use_kernels": True}, UnsupportedFeatureError, "hub kernels"),
        ({"dtype": "float16"}, UnsupportedFeatureError, "loss scaling"),
    ],
)
def test_engine_what_it_cannot_do_is_refused_by_name(
    model_dirs: dict[str, str], settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        build_engine(model_dirs["qwen2"], **settings)
    assert isinstance(caught.value, ValueError)


def test_engine_life_cycle_and_topology_in_one_process(model_dirs: dict[str, str]) -> None:
    engine = FSDPEngine(engine_config(model_dirs["qwen2"]))
    with pytest.raises(EngineError, match="not initialized"):
        engine.forward_batch(batch())
    engine.create_process_group()
    engine.initialize(None, None)
    assert engine.initialized
    assert not torch.distributed.is_initialized()
    assert (engine.data_parallel_rank, engine.data_parallel_world_size) == (0, 1)
    assert engine.is_data_parallel_head()
    with pytest.raises((DataError, ValueError)):
        engine.forward_batch([])
    with pytest.raises(EngineError, match="connect"):
        engine.update_weights(WeightUpdateMeta(type="inproc", version=1))
    assert engine.get_device_stats().mem_total > 0
    engine.set_version(3)
    assert engine.get_version() == 3
    engine.destroy()
    engine.destroy()
    assert not engine.initialized


def test_from_pretrained_shortcut_trains(model_dirs: dict[str, str]) -> None:
    engine = FSDPEngine.from_pretrained(model_dirs["qwen2"], dtype="float32", learning_rate=1e-2)
    assert engine.train().train_batch(batch(), loss_fn, weight_fn)["lr"] == 1e-2
