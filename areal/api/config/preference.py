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
    label_smoothing: float = opt(
        0.0, "Probability that chosen and rejected of a pair are swapped; loss_type=sigmoid only.", ge=0, lt=0.5
    )
    reference_free: bool = opt(False, "Leave the reference model out, as if it gave every completion the same odds.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.label_smoothing and self.loss_type != "sigmoid":
            raise self.fail("label_smoothing", f"0, because loss_type={self.loss_type}")
