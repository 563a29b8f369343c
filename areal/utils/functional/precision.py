"""The precision that losses compute in; the helper of the other modules here."""

from __future__ import annotations

import torch
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """``x`` in float32, or as it is where it already is float64 (gradient checks)."""
    return x if x.dtype == torch.float64 else x.float()
