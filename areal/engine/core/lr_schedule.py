"""Learning rate per global step: warm-up, then constant, linear or cosine.

Built by each backend from its ``OptimizerConfig`` and the length of the run; advanced once per global step.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from areal.utils import logging
from areal.utils.errors import ConfigError

if TYPE_CHECKING:
    from areal.api.cli_args import OptimizerConfig
    from areal.api.io_struct import FinetuneSpec

logger = logging.getLogger("LrSchedule")


def lr_factor(kind: str, step: int, total: int, warmup: int, min_ratio: float = 0.0) -> float:
    """Share of the peak learning rate at ``step``.

    Args:
        kind: ``constant``, ``linear`` (to 0; ignores ``min_ratio``) or ``cosine`` (from and to ``min_ratio``).
        step: global steps done before this one, from 0.
        total: steps of the whole run.
        warmup: steps of the linear warm-up; step 0 of a warm-up has factor 0 (cosine: ``min_ratio``).
        min_ratio: final share, in [0, 1].
    """
    if step < warmup:
        floor = min_ratio if kind == "cosine" else 0.0
        return floor + (1.0 - floor) * step / warmup
    if kind == "constant":
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    if kind == "linear":
        return 1.0 - progress
    return max(min_ratio, (1.0 - min_ratio) / 2 * math.cos(math.pi * progress) + (1.0 + min_ratio) / 2)


class LrSchedule:
    """Counts global steps and says which learning rate applies now."""

    def __init__(self, config: OptimizerConfig, ft_spec: FinetuneSpec | None) -> None:
        """Args: ``ft_spec`` gives the length of the run; None is allowed only where nothing depends on it.

        Raises:
            ConfigError: a schedule that needs the length of the run got none.
        """
        self.config = config
        self.total = ft_spec.total_train_steps if ft_spec is not None else 0
        if ft_spec is None and config.lr_scheduler_type != "constant":
            raise ConfigError(
                f"optimizer.lr_scheduler_type={config.lr_scheduler_type} needs the length of the run: "
                "pass ft_spec to initialize()"
            )
        if config.lr_scheduler_type == "linear" and config.min_lr_ratio > 0:
            logger.warning(f"optimizer.min_lr_ratio={config.min_lr_ratio} has no effect: a linear schedule ends at 0")
        self.warmup = int(config.warmup_steps_proportion * self.total)
        self.steps_done = 0

    @property
    def lr(self) -> float:
        """Learning rate of the current global step."""
        factor = lr_factor(
            self.config.lr_scheduler_type, self.steps_done, self.total, self.warmup, self.config.min_lr_ratio
        )
        return self.config.lr * factor

    def step(self) -> None:
        """Go on to the next global step."""
        self.steps_done += 1
