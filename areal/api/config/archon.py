"""Settings of the Archon engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from areal.api.config.fields import ConfigSection, check_fields, opt, section


@dataclass
class ArchonFP8Config(ConfigSection):
    """fp8 matmuls of the Archon backend."""

    mode: Literal["disabled", "blockwise"] = opt("disabled", "Turn blockwise 128x128 e4m3 matmuls on (Hopper).")
    exclude_modules: list[str] = opt(
        help="Name fragments of linear layers left in bf16; YAML replaces the whole list.",
        factory=lambda: ["output", "router", "score"],
    )
    include_experts: bool = opt(False, "Also use fp8 inside MoE experts.")
    use_triton: bool = opt(True, "Must stay true when fp8 is on.")

    def __post_init__(self) -> None:
        check_fields(self)
        if self.enabled and not self.use_triton:
            raise self.fail("use_triton", "true, because fp8 is enabled (mode=blockwise)")

    @property
    def enabled(self) -> bool:
        """Whether fp8 is on."""
        return self.mode != "disabled"


@dataclass
class ArchonEngineConfig(ConfigSection):
    """Settings of the Archon training backend."""

    attn_type: Literal["varlen", "sdpa", "tree"] = opt(
        "varlen", "Attention implementation of native models; 'tree' for prefix-tree training."
    )
    offload_params: bool = opt(False, "Keep sharded parameters in host memory.")
    enable_compile: bool = opt(False, "Torch.compile each transformer block.")
    ac_mode: Literal["none", "full", "selective", "memory_budget"] = opt(
        "selective",
        "Activation checkpointing flavour (used when gradient_checkpointing is true); memory_budget needs "
        "enable_compile.",
    )
    selective_ac_option: str = opt("op", "'op' for op-level choice or an integer string N for every Nth layer.")
    ac_memory_budget: float = opt(0.5, "Share of activations kept: 0 recomputes most, 1 nothing.", ge=0, le=1)
    ac_preserve_rng_state: bool = opt(False, "Save/restore RNG around recomputation.")
    ac_debug: bool = opt(False, "Collect debug data about checkpointing (tests).")
    pp_schedule: Literal["1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"] = opt(
        "Interleaved1F1B", "Pipeline schedule; 1F1B has 1 stage per rank, the others 2."
    )
    pp_layers_per_stage: int | None = opt(
        None, "Layers per virtual stage; null derives it from the schedule.", unit="layers", ge=1
    )
    pp_first_stage_less_layers: int = opt(1, "Layers taken off the first stage for the embedding.", unit="layers", ge=0)
    pp_last_stage_less_layers: int = opt(1, "Layers taken off the last stage for the head.", unit="layers", ge=0)
    reshard_after_forward_policy: Literal["default", "always", "never"] = opt(
        "default", "Default = reshard only without PP."
    )
    fp8_config: ArchonFP8Config = section(ArchonFP8Config, "fp8 matmuls of this backend.")
    use_deterministic_algorithms: bool = opt(False, "Reproducible kernels and NCCL settings.")
    moe_router_dtype: Literal["fp32"] | None = opt("fp32", "Compute router gate in fp32, or null for model dtype.")
