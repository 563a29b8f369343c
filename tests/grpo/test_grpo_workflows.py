"""What users hand to ``train``: workflows in every form, filters, evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from areal import PPOTrainer
from areal.infra import workflow_context
from areal.utils import stats_tracker
from areal.workflow.rlvr import RLVRWorkflow
from tests.trainer_runs import WORKFLOW, record_rl, rl_config, rl_rows, run_rl, seeded, workflow_kwargs

TWO_STEPS = "total_train_steps=2"


# --- workflow in every form -----------------------------------------------------------------------------------------


def test_workflow_as_object_class_and_string_give_the_same_run(policy: str, tmp_path: Path) -> None:
    runs = []
    for form in ("string", "class", "object"):
        config = rl_config(tmp_path / form, policy, TWO_STEPS)
        kwargs = workflow_kwargs(config)
        if form == "object":
            stats = run_rl(config, workflow=RLVRWorkflow(**kwargs), workflow_kwargs=None)
        else:
            stats = run_rl(config, workflow=WORKFLOW if form == "string" else RLVRWorkflow)
        runs.append([seeded(row) for row in stats])
    assert runs[0] == runs[1] == runs[2]


def test_unknown_workflow_string_is_refused_by_name(policy: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no.such.Workflow"):
        run_rl(rl_config(tmp_path, policy), workflow="no.such.Workflow")


class MinimalWorkflow(RLVRWorkflow):
    """Returns the columns of 1.x and nothing else."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any]:
        table = await super().arun_episode(engine, data)
        names = ("input_ids", "attention_mask", "loss_mask", "logprobs", "versions", "rewards")
        return {name: table[name] for name in names}


def test_workflow_with_the_columns_of_1x_trains_the_same(policy: str, tmp_path: Path) -> None:
    minimal = run_rl(rl_config(tmp_path / "a", policy, TWO_STEPS), workflow=MinimalWorkflow)
    full = run_rl(rl_config(tmp_path / "b", policy, TWO_STEPS))
    assert [seeded(row) for row in minimal] == [seeded(row) for row in full]


def test_multi_turn_workflow_trains(policy: str, tmp_path: Path) -> None:
    config = rl_config(tmp_path, policy, TWO_STEPS)
    kwargs = {**workflow_kwargs(config), "max_turns": 2, "turn_discount": 0.9}
    trainer = record_rl(config, workflow="areal.workflow.multi_turn.MultiTurnWorkflow", workflow_kwargs=kwargs)
    assert len(trainer.groups) == 8


def test_total_epochs_of_train_ends_the_run_early(policy: str, tmp_path: Path) -> None:
    config = rl_config(tmp_path, policy, "total_train_steps=null", "train_dataset.dataset_kwargs.size=8")
    assert len(run_rl(config, total_epochs=1)) == 2


# --- dynamic filter -------------------------------------------------------------------------------------------------


def keep_even_rows(table: dict[str, Any]) -> bool:
    """A filter that depends on the row alone."""
    return int(table["row_id"][0]) % 2 == 0


def keep_nothing(table: dict[str, Any]) -> bool:
    """A filter that refuses all."""
    return False


@pytest.mark.parametrize("bound", [0, 1])
def test_filter_fills_the_batch_with_further_rows(bound: int, policy: str, tmp_path: Path) -> None:
    config = rl_config(tmp_path, policy, f"rollout.max_head_offpolicyness={bound}")
    trainer = record_rl(config, dynamic_filter_fn="tests.grpo.test_grpo_workflows.keep_even_rows")
    steps = [version for version, _ in trainer.groups]
    assert steps == [k for k in range(3) for _ in range(4)]
    assert all(group.row.index % 2 == 0 for _, group in trainer.groups)


def test_filter_with_dynamic_batch_size_trains_on_what_was_accepted(policy: str, tmp_path: Path) -> None:
    config = rl_config(tmp_path, policy, "dynamic_bs=true", "total_train_steps=8")
    trainer = record_rl(config, dynamic_filter_fn=keep_even_rows)
    rows = [group.row.index for _, group in trainer.groups]
    assert sorted(rows) == list(range(0, 32, 2))  # one epoch of attempts, half of them accepted
    assert trainer.versions[-1] == (8, 8, 8)


def test_filter_that_refuses_a_whole_dynamic_batch_skips_the_update(policy: str, tmp_path: Path) -> None:
    config = rl_config(tmp_path, policy, "dynamic_bs=true", TWO_STEPS)
    trainer = record_rl(config, dynamic_filter_fn=keep_nothing)
    assert trainer.groups == []
    assert trainer.versions[-1] == (2, 2, 2)


# --- evaluation -----------------------------------------------------------------------------------------------------


class RecordingWorkflow(RLVRWorkflow):
    """Notes each episode: whether it is evaluation, its question, its sampling settings and the version in service."""

    seen: list[tuple[bool, str, bool, int]] = []

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any]:
        entry = (
            workflow_context.get().is_eval,
            data["messages"][0]["content"],
            self.gconfig.greedy,
            engine.get_version(),
        )
        self.seen.append(entry)
        return await super().arun_episode(engine, data)


@pytest.mark.parametrize("before", [True, False])
def test_evaluation_runs_each_row_once_with_its_own_settings(before: bool, policy: str, tmp_path: Path) -> None:
    RecordingWorkflow.seen = []
    config = rl_config(
        tmp_path,
        policy,
        f"evaluator.eval_before_train={before}",
        "evaluator.freq_steps=2",
        "eval_gconfig={greedy: true, max_new_tokens: 4, n_samples: 1}",
        "valid_dataset={path: arithmetic, type: rl, batch_size: 3, dataset_kwargs: {start: 100, size: 7}}",
        "total_train_steps=4",
        "rollout.max_head_offpolicyness=1",
    )
    valid = rl_rows(rl_config(tmp_path, policy, "train_dataset.dataset_kwargs={start: 100, size: 7}"))
    stats_tracker.export_all(reset=True)
    with PPOTrainer(config, train_dataset=rl_rows(config), valid_dataset=valid) as trainer:
        trainer.train(
            workflow=RecordingWorkflow,
            workflow_kwargs=workflow_kwargs(config),
            eval_workflow=RecordingWorkflow,
            eval_workflow_kwargs={**workflow_kwargs(config), "gconfig": config.eval_gconfig},
        )
    evaluated = [entry for entry in RecordingWorkflow.seen if entry[0]]
    questions = sorted(row["messages"][0]["content"] for row in valid)
    versions = [0, 2, 4] if before else [2, 4]
    assert sorted({version for *_, version in evaluated}) == versions
    for version in versions:
        assert sorted(question for _, question, _, v in evaluated if v == version) == questions
    assert all(greedy for _, _, greedy, _ in evaluated)
    if before:
        assert [entry[0] for entry in RecordingWorkflow.seen[:7]] == [True] * 7  # before step 0
    assert all(not greedy for is_eval, _, greedy, _ in RecordingWorkflow.seen if not is_eval)
