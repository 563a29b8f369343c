"""A trainer on the live ranks that stays between messages, for the tests of weight updates."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from areal.engine.core.weight_sender import WeightSender
from areal.trainer.role_worker import WeightDuties
from areal.trainer.roles import TRAIN_ENGINES
from tests.engine_fakes import batch, engine_config, loss_fn, weight_fn


class _Rank(WeightDuties):
    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.weights = WeightSender(engine, lambda: dist.get_rank() == 0)


_ranks: list[_Rank] = []


def open_trainer(path: str, **settings: Any) -> None:
    """Build the engine that the other cells use; ``backend`` says which."""
    config = engine_config(path, **settings)
    engine = TRAIN_ENGINES.get(config.backend.partition(":")[0])(config)
    engine.create_process_group()
    engine.initialize(None, None)
    _ranks.append(_Rank(engine.train()))


def the_engine() -> Any:
    """This rank's engine."""
    return _ranks[-1].engine


def close_trainer() -> None:
    rank = _ranks.pop()
    rank.weights.close()
    rank.engine.destroy()


def call_weights(method: str, args: tuple[Any, ...], first_only: bool) -> Any:
    """Call one of ``WeightDuties``."""
    if first_only and dist.get_rank() != 0:
        return None
    return getattr(_ranks[-1], method)(*args)


def optimizer_step() -> None:
    """Change the weights."""
    _ranks[-1].engine.train_batch(batch(), loss_fn, weight_fn)


def logprobs_of(tokens: list[int]) -> list[float]:
    """Of each token after the first, under the current weights."""
    import torch

    ids = torch.tensor([tokens])
    row = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids, dtype=torch.bool),
        "loss_mask": torch.ones_like(ids),
    }
    found = _ranks[-1].engine.forward_batch([row])[0]
    return [float(value) for value in found.reshape(-1)[: len(tokens) - 1]]
