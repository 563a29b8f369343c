"""Killing ranks while they save never damages a checkpoint that has a name."""

from __future__ import annotations

import pytest

from tests.torchrun import kill_save


@pytest.mark.slow
def test_kill_during_save_leaves_only_complete_checkpoints() -> None:
    trials = kill_save.run(times=20, seed=0)
    assert len(trials) == 20
    assert {trial["mode"] for trial in trials} == {"sync", "async"}
    assert any(trial["leftovers"] for trial in trials)  # some were killed in the middle, not between two saves
