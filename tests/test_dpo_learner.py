"""The DPO learner on a real engine with a tiny model, against plain transformers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from areal.api.cli_args import DPOEngineConfig, FailureCaptureConfig, MicroBatchSpec, OptimizerConfig
from areal.engine.core.replay import replay_step
from areal.engine.fsdp_engine import FSDPEngine
from areal.trainer.dpo.learner import DPOLearner
from areal.trainer.dpo_trainer import DPOTrainer
from areal.trainer.pairs import collate_pairs, empty_pair, pack_pairs
from areal.utils import stats_tracker
from areal.utils.errors import ConfigError, DataError
from tests.fakes import save_tiny_model, tiny_model
from tests.pair_runs import planted_pairs

PAIRS = planted_pairs(5)
ONE_SIDED = {"chosen_ids": [5, 6, 7], "rejected_ids": [], "chosen_loss_mask": [0, 1, 1], "rejected_loss_mask": []}
NO_COMPLETION = {**PAIRS[0], "rejected_loss_mask": [0] * len(PAIRS[0]["rejected_ids"])}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _fresh_statistics():
    stats_tracker.export_all()
    yield
    stats_tracker.export_all()


def build(path: str, **settings: Any) -> DPOLearner:
    settings.setdefault("optimizer", OptimizerConfig(lr=1e-2, weight_decay=0.0, warmup_steps_proportion=0.0))
    names = {"experiment_name": "e", "trial_name": "t", "backend": "fsdp:d1"}
    config = DPOEngineConfig(**names, path=path, dtype="float32", **settings)
    engine = FSDPEngine(config)
    engine.create_process_group()
    engine.initialize(None, None)
    return DPOLearner(config, engine)


def with_reference(rows: list[dict[str, Any]], seed: int = 3) -> list[dict[str, Any]]:
    """Tables with log-probs of a reference that differs from the policy."""
    draw = torch.Generator().manual_seed(seed)
    tables = collate_pairs(rows, with_mask=True)
    return [{**table, "ref_logprobs": -torch.rand(table["input_ids"].shape, generator=draw) * 3} for table in tables]


def side_sums(model: torch.nn.Module, table: dict[str, Any]) -> list[tuple[float, float, int]]:
    """Policy sum, reference sum and completion length of both sides, by plain transformers."""
    result = []
    for row in range(2):
        length = int(table["attention_mask"][row].sum())
        ids = table["input_ids"][row, :length]
        with torch.no_grad():
            logp = model(ids[None]).logits[0, :-1].double().log_softmax(-1)
        picked = logp[torch.arange(length - 1), ids[1:]]
        mask = table["loss_mask"][row, 1:length] != 0
        reference = table["ref_logprobs"][row, : length - 1].double()
        result.append((picked[mask].sum().item(), reference[mask].sum().item(), int(mask.sum())))
    return result


def expected_loss(model: torch.nn.Module, tables: list[dict[str, Any]], loss_type: str, smoothing: float) -> float:
    beta, losses = 0.1, []
    for table in tables:
        (pc, rc, nc), (pr, rr, nr) = side_sums(model, table)
        if loss_type == "ipo":
            losses.append(((pc - rc) / nc - (pr - rr) / nr - 1 / (2 * beta)) ** 2)
        else:
            z = torch.tensor(beta * ((pc - pr) - (rc - rr)), dtype=torch.float64)
            losses.append(float(-(1 - smoothing) * F.logsigmoid(z) - smoothing * F.logsigmoid(-z)))
    return sum(losses) / len(losses)


@pytest.mark.parametrize(("loss_type", "smoothing"), [("sigmoid", 0.0), ("sigmoid", 0.2), ("ipo", 0.0)])
def test_evaluate_dpo_equals_plain_transformers(model_dir, loss_type, smoothing):
    learner = build(model_dir, loss_type=loss_type, label_smoothing=smoothing, mb_spec=MicroBatchSpec(n_mbs=3))
    tables = with_reference(PAIRS)

    loss = learner.evaluate_dpo(tables)
    stats = stats_tracker.export_all()

    expected = expected_loss(tiny_model(), tables, loss_type, smoothing)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert stats["dpo-eval/loss/avg"] == pytest.approx(expected, rel=1e-5)
    assert stats["dpo-eval/n_pairs"] == 5
    rewards = [[0.1 * (policy - ref) for policy, ref, _ in side_sums(tiny_model(), table)] for table in tables]
    assert stats["dpo-eval/chosen_reward/avg"] == pytest.approx(sum(r[0] for r in rewards) / 5, rel=1e-4)
    assert stats["dpo-eval/rejected_reward/avg"] == pytest.approx(sum(r[1] for r in rewards) / 5, rel=1e-4)
    assert stats["dpo-eval/reward_margin/avg"] == pytest.approx(sum(r[0] - r[1] for r in rewards) / 5, rel=1e-4)
    assert stats["dpo-eval/reward_accuracy/avg"] == pytest.approx(sum(r[0] > r[1] for r in rewards) / 5)


def test_evaluate_dpo_of_the_reference_itself_is_log_two(model_dir):
    learner = build(model_dir)
    tables = collate_pairs(PAIRS, with_mask=True)
    reference = learner.compute_logp(tables)

    loss = learner.evaluate_dpo([{**t, "ref_logprobs": r} for t, r in zip(tables, reference, strict=True)])

    assert [r.shape for r in reference] == [t["input_ids"].shape for t in tables]
    assert loss.item() == pytest.approx(math.log(2), abs=1e-5)


def test_train_dpo_reference_free_needs_no_reference_and_raises_the_margin(model_dir):
    learner = build(model_dir, reference_free=True)
    tables = collate_pairs(PAIRS, with_mask=True)

    first = learner.evaluate_dpo(tables)
    for _ in range(5):
        learner.train_dpo(tables)
    stats = stats_tracker.export_all()

    assert learner.evaluate_dpo(tables) < first
    assert stats["dpo/update_successful"] == 1.0
    assert {"dpo/loss/avg", "dpo/reward_margin/avg", "dpo/grad_norm", "dpo/lr"} <= stats.keys()


def test_train_dpo_does_not_depend_on_the_micro_batch_cut_the_order_or_the_input_form(model_dir):
    tables = with_reference(PAIRS)
    halves = [{k: v[row : row + 1] for k, v in table.items()} for table in tables for row in range(2)]
    cases = [(tables, {}), (tables, {"n_mbs": 5}), (tables, {"max_tokens_per_mb": 24}), (tables[::-1], {"n_mbs": 2}),
             (halves, {"n_mbs": 3, "granularity": 1}), (pack_pairs(tables), {"n_mbs": 2})]  # fmt: skip
    parameters = []
    for data, spec in cases:
        sgd = OptimizerConfig(type="sgd", lr=1.0, weight_decay=0.0, warmup_steps_proportion=0.0)
        learner = build(model_dir, mb_spec=MicroBatchSpec(**spec), optimizer=sgd)
        learner.train_dpo(data)
        parameters.append(torch.cat([p.detach().flatten() for p in learner.engine.module.parameters()]))

    for other in parameters[1:]:
        torch.testing.assert_close(other, parameters[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("extra", [ONE_SIDED, NO_COMPLETION], ids=["empty-side", "no-completion"])
def test_train_dpo_pair_without_one_side_changes_nothing(model_dir, extra):
    results = []
    for rows in (PAIRS[:2], [*PAIRS[:2], extra]):
        sgd = OptimizerConfig(type="sgd", lr=1.0, weight_decay=0.0, warmup_steps_proportion=0.0)
        learner = build(model_dir, reference_free=True, mb_spec=MicroBatchSpec(n_mbs=len(rows)), optimizer=sgd)
        learner.train_dpo(collate_pairs(rows, with_mask=True))
        stats = stats_tracker.export_all()
        weights = torch.cat([p.detach().flatten() for p in learner.engine.module.parameters()])
        results.append((stats["dpo/loss/avg"], stats["dpo/n_pairs"], weights))

    assert results[1][0] == pytest.approx(results[0][0], rel=1e-6)
    assert results[0][1] == results[1][1] == 2
    torch.testing.assert_close(results[1][2], results[0][2], rtol=1e-5, atol=1e-6)


def test_train_dpo_no_valid_pair_changes_nothing_and_gives_no_nan(model_dir):
    learner = build(model_dir, reference_free=True)
    before = [p.detach().clone() for p in learner.engine.module.parameters()]

    learner.train_dpo([empty_pair()])
    stats = stats_tracker.export_all()

    assert stats["dpo/update_successful"] == 0.0
    assert all(torch.equal(a, b) for a, b in zip(before, learner.engine.module.parameters(), strict=True))
    assert all(math.isfinite(value) for value in stats.values())


def test_train_dpo_failing_step_replays(model_dir, tmp_path):
    learner = build(model_dir, loss_type="ipo", failure_capture=FailureCaptureConfig(directory=str(tmp_path)))
    tables = with_reference(PAIRS)
    tables[1]["ref_logprobs"][:] = math.nan

    learner.train_dpo(tables)
    report = replay_step(tmp_path / "step_0")

    assert stats_tracker.export_all()["dpo/update_successful"] == 0.0
    assert report.reproduced, report.lines()


def test_train_dpo_bad_input_is_named(model_dir):
    learner = build(model_dir)
    tables = collate_pairs(PAIRS[:1], with_mask=True)
    with pytest.raises(DataError, match="lack ref_logprobs; reference log-probs come from"):
        learner.train_dpo(tables)
    with pytest.raises(DataError, match="lack loss_mask"):
        learner.train_dpo(collate_pairs(PAIRS[:1], with_mask=False))
    with pytest.raises(DataError, match="3 sequences are not pairs"):
        learner.train_dpo([*tables, {k: v[:1] for k, v in tables[0].items()}])


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"chosen_ids": [1]}, "pair 0 of the batch lacks chosen_loss_mask, rejected_ids, rejected_loss_mask"),
        (
            {"chosen_ids": [], "rejected_ids": [], "chosen_loss_mask": [], "rejected_loss_mask": []},
            "no token on either",
        ),
        ({**PAIRS[0], "chosen_loss_mask": [1]}, "chosen_loss_mask has 1 entries, chosen_ids"),
    ],
)
def test_collate_bad_pair_is_named(sample, message):
    with pytest.raises(DataError, match=message):
        DPOTrainer.collate([sample])


def test_collate_gives_a_table_per_pair_chosen_first_and_never_nothing():
    (table,) = DPOTrainer.collate([PAIRS[0]])

    for row, side in enumerate(("chosen", "rejected")):
        length = len(PAIRS[0][f"{side}_ids"])
        assert table["input_ids"][row, :length].tolist() == PAIRS[0][f"{side}_ids"]
        assert table["loss_mask"][row, :length].tolist() == PAIRS[0][f"{side}_loss_mask"]
        assert table["attention_mask"][row].tolist() == [i < length for i in range(table["input_ids"].shape[1])]
    assert pack_pairs(DPOTrainer.collate([])).lens == [1, 0]


def test_dpo_config_label_smoothing_of_ipo_is_refused():
    with pytest.raises(ConfigError, match="label_smoothing"):
        DPOEngineConfig(backend="fsdp:d1", loss_type="ipo", label_smoothing=0.1)
