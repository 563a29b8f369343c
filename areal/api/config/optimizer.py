"""Optimizer settings; read by the train engines (``areal.engine``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from areal.api.config.fields import ConfigSection, opt


@dataclass
class OptimizerConfig(ConfigSection):
    """Optimizer, gradient clipping and learning-rate schedule."""

    type: Literal["adam", "sgd", "adam_bf16"] = opt(
        "adam",
        "adam = AdamW; sgd; adam_bf16 = AdamW with bf16 moments; with dtype=bfloat16 its weights are bf16 too, with a "
        "compensation buffer instead of float32 masters (Megatron: adam + precision-aware).",
    )
    lr: float = opt(0.001, "Peak learning rate, reached after warm-up.", ge=0)
    weight_decay: float = opt(0.01, "Decoupled weight decay coefficient.", ge=0)
    beta1: float = opt(0.9, "Adam first moment decay.", ge=0, lt=1)
    beta2: float = opt(0.999, "Adam second moment decay.", ge=0, lt=1)
    eps: float = opt(1e-08, "Added to Adam's denominator.", gt=0)
    min_lr_ratio: float = opt(
        0.0, "Final learning rate as a share of lr; the cosine schedule honours it, linear goes to 0.", ge=0, le=1
    )
    lr_scheduler_type: Literal["linear", "cosine", "constant"] = opt("constant", "Shape of the schedule after warmup.")
    warmup_steps_proportion: float = opt(0.001, "Warm-up length as a share of the run's total steps.", ge=0, le=1)
    gradient_clipping: float = opt(1.0, "Bound of the global L2 norm of the gradients.", gt=0)
    max_nonfinite_steps: int = opt(
        10,
        "Steps in a row without a finite gradient norm after which the run stops; each is skipped and counted "
        "(not in 1.x).",
        unit="steps",
        ge=1,
    )
    initial_loss_scale: float = opt(4294967296.0, "Fp16 loss scaling; not read (kept for 1.x files).", gt=0)
    min_loss_scale: float = opt(1.0, "Fp16 loss scaling; not read (kept for 1.x files).", gt=0)
    loss_scale_window: float = opt(5.0, "Fp16 loss scaling; not read (kept for 1.x files).", unit="steps", gt=0)
    hysteresis: int = opt(2, "Fp16 loss scaling; not read (kept for 1.x files).", unit="steps", ge=1)
