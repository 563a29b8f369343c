"""LoRA: low-rank adapters beside frozen linear layers (arXiv 2106.09685), trained instead of the model.

In: a model and the ``lora_*`` settings of a ``TrainEngineConfig``. Out: the same model, in which every chosen linear
layer computes ``x W' + x A' B' alpha / r`` with ``A`` ``[r, in]`` and ``B`` ``[out, r]``, and only those (and a value
head) are trained. The layers are peft's. Called by the backends before they shard; ``lora_layout`` is what checkpoints
and publishing see of them.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from areal.engine.core.tensor_parts import full_tensor, local_part, own_index
from areal.engine.core.value_head import VALUE_HEAD
from areal.utils.errors import ConfigError
from areal.utils.hf_utils import ADAPTER_CONFIG, holds_adapter
from areal.utils.optional import import_extra

if TYPE_CHECKING:
    from areal.api.cli_args import TrainEngineConfig

__all__ = [
    "LoraSpec",
    "adapted_layers",
    "add_adapters",
    "base_fingerprint",
    "fill_adapters",
    "is_adapter",
    "merged_weight",
    "plain_name",
    "refuse_adapter",
]

ADAPTER = "default"
"""Name of the one adapter in peft's layers."""
ALL_LINEAR = "all-linear"
_LORA_A, _LORA_B = f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight"
_SEED = 0
_FINGERPRINT_ROWS = 64


@dataclass(frozen=True)
class LoraSpec:
    """What adapters a model has.

    Attributes:
        rank: of every one.
        alpha: ``alpha / rank`` scales what they add.
        targets: last parts of the names of the modules that have one, sorted.
        base: path of the frozen model.
        is_critic: a value head is trained beside them.
    """

    rank: int
    alpha: int
    targets: tuple[str, ...]
    base: str
    is_critic: bool = False

    @property
    def scaling(self) -> float:
        """Factor on what an adapter adds."""
        return self.alpha / self.rank

    def identity(self, base: str) -> dict[str, Any]:
        """What a recover point must agree with; ``base`` is the :func:`base_fingerprint` of the frozen model."""
        lora = {"rank": self.rank, "alpha": self.alpha, "target_modules": list(self.targets)}
        return {"lora": lora, "base_model_fingerprint": base}

    def peft_config(self) -> Any:
        """The ``LoraConfig`` of an exported adapter."""
        return _import_peft().LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,
            lora_dropout=0.0,
            bias="none",
            target_modules=list(self.targets),
            modules_to_save=[VALUE_HEAD.rpartition(".")[0]] if self.is_critic else None,
            task_type="SEQ_CLS" if self.is_critic else "CAUSAL_LM",
            base_model_name_or_path=self.base,
            inference_mode=True,
        )


def add_adapters(
    module: nn.Module,
    config: TrainEngineConfig,
    dtype: torch.dtype,
    heads: Collection[str] = (),
    outside: Callable[[str], str] = str,
    *,
    in_place: bool = False,
) -> LoraSpec:
    """Give ``module`` adapters of ``dtype`` in place, freeze the rest of it but a value head.

    Adapters get their values from :func:`fill_adapters`; on the meta device the backend calls it once there is memory.

    Args:
        module: on one device; may be the meta device, not sharded yet.
        config: of the engine.
        dtype: of what is trained.
        heads: names of output layers, which get no adapter: log-probs are made from their weight.
        outside: name that a module has in checkpoints, by which ``target_modules`` knows it; default: its own.
        in_place: layers may add to the frozen output in its own memory. Not where single products are kept for a second
            computation (selective checkpointing): they would be changed.

    Raises:
        ConfigError: a target names no linear layer, or peft is not installed.
    """
    peft = _import_peft()
    chosen = _chosen(module, config.target_modules, heads, outside)
    device = next(module.parameters()).device
    injected = peft.LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_dropout=0.0,
        bias="none",
        target_modules=list(chosen.values()),
    )
    peft.inject_adapter_in_model(injected, module, ADAPTER, low_cpu_mem_usage=device.type == "meta")
    for _, layer in adapted_layers(module):
        layer.lora_variant[ADAPTER] = _OneProduct(in_place)
    for name, parameter in module.named_parameters():
        trained = is_adapter(name) or (name == VALUE_HEAD and config.is_critic)
        if trained:  # peft makes them like the base layer, whose dtype may be lower
            parameter.data = parameter.data.to(device=device, dtype=dtype)
        parameter.requires_grad_(trained)
    if device.type != "meta":
        fill_adapters(module)
    every = not config.target_modules or ALL_LINEAR in config.target_modules
    targets = {name.rpartition(".")[2] for name in chosen} if every else set(config.target_modules)
    return LoraSpec(config.lora_rank, config.lora_alpha, tuple(sorted(targets)), config.path, config.is_critic)


@torch.no_grad()
def fill_adapters(module: nn.Module) -> None:
    """Fresh values: ``A`` uniform within ``1 / sqrt(in)`` (Kaiming, as in peft), ``B`` zero, so that nothing is added.

    The same in every layout of ranks: whole tensors are drawn, and each rank keeps its part.
    """
    generator = torch.Generator().manual_seed(_SEED)
    for name, parameter in module.named_parameters():
        if name.endswith(_LORA_B):
            local_part(parameter).zero_()
        elif name.endswith(_LORA_A):
            bound = 1.0 / math.sqrt(parameter.shape[1])
            whole = torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
            local_part(parameter).copy_(whole[own_index(parameter)])


def refuse_adapter(path: str) -> None:
    """Refuse a directory with an adapter as a model, which transformers would load with its base; before any is built.

    Raises:
        ConfigError: names the ways out.
    """
    if holds_adapter(path):
        raise ConfigError(
            f"path={path} holds an adapter ({ADAPTER_CONFIG}), no model: merge it into its base (peft's "
            "PeftModel.merge_and_unload, or SaveLoadMeta(merged=True) where it was trained) and set path to the "
            "result. To train it on with use_lora=true, set path to its base and load it into the engine"
        )


@torch.no_grad()
def base_fingerprint(modules: Iterable[nn.Module]) -> str:
    """Hash of some rows of the first, middle and last frozen weight beside an adapter; every rank must call.

    The same on every rank, in every layout of ``d`` and ``c``, on every device and for every ``dtype``: whole matrices
    are gathered, and rows enter as bfloat16. Not cryptographic proof of equal models, but fine-tuning shows in it.
    """
    layers = [layer for module in modules for _, layer in adapted_layers(module)]
    digest = hashlib.sha256()
    for layer in dict.fromkeys((layers[0], layers[len(layers) // 2], layers[-1])):
        whole = full_tensor(layer.get_base_layer().weight.detach())
        rows = whole[:: max(1, whole.shape[0] // _FINGERPRINT_ROWS)].to(device="cpu", dtype=torch.bfloat16, copy=True)
        digest.update(str(tuple(whole.shape)).encode())
        digest.update(rows.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return name.endswith((_LORA_A, _LORA_B))


def plain_name(name: str) -> str:
    """Name that a parameter of a model with adapters has in the model without."""
    return re.sub(r"\.base_layer\.(?=[^.]+$)", ".", name)


def adapted_layers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """``(name of the plain weight, peft's layer)`` of every layer with an adapter."""
    kind = import_extra("peft.tuners.lora", "lora").LoraLayer
    for name, child in module.named_modules():
        if isinstance(child, kind):
            yield f"{name}.weight", child


@torch.no_grad()
def merged_weight(layer: Any, weight: Tensor) -> Tensor:
    """``W + B A alpha / r`` in the dtype of ``weight``, the whole ``W``; every rank that holds a part must call.

    Computed in float32 where ``weight`` is, though adapters may be in host memory; a rounding to bfloat16 drops what is
    less than half a unit in the last place of ``W``.
    """
    down = full_tensor(layer.lora_A[ADAPTER].weight.detach())
    up = full_tensor(layer.lora_B[ADAPTER].weight.detach())
    wide = torch.promote_types(weight.dtype, torch.float32)
    up, down = (part.to(weight.device, wide) for part in (up, down))
    merged = torch.addmm(weight.to(wide), up, down, alpha=layer.scaling[ADAPTER])
    return merged.to(weight.dtype)


class _OneProduct:
    """How peft's layers compute: an adapter's part is scaled and added within its product, and never exists alone.

    Args:
        in_place: the sum takes the memory of the frozen layer's output, which nobody else may have kept.
    """

    def __init__(self, in_place: bool) -> None:
        self.in_place = in_place

    def forward(self, module: Any, active_adapter: str, x: Tensor, result: Tensor, **_: Any) -> Tensor:
        """``result + x A' B' alpha / r``; ``[..., in]`` to ``[..., out]``."""
        down, up = module.lora_A[active_adapter](x), module.lora_B[active_adapter].weight.t()
        scaling = module.scaling[active_adapter]
        if self.in_place and result.dim() == 3:  # a view with fewer dimensions would make autograd copy
            return result.baddbmm_(down, up.expand(len(down), *up.shape), alpha=scaling)
        rows, parts = result.reshape(-1, result.shape[-1]), down.reshape(-1, down.shape[-1])
        return torch.addmm(rows, parts, up, alpha=scaling).view(result.shape)


def _chosen(
    module: nn.Module, wanted: list[str], heads: Collection[str], outside: Callable[[str], str]
) -> dict[str, str]:
    """The linear layers that ``target_modules`` names by their last parts: outside name to own name; empty: all but the
    heads.
    """
    named = module.named_modules()
    linear = {outside(name): name for name, child in named if isinstance(child, nn.Linear) and name not in heads}
    if not wanted or ALL_LINEAR in wanted:
        found = linear
    else:
        matches = {target: [n for n in linear if n == target or n.endswith(f".{target}")] for target in wanted}
        unknown = [target for target, names in matches.items() if not names]
        if unknown:
            raise ConfigError(
                f"target_modules={wanted}: {type(module).__name__} has no linear layer {', '.join(unknown)} that can "
                f"have an adapter; it has {', '.join(sorted({name.rpartition('.')[2] for name in linear}))}. Empty "
                f"stands for all of them (heads have none: {', '.join(heads) or 'no head here'})"
            )
        taken = {name for names in matches.values() for name in names}
        found = {name: own for name, own in linear.items() if name in taken}
    if not found:
        raise ConfigError(f"use_lora=true: {type(module).__name__} has no linear layer that can have an adapter")
    return found


def _import_peft() -> Any:
    return import_extra("peft", "lora")
