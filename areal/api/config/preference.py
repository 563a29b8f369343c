"""Direct preference optimisation; read by the DPO trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from areal.api.config.fields import opt
from areal.api.config.train import TrainEngineConfig


@dataclass
class DPOEngineConfig(TrainEngineConfig):
    """A DPO model: engine and loss."""

    beta: float = opt(0.1, "Strength of the pull towards the reference.", gt=0)
    loss_type: Literal["sigmoid", "ipo"] = opt("sigmoid", "Which preference loss is used.")
