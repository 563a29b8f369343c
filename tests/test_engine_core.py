"""Core pieces of the train engines: schedule, loss scaling, head, attention, shards, weight records."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from areal.api.config.fields import DefaultStr
from areal.api.config.optimizer import OptimizerConfig
from areal.api.io_struct import FinetuneSpec
from areal.engine.core import lm_head, model
from areal.engine.core.checkpoint import rng_state, set_rng_state
from areal.engine.core.lm_head import token_output
from areal.engine.core.lr_schedule import LrSchedule, lr_factor
from areal.engine.core.optimizer import ClippedOptimizer, MasterShards, PlainShards
from areal.engine.core.weight_sync import InProcessPublisher, ParamRecord, checksum, compare_records
from areal.models.transformers import varlen_attention as varlen
from areal.utils.errors import ConfigError, WeightSyncError

VECTORS = Path(__file__).parent / "vectors"
CPU = torch.device("cpu")


def _vector(name: str) -> dict[str, Any]:
    return json.loads((VECTORS / f"{name}.json").read_text())


# --- learning rate


@pytest.mark.parametrize(
    ("key", "kind", "min_ratio"),
    [
        ("cosine", "cosine", 0.1),
        ("cosine_min0", "cosine", 0.0),
        ("linear", "linear", 0.1),
        ("constant", "constant", 0.1),
    ],
)
def test_lr_factor_vector_matches(key: str, kind: str, min_ratio: float) -> None:
    vector = _vector("lr_schedules")
    total, warmup = vector["inputs"]["total"], vector["inputs"]["warmup"]
    values = [lr_factor(kind, step, total, warmup, min_ratio) for step in range(11)]
    torch.testing.assert_close(torch.tensor(values), torch.tensor(vector["outputs"][key]), rtol=0, atol=1e-6)


def test_lr_factor_warmup_is_subtracted_once() -> None:
    # 220 steps, 22 of warm-up, cosine to 0: a schedule that subtracts the warm-up twice reaches 0 at step 198.
    factors = [lr_factor("cosine", step, 220, 22) for step in range(221)]
    assert factors[22] == 1.0
    assert factors[121] == pytest.approx(0.5, abs=1e-9)
    assert factors[219] > 0
    assert factors[220] == pytest.approx(0, abs=1e-12)


def test_lr_schedule_decay_without_run_length_is_refused() -> None:
    with pytest.raises(ConfigError, match="lr_scheduler_type=cosine"):
        LrSchedule(OptimizerConfig(lr_scheduler_type="cosine"), None)


def test_lr_schedule_steps_once_per_call() -> None:
    config = OptimizerConfig(lr=2.0, lr_scheduler_type="linear", warmup_steps_proportion=0.2)
    schedule = LrSchedule(config, FinetuneSpec(total_train_epochs=1, dataset_size=80, train_batch_size=8))
    seen = []
    for _ in range(10):
        seen.append(schedule.lr)
        schedule.step()
    assert seen == pytest.approx([0.0, 1.0, 2.0, 1.75, 1.5, 1.25, 1.0, 0.75, 0.5, 0.25])


# --- output head


def _reference_head(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    logp = torch.log_softmax(hidden @ weight.t() / temperature, dim=-1)
    return logp.gather(1, labels[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_token_output_values_and_gradients_match_full_logits(
    monkeypatch: pytest.MonkeyPatch, keep: bool, temperature: float
) -> None:
    monkeypatch.setattr(lm_head, "KEEP_ELEMENTS", 1 << 22 if keep else 0)
    monkeypatch.setattr(lm_head, "CHUNK_ROWS", 64)  # several chunks, the last one partial
    torch.manual_seed(0)
    hidden = torch.randn(150, 8, dtype=torch.float64).float()
    weight = torch.randn(37, 8)
    labels = torch.randint(0, 37, (150,))
    upstream = torch.randn(2, 150)
    results = []
    for fused in (True, False):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if fused:
            out = token_output(h, w, labels, None, temperature)
            logp, entropy = out.logprobs, out.entropy
        else:
            logp, entropy = _reference_head(h, w, labels, temperature)
        (logp * upstream[0] + entropy * upstream[1]).sum().backward()
        results.append((logp, entropy, h.grad, w.grad))
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(("vocabulary", "rows"), [(64, 1024), (49152, 170), (151936, 128)])
def test_head_chunk_on_a_cpu_is_bounded_in_elements_but_for_a_least_number_of_rows(vocabulary: int, rows: int) -> None:
    weight = torch.empty(vocabulary, 1)
    buffer = lm_head._ChunkBuffer(torch.empty(rows * 3, 1), weight, keep=False)
    assert buffer.chunks() == [(0, rows), (rows, 2 * rows), (2 * rows, 3 * rows)]


def test_token_output_selected_rows_leave_zeros_and_no_gradient_elsewhere() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(6, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    labels, rows = torch.arange(6), torch.tensor([1, 4])
    out = token_output(hidden, weight, labels, rows, 1.0)
    out.logprobs.sum().backward()
    reference, entropy = _reference_head(hidden, weight, labels, 1.0)
    torch.testing.assert_close(out.logprobs[rows], reference[rows], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out.entropy[rows], entropy[rows], rtol=1e-6, atol=1e-6)
    others = torch.tensor([0, 2, 3, 5])
    assert torch.equal(out.logprobs[others], torch.zeros(4))
    assert torch.equal(hidden.grad[others], torch.zeros(4, 4))


def test_token_output_no_rows_still_gives_zero_gradients() -> None:
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    out = token_output(hidden, weight, torch.zeros(3, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), 1.0)
    (out.logprobs.sum() * 0).backward()
    assert torch.equal(hidden.grad, torch.zeros(3, 4))
    assert torch.equal(weight.grad, torch.zeros(5, 4))


def test_token_output_temperature_known_values() -> None:
    # logits [2, 1, 0], token 0: logp -0.4076 and entropy .8324 at T=1; -0.1429 and .4411 at T=.5.
    hidden, head = torch.ones(1, 1), torch.tensor([[2.0], [1.0], [0.0]])
    for temperature, logp, entropy in ((1.0, -0.4076, 0.8324), (0.5, -0.1429, 0.4411)):
        out = token_output(hidden, head, torch.tensor([0]), None, temperature)
        assert out.logprobs.item() == pytest.approx(logp, abs=1e-4)
        assert out.entropy.item() == pytest.approx(entropy, abs=1e-4)
        assert out.vocab_max_logits.item() == pytest.approx(2 / temperature)
        assert out.vocab_min_logits.item() == pytest.approx(0)


# --- attention


class _Module(nn.Module):
    num_key_value_groups = 2


def _attention_inputs(lens: list[int], seed: int = 0) -> tuple[list[torch.Tensor], torch.Tensor]:
    torch.manual_seed(seed)
    total = sum(lens)
    tensors = [torch.randn(1, total, heads, 8).transpose(1, 2).requires_grad_() for heads in (4, 2, 2)]
    return tensors, torch.tensor([0, *np.cumsum(lens)], dtype=torch.int32)


def _alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lens: list[int], window: int | None) -> torch.Tensor:
    outputs, start = [], 0
    for n in lens:
        part = slice(start, start + n)
        scores = q[0, :, part] @ k[0, :, part].repeat_interleave(2, 0).transpose(1, 2) * 8**-0.5
        distance = torch.arange(n)[:, None] - torch.arange(n)[None, :]
        hidden = (distance < 0) | (distance >= (window or n))
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        outputs.append((weights @ v[0, :, part].repeat_interleave(2, 0)).transpose(0, 1))
        start += n
    return torch.cat(outputs)[None]


@pytest.mark.parametrize(
    "lens", [[7], [5, 5, 5], [1, 9, 3], [40] + [3] * 50, [300, 1, 299, 2, 17], [1, 1, 1]], ids=lambda x: f"{len(x)}seqs"
)
@pytest.mark.parametrize("window", [None, 4])
def test_varlen_attention_packed_equals_each_sequence_alone(lens: list[int], window: int | None) -> None:
    (q, k, v), cu_seqlens = _attention_inputs(lens)
    out, _ = varlen.varlen_attention_forward(
        _Module(), q, k, v, None, scaling=8**-0.5, sliding_window=window, cu_seq_lens_q=cu_seqlens
    )
    upstream = torch.randn_like(out)
    ours = torch.autograd.grad((out * upstream).sum(), (q, k, v))
    reference_out = _alone(q, k, v, lens, window)
    reference = torch.autograd.grad((reference_out * upstream).sum(), (q, k, v))
    torch.testing.assert_close(out, reference_out, rtol=1e-5, atol=1e-5)
    for a, b in zip(ours, reference, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-5)


def test_plan_attention_many_short_sequences_makes_few_blocks() -> None:
    lens = torch.randint(8, 17, (256,), generator=torch.Generator().manual_seed(0)).tolist()
    plan = varlen.plan_attention(torch.tensor([0, *np.cumsum(lens)]), CPU)
    assert len(plan.blocks) <= 8
    assert sum(block.slots for block in plan.blocks) <= 1.2 * sum(lens)


def test_varlen_attention_padding_mask_is_refused() -> None:
    (q, k, v), _ = _attention_inputs([3])
    with pytest.raises(ValueError, match="attention_mask"):
        varlen.varlen_attention_forward(_Module(), q, k, v, torch.ones(1, 3))


def test_resolve_attention_default_falls_back_and_written_value_is_refused() -> None:
    assert (
        model.resolve_attention(DefaultStr("flash_attention_2"), CPU, torch.float32, training=True)
        == varlen.VARLEN_ATTENTION
    )
    assert model.resolve_attention("sdpa", CPU, torch.float32, training=True) == "sdpa"
    for written in ("flash_attention_2", "flash_attention_3", "flex_attention", "kernels-community/flash-attn"):
        with pytest.raises(ConfigError, match=f"attn_impl={written}"):
            model.resolve_attention(written, CPU, torch.float32, training=True)


# --- loss scaling, optimizer


def test_loss_scaling_vector_gives_global_weighted_mean() -> None:
    vector = _vector("loss_scaling")
    weights, losses = torch.tensor(vector["inputs"]["weights"]), torch.tensor(vector["inputs"]["losses"])
    total, dp = weights.sum(), vector["config"]["dp"]
    scaled = losses * weights * (dp / total)  # what TrainLoop back-propagates per micro-batch, before its sum
    torch.testing.assert_close(scaled[0], torch.tensor(vector["outputs"]["scaled_rank0"]), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(scaled[1], torch.tensor(vector["outputs"]["scaled_rank1"]), rtol=1e-6, atol=1e-6)
    assert scaled.sum(1).mean().item() == pytest.approx(vector["outputs"]["dp_mean"])


def _optimizer(module: nn.Module, **settings: Any) -> ClippedOptimizer:
    config = OptimizerConfig(**{"lr": 0.1, "weight_decay": 0.0, **settings})
    return ClippedOptimizer(config, PlainShards(module), LrSchedule(config, None), None)


def test_optimizer_step_clips_to_global_norm() -> None:
    module = nn.Linear(2, 1, bias=False)
    start = module.weight.detach().clone()
    module.weight.grad = torch.tensor([[3.0, 4.0]])
    result = _optimizer(module, type="sgd", gradient_clipping=1.0).step()
    assert result["grad_norm"] == pytest.approx(5.0)
    expected = start - 0.1 * torch.tensor([[3.0, 4.0]]) / (5.0 + 1e-6)
    torch.testing.assert_close(module.weight.detach(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_optimizer_step_non_finite_gradient_skips(bad: float) -> None:
    module = nn.Linear(2, 1, bias=False)
    start = module.weight.detach().clone()
    module.weight.grad = torch.tensor([[1.0, bad]])
    result = _optimizer(module).step()
    assert result == {"update_successful": 0.0, "grad_norm": 0.0, "lr": 0.1, "nonfinite_steps": 1.0}
    assert torch.equal(module.weight, start)
    assert module.weight.grad is None


def test_master_shards_small_steps_are_not_lost() -> None:
    # 100 steps of 1e-4 on a bf16 weight of 1.0 (spacing 2**-8 below it): rounding every step would lose them all.
    module = nn.Linear(1, 1, bias=False)
    nn.init.ones_(module.weight)
    shards = MasterShards(module, torch.bfloat16)
    config = OptimizerConfig(type="sgd", lr=1e-4, weight_decay=0.0, gradient_clipping=1e9)
    optimizer = ClippedOptimizer(config, shards, LrSchedule(config, None), None)
    for _ in range(100):
        optimizer.zero_grad()
        module(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    assert module.weight.dtype == torch.bfloat16
    assert module.weight.item() == pytest.approx(0.99, abs=4e-3)
    assert next(iter(shards.shards.values())).item() == pytest.approx(0.99, abs=1e-5)


# --- random state, weight records


def test_rng_state_roundtrip_repeats_every_generator() -> None:
    random.gauss(0, 1)
    np.random.normal()
    state = rng_state()

    def draw() -> list[float]:
        return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.normal(), torch.rand(()).item()]

    first = draw()
    set_rng_state(state)
    assert draw() == first


class _Receiver:
    def __init__(self, corrupt: str | None = None) -> None:
        self.corrupt = corrupt

    def stage_weights(self, pairs: Any, version: int) -> list[ParamRecord]:
        copies = {name: tensor.clone() for name, tensor in pairs}
        if self.corrupt:
            copies[self.corrupt].view(-1)[0] += 1
        return [ParamRecord.of(name, tensor) for name, tensor in copies.items()]


def test_in_process_publisher_records_must_be_equal() -> None:
    weights = {"a": torch.randn(3, 4), "b": torch.randn(2).bfloat16()}
    records = InProcessPublisher(lambda: iter(weights.items()), _Receiver()).stage(1)
    assert [r.name for r in records] == ["a", "b"]
    assert records[1].dtype == "bfloat16"
    with pytest.raises(WeightSyncError, match="v2: b was sent"):
        InProcessPublisher(lambda: iter(weights.items()), _Receiver(corrupt="b")).stage(2)


def test_compare_records_missing_and_extra_are_errors() -> None:
    a, b = ParamRecord.of("a", torch.zeros(1)), ParamRecord.of("b", torch.zeros(1))
    with pytest.raises(WeightSyncError, match="did not record b"):
        compare_records([a, b], [a], 1)
    with pytest.raises(WeightSyncError, match="never sent"):
        compare_records([a], [a, b], 1)


def test_checksum_any_bit_changes_it() -> None:
    x = torch.randn(1000)
    y = x.clone()
    y.view(torch.int32)[500] ^= 1
    assert checksum(x) != checksum(y)
    assert checksum(x) == checksum(x.clone())
