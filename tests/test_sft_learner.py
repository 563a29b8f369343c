"""The SFT learner on a real engine with a tiny model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from areal.api.cli_args import MicroBatchSpec, OptimizerConfig, TrainEngineConfig
from areal.engine.fsdp_engine import FSDPEngine
from areal.trainer.sft.learner import LMLearner, align_rows
from areal.utils import stats_tracker
from areal.utils.batch import pack
from areal.utils.data import collate_samples_to_list, concat_padded_tensors
from areal.utils.errors import DataError
from tests.fakes import tiny_model

SAMPLES = [
    {"input_ids": [5, 6, 7, 1], "loss_mask": [0, 0, 1, 1]},
    {"input_ids": [9, 8, 7, 6, 5, 1], "loss_mask": [0, 1, 1, 1, 1, 1]},
    {"input_ids": [3, 4], "loss_mask": [0, 0]},
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(path)
    return str(path)


@pytest.fixture(autouse=True)
def _fresh_statistics():
    stats_tracker.export_all()
    yield
    stats_tracker.export_all()


def build_learner(path: str, **settings: Any) -> LMLearner:
    optimizer = OptimizerConfig(lr=1e-2, weight_decay=0.0, warmup_steps_proportion=0.0)
    config = TrainEngineConfig(
        experiment_name="e",
        trial_name="t",
        backend="fsdp:d1",
        path=path,
        dtype="float32",
        optimizer=optimizer,
        **settings,
    )
    engine = FSDPEngine(config)
    engine.create_process_group()
    engine.initialize(None, None)
    return LMLearner(engine)


def expected_losses(model: torch.nn.Module) -> list[torch.Tensor]:
    """Negative log-likelihood of each sample's trained tokens, by plain transformers."""
    result = []
    for sample in SAMPLES:
        ids = torch.tensor(sample["input_ids"])
        with torch.no_grad():
            logp = model(ids[None]).logits[0, :-1].log_softmax(-1)
        picked = -logp[torch.arange(len(ids) - 1), ids[1:]]
        result.append(picked[torch.tensor(sample["loss_mask"])[1:] == 1])
    return result


def test_evaluate_lm_equals_plain_transformers(model_dir):
    learner = build_learner(model_dir)
    losses = expected_losses(tiny_model())

    loss = learner.evaluate_lm(collate_samples_to_list(SAMPLES))
    stats = stats_tracker.export_all()

    torch.testing.assert_close(loss, torch.cat(losses).mean(), rtol=1e-5, atol=1e-5)
    assert stats["sft-eval/loss/avg"] == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)
    perplexities = [x.mean().exp().item() for x in losses if len(x)]
    assert stats["sft-eval/ppl/avg"] == pytest.approx(sum(perplexities) / 2, rel=1e-5)
    assert stats["sft-eval/n_seqs"] == 2  # a sequence without a trained token has no perplexity
    assert stats["sft-eval/n_valid_tokens"] == 7


def test_train_lm_lowers_the_loss_and_logs(model_dir):
    learner = build_learner(model_dir)
    rows = collate_samples_to_list(SAMPLES)

    first = learner.evaluate_lm(rows)
    for _ in range(5):
        learner.train_lm(rows)
    stats = stats_tracker.export_all()

    assert learner.evaluate_lm(rows) < first
    assert stats["sft/update_successful"] == 1.0
    assert stats["sft/n_tokens"] == 5 * 12
    assert stats["sft/prompt_tokens"] == 5 * 5
    assert {"sft/loss/avg", "sft/ppl/avg", "sft/grad_norm", "sft/lr"} <= stats.keys()
    assert stats["sft/vocab_min_logits/avg"] < stats["sft/vocab_max_logits/avg"]


def test_train_lm_does_not_depend_on_the_micro_batch_cut_or_the_input_form(model_dir):
    rows = collate_samples_to_list(SAMPLES)
    parameters = []
    for data, spec in ((rows, {}), (rows, {"n_mbs": 3}), (concat_padded_tensors(rows), {}), (pack(rows), {"n_mbs": 2})):
        learner = build_learner(model_dir, mb_spec=MicroBatchSpec(**spec))
        learner.train_lm(data)
        parameters.append(torch.cat([p.detach().flatten() for p in learner.engine.module.parameters()]))

    for other in parameters[1:]:
        torch.testing.assert_close(other, parameters[0], rtol=1e-5, atol=1e-5)


def test_train_lm_all_masked_rows_change_nothing(model_dir):
    learner = build_learner(model_dir)
    before = torch.cat([p.detach().flatten().clone() for p in learner.engine.module.parameters()])

    learner.train_lm(collate_samples_to_list(SAMPLES[2:]))
    stats = stats_tracker.export_all()

    assert torch.equal(before, torch.cat([p.detach().flatten() for p in learner.engine.module.parameters()]))
    assert all(value == value for value in stats.values())


def test_align_rows_rolls_inside_sequences_and_needs_a_mask():
    batch = align_rows(collate_samples_to_list(SAMPLES[:2]))

    assert batch.tokens["loss_mask"].int().tolist() == [0, 1, 1, 0, 1, 1, 1, 1, 1, 0]
    with pytest.raises(DataError, match="loss_mask"):
        align_rows(collate_samples_to_list([{"input_ids": [1, 2]}]))
