"""Access to ``tests/vectors``: right values from outside the project, copied unchanged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VECTOR_DIR = Path(__file__).parent / "vectors"
ATOL = 2e-6  # the files hold six decimals of float32 results


def load_vector(name: str) -> dict[str, Any]:
    """One vector file: ``id, topic, config, inputs, outputs``."""
    return json.loads((VECTOR_DIR / f"{name}.json").read_text())


def assert_equals_vector(actual: Tensor, expected: Any, atol: float = ATOL, rtol: float = 2e-6) -> None:
    """Compare with a value of a vector file, in its shape."""
    torch.testing.assert_close(
        actual.detach().to(torch.float32), torch.tensor(expected, dtype=torch.float32), rtol=rtol, atol=atol
    )
