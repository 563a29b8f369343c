"""Twenty deterministic steps give the stored numbers; see ``tests/golden/runs.py`` for what and how tight."""

from __future__ import annotations

import json

import pytest

from tests.golden.runs import REL, RUNS, STEPS, golden_file, run_golden


@pytest.mark.parametrize("name", list(RUNS))
def test_golden_run_gives_the_stored_numbers(name: str) -> None:
    stored, now = json.loads(golden_file(name).read_text()), run_golden(name)
    assert len(stored["steps"]) == len(now["steps"]) == STEPS
    for step, (before, after) in enumerate(zip(stored["steps"], now["steps"], strict=True)):
        assert after["lr"] == pytest.approx(before["lr"], rel=1e-9), f"step {step}"
        for key in ("loss", "grad_norm"):
            # a PPO loss is a small difference of large terms: its rounding is measured against the terms
            assert after[key] == pytest.approx(before[key], rel=REL, abs=REL * 0.1), f"{key} of step {step}"
    assert now["final"].keys() == stored["final"].keys()
    for tensor, before in stored["final"].items():
        scale = max(before["std"], before["max"])
        for key, value in before.items():
            assert now["final"][tensor][key] == pytest.approx(value, rel=REL, abs=REL * scale), tensor
