"""Full tensors of an FSDP model; kept for its import path, see ``core/tensor_parts``."""

from areal.engine.core.tensor_parts import full_tensor

__all__ = ["full_tensor"]
