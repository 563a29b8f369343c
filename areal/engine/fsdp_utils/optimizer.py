"""Shards of an FSDP model as the optimizer sees them: plain local tensors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from areal.engine.core.model_layout import NamedParameters
from areal.engine.core.optimizer import LowPrecisionShards, MasterShards, ParamShards, PlainShards
from areal.engine.fsdp_utils.grad import local_gradient

__all__ = ["DTensorShards", "build_shards"]


class DTensorShards:
    """Float32 local shards of FSDP2 parameters; they share storage, so a step needs no copy back."""

    def __init__(self, module: NamedParameters) -> None:
        self._parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self.shards: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            assert isinstance(parameter, DTensor)
            self.shards[name] = parameter.to_local().detach().requires_grad_()

    def collect_gradients(self) -> list[Tensor]:
        for name, parameter in self._parameters.items():
            self.shards[name].grad = local_gradient(parameter)
        return [s.grad for s in self.shards.values() if s.grad is not None and s.grad.numel()]

    def write_back(self) -> None:
        """Nothing to do: the shards are the parameters' own storage."""

    def zero_grad(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.grad = None
            self.shards[name].grad = None


def build_shards(module: NamedParameters, dtype: torch.dtype, *, sharded: bool) -> ParamShards:
    """Shards of ``module`` for compute in ``dtype``; its parameters are float32, or of ``dtype`` for adam_bf16."""
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if any(parameter.dtype != torch.float32 for parameter in trained.values()):
        return LowPrecisionShards({n: (p, p.to_local() if isinstance(p, DTensor) else p) for n, p in trained.items()})
    if sharded:
        return DTensorShards(module)
    if dtype == torch.float32:
        return PlainShards(module)
    return MasterShards(module, dtype)
