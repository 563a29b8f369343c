"""Evaluator: when evaluations happen, and that none is lost or doubled over a resume."""

from __future__ import annotations

import pytest

from areal.api.config.timers import EvaluatorConfig
from areal.api.io_struct import FinetuneSpec, StepInfo
from areal.utils.evaluator import Evaluator

SPEC = FinetuneSpec(total_train_epochs=3, dataset_size=8, train_batch_size=2)  # 4 steps per epoch


def _evaluator(**frequency) -> Evaluator:
    return Evaluator(EvaluatorConfig(experiment_name="e", trial_name="t", fileroot="/nowhere", **frequency), SPEC)


@pytest.mark.parametrize(
    ("frequency", "expected"), [({"freq_steps": 3}, [2, 5, 8]), ({"freq_epochs": 1}, [3, 7]), ({}, [])]
)
def test_evaluate_calls_fn_at_the_due_steps(frequency, expected):
    evaluator, called = _evaluator(**frequency), []

    for g in range(10):
        evaluator.evaluate(lambda g=g: called.append(g), g // 4, g % 4, g)

    assert called == expected


def test_eval_before_train_is_before_step_0_and_does_not_shift_the_rest():
    evaluator, called = _evaluator(freq_epochs=1, eval_before_train=True), []

    assert evaluator.should_evaluate_before_train()
    for g in range(8):
        evaluator.evaluate(lambda g=g: called.append(g), g // 4, g % 4, g)

    assert called == [3, 7]
    assert not evaluator.should_evaluate_before_train()


def test_eval_before_train_off_by_default():
    assert not _evaluator(freq_steps=1).should_evaluate_before_train()


def test_resume_from_a_point_written_before_the_check_owes_that_evaluation():
    first = _evaluator(freq_steps=2, eval_before_train=True)
    first.should_evaluate(0, 0)
    state = first.state_dict()  # the recover point of step 1 is written before step 1's check

    resumed = _evaluator(freq_steps=2, eval_before_train=True)
    resumed.load_state_dict(state)
    resumed.catch_up(StepInfo(epoch=0, epoch_step=1, global_step=1, steps_per_epoch=4))

    assert resumed.should_evaluate_before_train()
    assert not resumed.should_evaluate_before_train()
    assert [resumed.should_evaluate(g % 4, g) for g in (2, 3)] == [False, True]


def test_resume_from_a_point_written_after_the_check_owes_nothing():
    first = _evaluator(freq_steps=2, eval_before_train=True)
    for g in range(2):
        first.should_evaluate(g, g)

    resumed = _evaluator(freq_steps=2, eval_before_train=True)
    resumed.load_state_dict(first.state_dict())
    resumed.catch_up(StepInfo(0, 1, 1, 4))

    assert not resumed.should_evaluate_before_train()
    assert [resumed.should_evaluate(g % 4, g) for g in (2, 3)] == [False, True]
