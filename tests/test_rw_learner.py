"""The reward-model learner on a real value model, against plain transformers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from areal.api.cli_args import FailureCaptureConfig, MicroBatchSpec, OptimizerConfig, TrainEngineConfig
from areal.api.io_struct import SaveLoadMeta
from areal.engine.core.replay import replay_step
from areal.engine.fsdp_engine import FSDPEngine
from areal.trainer.pairs import collate_pairs, empty_pair
from areal.trainer.rw.learner import RWLearner
from areal.trainer.rw_trainer import RWTrainer
from areal.utils import stats_tracker
from areal.utils.errors import DataError, EngineError
from tests.fakes import save_tiny_model
from tests.pair_runs import planted_pairs

PAIRS = planted_pairs(5)
SGD = OptimizerConfig(type="sgd", lr=1.0, weight_decay=0.0, warmup_steps_proportion=0.0)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _fresh_statistics():
    stats_tracker.export_all()
    yield
    stats_tracker.export_all()


def build_engine(path: str, **settings: Any) -> FSDPEngine:
    settings.setdefault("optimizer", SGD)
    names = {"experiment_name": "e", "trial_name": "t", "backend": "fsdp:d1"}
    engine = FSDPEngine(TrainEngineConfig(**{"is_critic": True, **names, **settings}, path=path, dtype="float32"))
    engine.create_process_group()
    engine.initialize(None, None)
    return engine


def build(path: str, **settings: Any) -> RWLearner:
    return RWLearner(build_engine(path, **settings))


def flat(learner: RWLearner) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in learner.engine.module.parameters()])


def test_evaluate_rw_equals_the_saved_classifier_of_plain_transformers(model_dir: str, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    learner = build(model_dir, mb_spec=MicroBatchSpec(n_mbs=2))
    learner.engine.save(SaveLoadMeta(path=str(tmp_path / "saved"), weight_format="hf", with_optim=False))
    reference = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved", num_labels=1).eval()

    loss = learner.evaluate_rw(collate_pairs(PAIRS, with_mask=False))
    stats = stats_tracker.export_all()

    with torch.no_grad():
        scores = [
            [float(reference(torch.tensor([pair[f"{side}_ids"]])).logits[0, -1]) for side in ("chosen", "rejected")]
            for pair in PAIRS
        ]
    chosen, rejected = torch.tensor(scores).unbind(1)
    assert loss.item() == pytest.approx(-F.logsigmoid(chosen - rejected).mean().item(), rel=1e-5)
    assert stats["rw-eval/n_pairs"] == 5
    assert stats["rw-eval/pos_score/avg"] == pytest.approx(chosen.mean().item(), rel=1e-4, abs=1e-5)
    assert stats["rw-eval/neg_score/avg"] == pytest.approx(rejected.mean().item(), rel=1e-4, abs=1e-5)
    assert stats["rw-eval/margin/avg"] == pytest.approx((chosen - rejected).mean().item(), rel=1e-3, abs=1e-5)
    assert stats["rw-eval/correct_ratio/avg"] == pytest.approx((chosen > rejected).float().mean().item())


def test_train_rw_does_not_depend_on_the_micro_batch_cut_or_the_order(model_dir: str) -> None:
    tables = collate_pairs(PAIRS, with_mask=False)
    parameters = []
    for data, spec in ((tables, {}), (tables, {"n_mbs": 5}), (tables[::-1], {"n_mbs": 2, "granularity": 1})):
        learner = build(model_dir, mb_spec=MicroBatchSpec(**spec))
        learner.train_rw(data)
        parameters.append(flat(learner))

    for other in parameters[1:]:
        torch.testing.assert_close(other, parameters[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("empty", ["chosen_ids", "rejected_ids"])
def test_train_rw_pair_with_an_empty_side_changes_nothing(model_dir: str, empty: str) -> None:
    results = []
    for rows in (PAIRS[:2], [*PAIRS[:2], {**PAIRS[2], empty: []}]):
        learner = build(model_dir, mb_spec=MicroBatchSpec(n_mbs=len(rows)))
        learner.train_rw(RWTrainer.collate(rows))
        stats = stats_tracker.export_all()
        results.append((stats["rw/loss/avg"], stats["rw/n_pairs"], flat(learner)))

    assert results[1][0] == pytest.approx(results[0][0], rel=1e-6)
    assert results[0][1] == results[1][1] == 2
    torch.testing.assert_close(results[1][2], results[0][2], rtol=1e-5, atol=1e-6)


def test_train_rw_no_valid_pair_changes_nothing_and_gives_no_nan(model_dir: str) -> None:
    learner = build(model_dir)
    before = flat(learner)

    learner.train_rw([empty_pair()])
    stats = stats_tracker.export_all()

    assert stats["rw/update_successful"] == 0.0
    assert torch.equal(before, flat(learner))
    assert all(math.isfinite(value) for value in stats.values())


def test_train_rw_failing_step_replays(model_dir: str, tmp_path: Path) -> None:
    learner = build(model_dir, failure_capture=FailureCaptureConfig(directory=str(tmp_path)))
    with torch.no_grad():
        learner.engine.module.score.weight[0, 0] = math.inf

    learner.train_rw(collate_pairs(PAIRS, with_mask=False))
    report = replay_step(tmp_path / "step_0")

    assert stats_tracker.export_all()["rw/update_successful"] == 0.0
    assert report.reproduced, report.lines()


def test_rw_learner_bad_input_is_named(model_dir: str) -> None:
    with pytest.raises(EngineError, match=r"actor\.is_critic=true"):
        RWLearner(build_engine(model_dir, is_critic=False))
    table = {k: v[:1] for k, v in collate_pairs(PAIRS[:1], with_mask=False)[0].items()}
    with pytest.raises(DataError, match="1 sequences are not pairs"):
        build(model_dir).train_rw([table])
