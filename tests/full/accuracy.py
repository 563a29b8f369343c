"""Accuracy cells: from one supervised warm start, every preset of the quickstart's GRPO stage must learn to add.

Each cell trains the quickstart's model for ``STEPS`` steps with the preset's settings and measures greedy accuracy on
512 problems that no stage trained on, before and after. The bars (``presets.py``) lie well below what the presets
reach and far above the warm start.
"""

from __future__ import annotations

import importlib.util
import json
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from areal import PPOTrainer
from areal.api.cli_args import GRPOConfig, load_expr_config
from areal.dataset import get_custom_dataset
from areal.utils import fs
from areal.utils.stats_logger import StatsLogger, read_stats
from tests.full.cell import ROOT, CellContext
from tests.full.presets import GAIN, PRESETS, STEPS, Preset

SEED = 1
HELD_OUT = 512
WARM_ACCURACY = 0.3  # of sampled answers; less than the quickstart's, which leaves room to gain


@cache
def quickstart() -> Any:
    """The quickstart script as a module."""
    path = ROOT / "examples" / "quickstart" / "quickstart.py"
    spec = importlib.util.spec_from_file_location("quickstart", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class WarmStart:
    """A model after the supervised stage, and its greedy accuracy."""

    model: Path
    accuracy: float


def warm_start(shared: Path) -> WarmStart:
    """The quickstart's supervised stage, run by the first cell that asks."""
    place = shared / "warm-start"
    if not place.is_dir():
        with fs.atomic_directory(place) as aside:
            quickstart().create_model(aside / "initial", SEED)
            checkpoint = quickstart().warm_up(aside / "run", aside / "initial", SEED, [], WARM_ACCURACY)
            accuracy, _ = quickstart().evaluate(checkpoint, held_out())
            checkpoint.rename(aside / "model")
            fs.atomic_write_json(aside / "accuracy.json", accuracy)
    return WarmStart(place / "model", float(json.loads((place / "accuracy.json").read_text())))


def held_out() -> Any:
    """Problems for measuring."""
    return quickstart().arithmetic(split="test", size=HELD_OUT)


def run_warm_start(context: CellContext) -> None:
    """The supervised stage leaves room to learn, and something to start from."""
    start = warm_start(context.shared)
    context.facts["accuracy"] = round(start.accuracy, 4)
    context.expect(0.3 <= start.accuracy <= 0.75, f"the warm start reaches {start.accuracy:.1%}, expected 30 % to 75 %")


def run_preset(context: CellContext, preset: str) -> None:
    """Train one preset and compare its accuracy with its bar."""
    settings = PRESETS[preset]
    start = warm_start(context.shared)
    began = time.perf_counter()
    checkpoint, rows = train(context.work, start.model, settings)
    seconds = time.perf_counter() - began
    accuracy, _ = quickstart().evaluate(checkpoint, held_out())
    oldest = max(row["rollout/staleness/max"] for row in rows)
    context.facts |= {
        "accuracy_before": round(start.accuracy, 4),
        "accuracy_after": round(accuracy, 4),
        "bar": settings.bar,
        "steps": len(rows),
        "train_seconds": round(seconds, 1),
        "staleness_max": oldest,
        "sequences_per_second": round(sum(row["ppo_actor/n_seqs"] for row in rows) / seconds),
    }
    context.expect(accuracy >= settings.bar, f"greedy accuracy {accuracy:.1%} is below {settings.bar:.0%}")
    gain = accuracy - start.accuracy
    context.expect(gain >= GAIN, f"{100 * gain:.1f} points over the warm start, fewer than {100 * GAIN:.0f}")
    context.expect(len(rows) == STEPS, f"{len(rows)} of {STEPS} steps in stats.jsonl")
    context.expect(oldest <= settings.eta, f"samples of age {oldest:g} at eta={settings.eta}")
    if settings.eta > 0:
        context.expect(oldest > 0, "nothing was generated ahead of training")


def train(work: Path, model: Path, preset: Preset) -> tuple[Path, list[dict[str, float]]]:
    """Run the quickstart's GRPO stage with a preset; its checkpoint and the statistics of every step."""
    arguments = quickstart().stage_arguments("grpo", work, model, SEED)
    config, _ = load_expr_config([*arguments, *preset.overrides, f"total_train_steps={STEPS}"], GRPOConfig)
    dataset = get_custom_dataset(dataset_config=config.train_dataset)
    with PPOTrainer(config, train_dataset=dataset) as trainer:
        trainer.train(
            workflow=quickstart().WORKFLOW,
            workflow_kwargs={
                "reward_fn": quickstart().REWARD,
                "gconfig": config.gconfig,
                "tokenizer": config.tokenizer_path,
            },
            dynamic_filter_fn=preset.filter_fn,
        )
    stats = read_stats(Path(StatsLogger.get_log_path(config)) / "stats.jsonl")
    return quickstart().newest_checkpoint(config), [row["stats"] for row in stats]


def mixed_rewards(table: dict[str, Any]) -> bool:
    """DAPO's dynamic filter: a group of which all or none are right teaches nothing."""
    share = float(table["rewards"].mean())
    return 0.0 < share < 1.0
