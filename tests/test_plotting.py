"""The reward curve: which statistic is drawn, and that a real PNG comes out."""

from __future__ import annotations

import json

import pytest

from areal.utils.plotting import plot_curve, smooth

PNG = b"\x89PNG\r\n\x1a\n"


def _write_stats(directory, *keys: str, n_steps: int = 30) -> None:
    with (directory / "stats.jsonl").open("w") as file:
        for g in range(n_steps):
            stats = dict.fromkeys(keys, g / n_steps)
            if g % 10 == 9:
                stats["eval-rollout/reward"] = g / n_steps
            file.write(json.dumps({"global_step": g, "stats": stats}) + "\n")


def test_plot_curve_reward_is_preferred_and_a_png_is_written(tmp_path):
    _write_stats(tmp_path, "rollout/reward", "sft/loss/avg")
    drawn = plot_curve(tmp_path, tmp_path / "plots" / "reward.png", title="run")
    assert drawn == "rollout/reward"
    assert (tmp_path / "plots" / "reward.png").read_bytes().startswith(PNG)


def test_plot_curve_without_reward_draws_the_loss(tmp_path):
    _write_stats(tmp_path, "sft/loss/avg", n_steps=1)
    assert plot_curve(tmp_path / "stats.jsonl", tmp_path / "a.png") == "sft/loss/avg"


def test_plot_curve_unknown_key_lists_the_recorded_ones(tmp_path):
    _write_stats(tmp_path, "a/b", n_steps=2)
    with pytest.raises(ValueError, match="a/b"):
        plot_curve(tmp_path, tmp_path / "a.png", key="x")
    with pytest.raises(ValueError, match="no reward or loss"):
        plot_curve(tmp_path, tmp_path / "a.png")


def test_plot_curve_does_not_touch_the_callers_matplotlib(tmp_path):
    import matplotlib

    before = matplotlib.get_backend(auto_select=False)
    _write_stats(tmp_path, "rollout/reward")
    plot_curve(tmp_path, tmp_path / "a.png")
    assert matplotlib.get_backend(auto_select=False) == before


def test_smooth_constant_series_stays_and_step_is_followed():
    assert smooth([2.0] * 5, 3.0) == pytest.approx([2.0] * 5)
    assert smooth([0.0] * 5 + [1.0] * 50, 3.0)[-1] == pytest.approx(1.0, abs=1e-3)
