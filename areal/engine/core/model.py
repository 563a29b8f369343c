"""Builds the Hugging Face causal LM of an engine and gives core one way to run it.

In: a ``TrainEngineConfig`` and a device. Out: ``CausalLm``: the model, its hidden states, its head; a value head where
the config says ``is_critic``. Called by every backend that trains Hugging Face models.
"""

from __future__ import annotations

import importlib.util
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from areal.api.config.fields import is_default
from areal.engine.core.distributed import gather_rows, group_rank, group_size
from areal.engine.core.empty_model import empty_causal_lm
from areal.engine.core.model_layout import NamedParameters
from areal.engine.core.parallel_dims import ParallelGroups
from areal.engine.core.shared_prefix import share_automatically, tree_attention
from areal.engine.core.value_head import VALUE_HEAD, fill_value_head, give_value_head, has_value_head, value_weight
from areal.models.transformers.varlen_attention import VARLEN_ATTENTION, register_varlen_attention
from areal.utils import logging
from areal.utils.errors import ConfigError, UnsupportedFeatureError

if TYPE_CHECKING:
    import torch.distributed as dist

    from areal.api.cli_args import TrainEngineConfig
    from areal.engine.core.inputs import ModelInput
    from areal.models.tree import TreeAttention

logger = logging.getLogger("TrainModel")

# Config fields of families whose logits are more than hidden @ head.T: log-probs made from that would be wrong.
_LOGIT_TRANSFORMS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
_FLASH_PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
_logged_attention: set[tuple[str, str]] = set()


class CausalLm:
    """A causal LM, or its body with a value head, as core sees it: packed row in, hidden states out, and the weight of
    its head.
    """

    def __init__(self, module: PreTrainedModel) -> None:
        """Args: ``module`` is trained in place; sharding it afterwards is fine, then ``groups`` says over whom."""
        self.module = module
        self.groups = ParallelGroups()
        self.has_dropout = float(getattr(module.config, "attention_dropout", 0.0) or 0.0) > 0 or any(
            isinstance(part, nn.Dropout) and part.p > 0 for part in module.modules()
        )
        # A bound method of the module, so that FSDP can run its hooks around it.
        module.lm_hidden_states = types.MethodType(_hidden_states, module)

    @property
    def head_weight(self) -> Tensor:
        """Weight of the output head, ``[V, H]`` or this rank's rows, or of the value head, ``[1, H]``; under FSDP valid
        from forward to backward.
        """
        if has_value_head(self.module):
            weight: Tensor = value_weight(self.module)
        else:
            weight = self.module.get_output_embeddings().weight
        return weight.to_local() if isinstance(weight, DTensor) else weight

    def hidden_states(self, model_input: ModelInput) -> tuple[Tensor, Tensor | None]:
        """Last hidden states of a micro-batch, and where each real token finds its own.

        Returns: ``[T, H]`` of the real tokens and None; or those of a tree's rows and the ``[T]`` rows in it, where
            sequences share prefixes (see ``shared_prefix``). Under sequence parallelism this rank's slice of the padded
            row, ``[T_padded / c, H]``, and None.
        """
        if self._may_share():
            model_input = share_automatically(model_input)
        padded, attention = model_input.padded, tree_attention(model_input)
        tokens = {key: self._own_slice(padded.tokens[key]) for key in ("input_ids", "position_ids")}
        extra: dict[str, Any] = {} if attention is None else {"tree_attention": attention}
        if self.groups.sequence is not None:
            extra["sequence_group"] = self.groups.sequence
        hidden = self.module.lm_hidden_states(
            tensor_group=self.groups.tensor,
            input_ids=tokens["input_ids"].unsqueeze(0),
            position_ids=tokens["position_ids"].unsqueeze(0),
            cu_seq_lens_q=padded.cu_seqlens,
            cu_seq_lens_k=padded.cu_seqlens,
            max_length_q=padded.max_seqlen,
            max_length_k=padded.max_seqlen,
            **extra,
        ).flatten(0, -2)
        if attention is not None:
            self._check_layers(attention)
            return hidden, attention.tree.source
        return (hidden if self.groups.sequence is not None else hidden[: model_input.batch.n_tokens]), None

    def _own_slice(self, tokens: Tensor) -> Tensor:
        group = self.groups.sequence
        return tokens if group is None else tokens.chunk(group_size(group))[group_rank(group)]

    def _may_share(self) -> bool:
        """Whether prefixes are shared unasked: where our attention runs as it is, on a CPU, and there is no dropout."""
        if self.groups.model is not None or self.module.device.type != "cpu":
            return False
        if self.module.config._attn_implementation != VARLEN_ATTENTION or not _every_layer_attends(self.module):
            return False
        return not (self.module.training and self.has_dropout)

    def _check_layers(self, attention: TreeAttention) -> None:
        """Layers that mix tokens in another way would take the tree for one sequence."""
        layers = self.module.config.get_text_config().num_hidden_layers
        if attention.calls < layers:
            raise UnsupportedFeatureError(
                f"{type(self.module).__name__}: {layers - attention.calls} of {layers} layers did not use the tree's "
                "attention; set enable_tree_training=false and attn_impl=sdpa"
            )

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Trainable and frozen parameters, tied ones once, in model order."""
        return self.module.named_parameters()


def build_causal_lm(
    config: TrainEngineConfig, dtype: torch.dtype, device: torch.device, *, empty: bool = False
) -> CausalLm:
    """Load (or initialise) the model of ``config`` with parameters of ``dtype`` on ``device``.

    With ``empty`` the parameters are on the meta device, for the backend to shard and fill. A critic gets a fresh value
    head here; one that the path holds is read by ``hf_load``, from safetensors files.

    Raises:
        ConfigError: the path is empty or is no causal LM, or the attention cannot run on the device; a saved critic is
            in files of another format.
        UnsupportedFeatureError: the setting belongs to a feature that is not available.
    """
    refuse_later_features(config)
    compute_dtype = getattr(torch, config.dtype)
    if config.enable_tree_training:
        attention = register_varlen_attention()  # it leaves a micro-batch with a tree to the tree's own
        if not is_default(config.attn_impl):
            logger.info(f"attn_impl={config.attn_impl} is not used: enable_tree_training brings its own attention")
    else:
        attention = resolve_attention(config.attn_impl, device, compute_dtype, training=config.optimizer is not None)
    if not config.path:
        raise ConfigError("path is empty; set it to a Hugging Face model directory or hub id")
    module = _make_module(config, attention, dtype, device, empty=empty)
    module = module if empty else module.to(device)
    if config.disable_dropout:
        _disable_dropout(module)
    if config.gradient_checkpointing:
        _enable_checkpointing(module)
    lm = CausalLm(module)
    if config.enable_tree_training and not _every_layer_attends(module):
        raise UnsupportedFeatureError(
            f"{type(module).__name__}: enable_tree_training=true needs layers that mix tokens by attention only; set "
            "it to false"
        )
    if config.enable_tree_training and lm.has_dropout and not config.disable_dropout:
        raise ConfigError("disable_dropout=false: enable_tree_training=true needs a model without dropout; set it")
    return lm


def _make_module(
    config: TrainEngineConfig, attention: str, dtype: torch.dtype, device: torch.device, *, empty: bool
) -> PreTrainedModel:
    """The model with the head that it is trained with; see :func:`build_causal_lm`."""
    if empty:
        module = empty_causal_lm(config.path, attention, dtype, device)
    elif config.init_from_scratch:
        hf_config = AutoConfig.from_pretrained(config.path)
        module = AutoModelForCausalLM.from_config(hf_config, attn_implementation=attention, dtype=dtype)
    else:
        module, report = AutoModelForCausalLM.from_pretrained(
            config.path, attn_implementation=attention, dtype=dtype, output_loading_info=True
        )
        if config.is_critic and VALUE_HEAD in report["unexpected_keys"]:
            raise ConfigError(
                f"{config.path}: {VALUE_HEAD} is read from safetensors files only; convert the checkpoint"
            )
    _check_head(module, dropped=config.is_critic)
    if config.is_critic:
        give_value_head(module)
        if not empty:
            fill_value_head(value_weight(module), module.config.get_text_config().initializer_range)
    return module


def resolve_attention(wanted: str, device: torch.device, dtype: torch.dtype, *, training: bool) -> str:
    """Name under which transformers finds an attention that keeps packed sequences apart on ``device``.

    A default that the device cannot run becomes our variable-length attention; a value the user wrote is refused.
    ``eager`` and ``sdpa`` get a block-diagonal mask from transformers, which reads the restarting position ids.

    Raises:
        ConfigError: the written value cannot run here; the message names what can.
    """
    reason = _why_not(str(wanted), device, dtype, training=training)
    if reason is None:
        return str(wanted)
    if not is_default(wanted):
        raise ConfigError(
            f"attn_impl={wanted} cannot run on {device.type}: {reason}. Leave attn_impl out, or choose sdpa or eager"
        )
    name = register_varlen_attention()
    if (str(wanted), device.type) not in _logged_attention:
        _logged_attention.add((str(wanted), device.type))
        logger.info(f"attn_impl: {wanted} (default) is not available ({reason}); using {name}")
    return name


def cast_parameters(module: NamedParameters, dtype: torch.dtype) -> None:
    """Cast parameters in place; buffers (rotary frequencies) keep their precision."""
    for _, parameter in module.named_parameters():
        parameter.data = parameter.data.to(dtype)


def _hidden_states(self: PreTrainedModel, *, tensor_group: dist.ProcessGroup | None, **inputs: Any) -> Tensor:
    hidden: Tensor = self.base_model(**inputs, attention_mask=None, use_cache=False).last_hidden_state
    # Between the layers each tensor-parallel rank has a share of the tokens; the head needs them all. With a share of
    # the vocabulary each rank has a part of their gradients; with the whole value head each has all of them.
    return hidden if tensor_group is None else gather_rows(hidden[0], tensor_group, mean_gradient=has_value_head(self))


def _why_not(wanted: str, device: torch.device, dtype: torch.dtype, *, training: bool) -> str | None:
    """Reason why ``wanted`` cannot run on ``device``, or None."""
    if wanted in ("eager", "sdpa"):
        return None
    if wanted == "flex_attention":
        return "flex attention has no backward pass there" if device.type == "cpu" and training else None
    if device.type == "cpu":
        return "it is a GPU kernel"
    if wanted in _FLASH_PACKAGES and dtype == torch.float32:
        return "it computes in bfloat16 or float16, not in float32"
    package = _FLASH_PACKAGES.get(wanted, "kernels")
    if importlib.util.find_spec(package) is None:
        return f"the package {package} is not installed"
    return None


def refuse_later_features(config: TrainEngineConfig) -> None:
    if config.use_kernels:
        raise UnsupportedFeatureError(
            "use_kernels=true: hub kernels are not available in this version; set it to false"
        )
    if config.dtype == "float16" and config.optimizer is not None:
        raise UnsupportedFeatureError(
            "dtype=float16: training in float16 needs loss scaling, which is not available; use bfloat16 or float32"
        )


def _every_layer_attends(module: PreTrainedModel) -> bool:
    """Whether layers take their attention from transformers' registry, and none mixes tokens in another way."""
    kinds = getattr(module.config.get_text_config(), "layer_types", None) or ()
    return module._supports_attention_backend and set(kinds) <= {"full_attention", "sliding_attention"}


def _check_head(module: PreTrainedModel, *, dropped: bool) -> None:
    """Refuse heads whose logits are not what core computes; of one that a value head replaces only its size matters."""
    head = module.get_output_embeddings()
    if dropped and isinstance(head, nn.Linear):
        return
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise UnsupportedFeatureError(
            f"{type(module).__name__}: models need an output head that is linear without bias"
        )
    for name in _LOGIT_TRANSFORMS:
        value = getattr(module.config, name, None)
        if value not in (None, 1, 1.0):
            raise UnsupportedFeatureError(f"{type(module).__name__}: {name}={value} changes logits; not supported yet")


def _enable_checkpointing(module: PreTrainedModel) -> None:
    settings = {"use_reentrant": False}
    if hasattr(module, "activation_checkpointing_enable"):  # newer transformers; the older name warns there
        module.activation_checkpointing_enable(settings)
    else:
        module.gradient_checkpointing_enable(settings)


def _disable_dropout(module: nn.Module) -> None:
    for child in module.modules():
        if isinstance(child, nn.Dropout):
            child.p = 0.0
        if isinstance(getattr(child, "attention_dropout", None), float):
            child.attention_dropout = 0.0
