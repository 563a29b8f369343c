"""Pictures of a run: the reward curve (or the loss of supervised training) as a PNG, out of ``stats.jsonl``.

Called by trainers at the end of a run and by ``areal plot``. matplotlib is imported when a picture is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areal.utils import fs
from areal.utils.errors import DataError
from areal.utils.stats_logger.jsonl import read_stats

# The first of these that a run recorded is the main curve: (key, label of the axis).
MAIN_CURVES = (
    ("rollout/reward", "mean reward"),
    ("ppo_actor/task_reward/avg", "mean reward"),
    ("sft/loss/avg", "loss per token"),
    ("rw/loss/avg", "loss per pair"),
    ("dpo/loss/avg", "loss per pair"),
)
EVAL_CURVES = ("eval-rollout/reward", "sft-eval/loss/avg", "rw-eval/loss/avg", "dpo-eval/loss/avg")
_SMOOTHING_SHARE = 0.05  # of the run's steps: time constant of the smoothed curve
_RAW, _SMOOTH, _EVAL = "#9db7d5", "#1f5a99", "#c4502d"


def plot_curve(
    stats: fs.PathLike, output: fs.PathLike, *, key: str | None = None, title: str = "", smoothing: float | None = None
) -> str:
    """Draw one statistic over the steps, raw and smoothed, with evaluations as dots.

    Args:
        stats: a ``stats.jsonl``, or the log directory that holds it.
        output: PNG to write; its directory is created.
        key: statistic; None takes the reward, or the loss where there is no reward.
        title: above the picture.
        smoothing: time constant in steps of the exponential mean; None takes 5 % of the run, 0 draws no smooth curve.

    Returns:
        The key that was drawn.

    Raises:
        DataError: nothing to draw; the message lists the keys that were recorded.
    """
    rows = read_stats(stats)
    key, y_label = _choose_curve(rows, key)
    steps, values = _series(rows, key)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    constant = max(1.0, len(steps) * _SMOOTHING_SHARE) if smoothing is None else smoothing
    draw_smooth = constant > 0 and len(steps) > 2
    axes.plot(
        steps,
        values,
        color=_RAW if draw_smooth else _SMOOTH,
        linewidth=1,
        marker="." if len(steps) < 40 else None,
        label="each step",
    )
    if draw_smooth:
        axes.plot(
            steps, smooth(values, constant), color=_SMOOTH, linewidth=2.2, label=f"smoothed over {constant:.0f} steps"
        )
    for eval_key in EVAL_CURVES:
        eval_steps, eval_values = _series(rows, eval_key)
        if eval_steps and eval_key != key:
            axes.plot(eval_steps, eval_values, "o", color=_EVAL, markersize=5, label=f"evaluation ({eval_key})")
    axes.set(xlabel="training step", ylabel=y_label, title=title or key)
    axes.grid(visible=True, color="#e3e3e3", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False)
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, format="png")
    return key


def smooth(values: Sequence[float], constant: float) -> list[float]:
    """Exponential moving mean with time constant ``constant`` (steps), without the bias of its start."""
    decay = math.exp(-1 / constant)
    total = weight = 0.0
    result = []
    for value in values:
        total = decay * total + (1 - decay) * value
        weight = decay * weight + (1 - decay)
        result.append(total / weight)
    return result


def _choose_curve(rows: list[dict[str, Any]], key: str | None) -> tuple[str, str]:
    recorded = sorted({name for row in rows for name in row["stats"]})
    if key is None:
        for name, label in MAIN_CURVES:
            if name in recorded:
                return name, label
        raise DataError(f"no reward or loss in {len(rows)} steps; pass a key out of: {', '.join(recorded) or 'none'}")
    if key not in recorded:
        raise DataError(f"statistic {key!r} was not recorded; recorded: {', '.join(recorded) or 'none'}")
    return key, dict(MAIN_CURVES).get(key, key)


def _series(rows: list[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    points = [(row["global_step"] + 1, row["stats"][key]) for row in rows if _is_number(row["stats"].get(key))]
    return [step for step, _ in points], [value for _, value in points]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
