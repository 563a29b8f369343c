"""Prompts that sequences of a group share: computed once, with the numbers of computing them every time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from areal.api.cli_args import OptimizerConfig, TrainEngineConfig
from areal.engine.core import model as model_module
from areal.engine.core.shared_prefix import PrefixSharing, find_shared_prefixes
from areal.engine.fsdp_engine import FSDPEngine
from areal.utils.batch import PackedBatch, pack
from tests.fakes import VOCAB, save_tiny_model


def rows(*sequences: list[int], groups: list[int]) -> PackedBatch:
    """Sequences of token ids with group ids; the last two tokens of each are trained."""
    width = max(map(len, sequences))
    ids = torch.zeros(len(sequences), width, dtype=torch.int64)
    mask = torch.zeros(len(sequences), width, dtype=torch.bool)
    trained = torch.zeros_like(ids)
    for i, tokens in enumerate(sequences):
        ids[i, : len(tokens)] = torch.tensor(tokens)
        mask[i, : len(tokens)] = True
        trained[i, max(0, len(tokens) - 3) : len(tokens) - 1] = 1
    return pack({"input_ids": ids, "attention_mask": mask, "loss_mask": trained, "group_id": torch.tensor(groups)})


def test_find_shared_prefixes_keeps_what_differs_and_points_to_equals() -> None:
    batch = rows([5, 6, 7, 8], [5, 6, 9], [5, 6, 7, 8], [5, 6, 7], groups=[1, 1, 1, 2])
    sharing = find_shared_prefixes(batch)
    assert sharing is not None
    assert sharing.keep.tolist() == [0, 1, 2, 3, 6, 11, 12, 13]
    assert sharing.source.tolist() == [0, 1, 2, 3, 0, 1, 4, 0, 1, 2, 3, 5, 6, 7]
    torch.testing.assert_close(batch.tokens["input_ids"][sharing.keep][sharing.source], batch.tokens["input_ids"])


def test_find_shared_prefixes_nothing_in_common_gives_none() -> None:
    assert find_shared_prefixes(rows([5, 6, 7], [8, 6, 7], groups=[1, 1])) is None
    assert find_shared_prefixes(rows([5, 6, 7], [5, 6, 7], groups=[1, 2])) is None


def test_expand_backward_adds_gradients_of_repeats() -> None:
    sharing = PrefixSharing(source=torch.tensor([0, 1, 2, 0, 1, 3, 0]), keep=torch.tensor([0, 1, 2, 5]))
    x = torch.randn(4, 3, 2, requires_grad=True, dtype=torch.float64)
    weight = torch.randn(7, 3, 2, dtype=torch.float64)
    (sharing.expand(x) * weight).sum().backward()
    expected = torch.zeros(4, 3, 2, dtype=torch.float64).index_add_(0, sharing.source, weight)
    torch.testing.assert_close(x.grad, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_train_batch_with_shared_prompts_equals_every_prompt_computed(
    arch: str, checkpointing: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_tiny_model(tmp_path / "model", arch)
    generator = torch.Generator().manual_seed(0)

    def draw(n: int) -> list[int]:
        return torch.randint(2, VOCAB, (n,), generator=generator).tolist()

    prompts = [draw(9), draw(4)]
    sequences = [prompts[g] + draw(3 + i) for g in (0, 1) for i in range(4)] + [draw(6)]
    batch = rows(*sequences, groups=[0] * 4 + [1] * 4 + [2])
    assert find_shared_prefixes(batch) is not None

    def step() -> tuple[dict[str, float], dict[str, torch.Tensor], torch.Tensor]:
        config = TrainEngineConfig(
            experiment_name="t", trial_name="t", backend="fsdp:d1", path=path, dtype="float32",
            gradient_checkpointing=checkpointing, optimizer=OptimizerConfig(type="sgd", lr=0.1),
        )  # fmt: skip
        engine = FSDPEngine(config)
        engine.create_process_group()
        engine.initialize(None, None)
        logprobs = engine.forward_batch(batch)
        engine.train()
        stats = engine.train_batch(
            batch,
            lambda logprobs, entropy, packed: -(logprobs + 0.1 * entropy)[packed["loss_mask"] != 0].mean(),
            lambda packed: packed["loss_mask"].count_nonzero(),
            token_mask="loss_mask",
        )
        return stats, {name: tensor.clone() for name, tensor in engine.named_full_tensors()}, logprobs

    shared_stats, shared_weights, shared_logprobs = step()
    monkeypatch.setattr(model_module, "find_shared_prefixes", lambda batch: None)
    stats, weights, logprobs = step()

    torch.testing.assert_close(shared_logprobs, logprobs, rtol=0, atol=2e-5)
    assert shared_stats["grad_norm"] == pytest.approx(stats["grad_norm"], rel=1e-5)
    for name, expected in weights.items():
        torch.testing.assert_close(shared_weights[name], expected, rtol=1e-5, atol=1e-6)
