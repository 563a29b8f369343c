"""Frequencies and schedulers of utils/timeutil."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from areal.utils import timeutil
from areal.utils.timeutil import EpochStepTimeFreqCtl, FrequencyControl, StepTracker

STEPS_PER_EPOCH = 4


def _firing_steps(control: EpochStepTimeFreqCtl, n_steps: int = 10) -> list[int]:
    return [g for g in range(n_steps) if control.check(epochs=int(g % STEPS_PER_EPOCH == 3), steps=1)]


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("freq_steps_3", (None, 3, None)),
        ("freq_epochs_1", (1, None, None)),
        ("freq_epochs_2", (2, None, None)),
        ("both_1epoch_3steps", (1, 3, None)),
        ("none", (None, None, None)),
        # the trainers no longer use the initial value: eval_before_train evaluates before step 0 (see test_evaluator)
        ("eval_before_train_epoch1", (1, None, None, True)),
    ],
)
def test_frequency_vector_matches_reference_steps(name, args):
    path = Path(__file__).parent / "vectors" / "frequency_control.json"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    expected = json.loads(path.read_text())["outputs"][name]

    assert _firing_steps(EpochStepTimeFreqCtl(*args)) == expected


def test_check_step_frequency_2_fires_every_second_call():
    control = FrequencyControl(frequency_steps=2)
    assert [control.check() for _ in range(5)] == [False, True, False, True, False]


def test_check_both_null_fires_only_for_initial_value():
    assert not any(FrequencyControl().check() for _ in range(3))
    control = FrequencyControl(initial_value=True)
    assert [control.check() for _ in range(3)] == [True, False, False]


def test_check_seconds_without_torch_distributed_works(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(timeutil.time, "monotonic", lambda: now[0])
    control = FrequencyControl(frequency_seconds=10)

    fired = []
    for elapsed in (4, 4, 4, 4):
        now[0] += elapsed
        fired.append(control.check())

    assert fired == [False, False, True, False]


def test_check_steps_and_seconds_both_must_hold(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(timeutil.time, "monotonic", lambda: now[0])
    control = FrequencyControl(frequency_seconds=10, frequency_steps=2)
    now[0] = 20.0
    assert not control.check()
    assert control.check()


@pytest.mark.parametrize("key", ["frequency_seconds", "frequency_steps"])
def test_frequency_zero_is_refused(key):
    with pytest.raises(ValueError, match=key):
        FrequencyControl(**{key: 0})


def test_state_dict_roundtrip_continues_counting():
    before = EpochStepTimeFreqCtl(None, 3, None)
    assert [before.check(0, 1) for _ in range(2)] == [False, False]

    after = EpochStepTimeFreqCtl(None, 3, None)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))

    assert after.check(0, 1)
    assert set(before.state_dict()) == {"epoch", "step", "time"}
    assert "frequence_seconds" in before.state_dict()["time"]


def test_load_state_dict_keeps_the_newly_configured_frequency():
    before = FrequencyControl(frequency_steps=100)
    before.check(4)
    after = FrequencyControl(frequency_steps=5)
    after.load_state_dict(before.state_dict())
    assert after.check()


def test_step_tracker_asked_twice_in_a_step_counts_once():
    tracker = StepTracker(EpochStepTimeFreqCtl(None, 2, None))
    answers = [(tracker.due(g, g, 100), tracker.due(g, g, 100)) for g in range(4)]
    assert answers == [(False, False), (True, True), (False, False), (True, True)]


@pytest.mark.parametrize(
    ("scheduler", "values"),
    [
        (timeutil.ConstantScheduler(2.0, 4), [2.0, 2.0, 2.0]),
        (timeutil.LinearScheduler(2.0, 4, 0.0), [2.0, 1.0, 0.0]),
        (timeutil.ExponentialScheduler(4.0, 4, 1.0), [4.0, 2.0, 1.0]),
        (timeutil.CosineDecayScheduler(2.0, 4, 0.0), [2.0, 1.0, 0.0]),
    ],
)
def test_scheduler_start_middle_end_values(scheduler, values):
    assert [scheduler.get(step) for step in (0, 2, 4)] == pytest.approx(values)
    assert scheduler.get(100) == pytest.approx(values[-1])


def test_chained_scheduler_each_part_counts_from_its_start():
    chained = timeutil.ChainedScheduler([timeutil.LinearScheduler(0.0, 2, 1.0), timeutil.LinearScheduler(1.0, 4, 0.0)])
    assert [chained.get(step) for step in (0, 1, 2, 4, 6)] == pytest.approx([0.0, 0.5, 1.0, 0.5, 0.0])
    assert chained.total_iters == 6
