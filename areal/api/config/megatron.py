"""Settings of the Megatron engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from areal.api.config.fields import ConfigSection, opt, section


@dataclass
class DistributedDataParallelConfig(ConfigSection):
    """Options of Megatron's distributed data parallel wrapper."""

    grad_reduce_in_fp32: bool = opt(True, "Forwarded to Megatron DDP under the same name.")
    overlap_grad_reduce: bool = opt(False, "Forwarded to Megatron DDP under the same name.")
    overlap_param_gather: bool = opt(False, "Forwarded to Megatron DDP under the same name.")
    align_param_gather: bool = opt(False, "Forwarded to Megatron DDP under the same name.")
    use_distributed_optimizer: bool = opt(True, "Forwarded to Megatron DDP under the same name.")
    check_for_nan_in_grad: bool = opt(
        False, "Read and without effect: every step looks at the gradient norm, and is skipped if it is not finite."
    )
    bucket_size: int | None = opt(
        None, "Forwarded to Megatron DDP under the same name; acts with overlap_grad_reduce.", unit="elements", ge=1
    )
    average_in_collective: bool = opt(False, "Forwarded to Megatron DDP under the same name.")
    fp8_param_gather: bool = opt(False, "Forwarded to Megatron DDP (fp8 parameter gather).")


@dataclass
class FP8EngineConfig(ConfigSection):
    """fp8 training of the Megatron backend."""

    mode: Literal["e4m3", "hybrid"] = opt("e4m3", "E4m3 everywhere, or hybrid (e5m2 for output gradients).")
    recipe: Literal["tensorwise", "delayed", "mxfp8", "blockwise"] = opt(
        "delayed", "Scaling recipe: tensorwise, delayed, mxfp8 (Blackwell), blockwise."
    )
    param: bool = opt(False, "Store parameters in fp8.")
    margin: int = opt(0, "Margin subtracted from the scale's exponent.", ge=0)
    amax_history_len: int = opt(1, "Length of the amax window.", unit="steps", ge=1)
    amax_compute_algo: Literal["max", "most_recent"] = opt("most_recent", "How a scale follows from its amax window.")
    wgrad: bool = opt(True, "False = weight gradients in higher precision.")
    dot_product_attention: bool = opt(False, "fp8 in dot-product attention.")
    multi_head_attention: bool = opt(False, "fp8 in multi-head attention.")
    tp_only_amax_red: bool = opt(False, "Reduce amax over TP(-CP) only.")
    first_last_layers_bf16: bool = opt(False, "Leave some edge layers in bf16.")
    num_layers_at_start_in_bf16: int = opt(1, "Layers at the start left in bf16.", unit="layers", ge=0)
    num_layers_at_end_in_bf16: int = opt(1, "Layers at the end left in bf16.", unit="layers", ge=0)
    direct_convert: bool = opt(True, "Convert fp8 formats without a dequantise step on save/weight update.")


@dataclass
class MegatronEngineConfig(ConfigSection):
    """Settings of the Megatron training backend."""

    wrap_with_ddp: bool = opt(True, "Wrap model chunks in Megatron DDP.")
    use_torch_fsdp2: bool = opt(False, "Use torch FSDP2 in Megatron.")
    use_custom_fsdp: bool = opt(False, "Use Megatron's own FSDP.")
    ddp: DistributedDataParallelConfig = section(DistributedDataParallelConfig, "Options of the data parallel wrapper.")
    virtual_pipeline_parallel_size: int = opt(1, "Interleaved pipeline factor; >1 turns it on.", ge=1)
    overlap_param_gather_with_optimizer_step: bool = opt(False, "Megatron optimizer overlap.")
    use_precision_aware_optimizer: bool = opt(False, "Reduced precision optimizer states; forced on by adam_bf16.")
    main_grads_dtype: str = opt("float32", "Dtype of main gradients.")
    main_params_dtype: str = opt("float32", "Dtype of main parameters.")
    exp_avg_dtype: str = opt("float32", "Dtype of Adam's first moment.")
    exp_avg_sq_dtype: str = opt("float32", "Dtype of Adam's second moment.")
    async_save: bool = opt(False, "Asynchronous distributed checkpoint.")
    use_checkpoint_opt_param_scheduler: bool = opt(True, "Restore the lr scheduler from the checkpoint.")
    use_deterministic_algorithms: bool = opt(False, "Deterministic kernels; advised for MoE RL.")
    recompute_granularity: Literal["full", "selective"] | None = opt(
        "full", "Full or selective recompute (with gradient_checkpointing)."
    )
    recompute_method: Literal["uniform", "block"] | None = opt("uniform", "How recomputed layers are chosen.")
    recompute_num_layers: int | None = opt(1, "Layers per recompute unit.", unit="layers", ge=1)
    distribute_saved_activations: bool | None = opt(None, "Spread saved activations over TP.")
    recompute_modules: list[str] | None = opt(None, "Modules to recompute when selective.")
    moe_router_dtype: str | None = opt("fp32", "Dtype of the router; null = that of the model.")
    moe_shared_expert_overlap: bool = opt(False, "Overlap shared experts with dispatch.")
    moe_enable_deepep: bool = opt(False, "Use the DeepEP token dispatcher.")
    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = opt("alltoall", "Megatron token dispatcher.")
    moe_permute_fusion: bool = opt(False, "Fuse token permutation.")
    fp8_config: FP8EngineConfig | None = section(None, "fp8 training; null = off.")
    bridge_type: Literal["mbridge", "megatron-bridge"] = opt("mbridge", "HF<->Megatron converter library.")
    use_mbridge_save: bool = opt(False, "Let the bridge save weights (less memory).")
