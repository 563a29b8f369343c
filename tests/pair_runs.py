"""Preference pairs on a tiny model: planted preferences, configs and runs, for the tests of DPO and reward models."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from areal import DPOTrainer, RWTrainer
from areal.api.cli_args import DPOConfig, RWConfig
from areal.utils import stats_tracker
from tests.trainer_runs import load_config, stats_of

DPO_BASE = """
experiment_name: tests
trial_name: dpo
total_train_epochs: 2
total_train_steps: 2
scheduler: {type: inline}
cluster: {fileroot: outputs}
actor:
  backend: fsdp:d1
  dtype: float32
  beta: 0.1
  optimizer: {lr: 5.0e-3, weight_decay: 0.0, lr_scheduler_type: constant, warmup_steps_proportion: 0.0}
train_dataset: {path: pairs, type: dpo, batch_size: 4}
"""
RW_BASE = DPO_BASE.replace("trial_name: dpo", "trial_name: rw").replace("beta: 0.1", "is_critic: true")
RW_BASE = RW_BASE.replace("type: dpo", "type: rw")


def planted_pairs(n: int, seed: int = 0) -> list[dict[str, list[int]]]:
    """Pairs whose chosen answer holds even digits where the rejected one holds odd ones; sides differ in length.

    Tokens 4 to 13 are the digits of the character tokenizer, 1 is its end token.
    """
    draw = random.Random(seed)
    pairs = []
    for _ in range(n):
        prompt = [draw.randrange(4, 14) for _ in range(draw.randrange(2, 6))]
        sides = {}
        for side, first in (("chosen", 4), ("rejected", 5)):
            answer = [first + 2 * draw.randrange(5) for _ in range(draw.randrange(2, 5))]
            sides[f"{side}_ids"] = [*prompt, *answer, 1]
            sides[f"{side}_loss_mask"] = [0] * len(prompt) + [1] * (len(answer) + 1)
        pairs.append(sides)
    return pairs


def dpo_config(root: Path, model: str, *overrides: str) -> DPOConfig:
    """The base config of DPO runs under ``root`` with overrides."""
    return load_config(root, DPO_BASE, DPOConfig, f"actor.path={model}", *overrides)


def rw_config(root: Path, model: str, *overrides: str) -> RWConfig:
    """The base config of reward-model runs under ``root`` with overrides."""
    return load_config(root, RW_BASE, RWConfig, f"actor.path={model}", *overrides)


def run_pairs(config: Any, pairs: Any, valid: Any = None) -> list[dict[str, float]]:
    """Run a config of either kind to the end; the statistics of every step."""
    trainer_class: Any = DPOTrainer if isinstance(config, DPOConfig) else RWTrainer
    stats_tracker.export_all(reset=True)
    with trainer_class(config, train_dataset=pairs, valid_dataset=valid) as trainer:
        trainer.train()
    return stats_of(config)
