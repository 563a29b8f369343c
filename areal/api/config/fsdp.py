"""Settings of the FSDP engine; read by ``areal.engine.fsdp_engine``."""

from __future__ import annotations

from dataclasses import dataclass

from areal.api.config.fields import ConfigSection, opt, section


@dataclass
class FSDPWrapPolicy(ConfigSection):
    """Which modules FSDP shards as units."""

    transformer_layer_cls_to_wrap: list[str] | None = opt(
        None, "Class names to shard as units; null = the model's own no-split modules."
    )


@dataclass
class FSDPEngineConfig(ConfigSection):
    """Settings of the FSDP training backend."""

    wrap_policy: FSDPWrapPolicy | None = section(None, "Override of the sharding units.")
    offload_params: bool = opt(
        False,
        "Keep sharded parameters (and optimizer) in host memory (FSDP2 CPU offload); on GPUs, with two ranks or more.",
    )
    memory_efficient_load: bool = opt(
        False,
        "Only rank 0 reads the weights, tensor by tensor, and broadcasts them; else every rank reads its shards. Not "
        "for VLM; conflicts with init_from_scratch.",
    )
    per_layer_optim_step: bool = opt(False, "Stream optimizer states layer by layer to the GPU for the Adam step.")
    optim_step_prefetch_layers: int = opt(1, "How many layers ahead that streaming fetches.", unit="layers", ge=0)
    shard_vision_across_sp: bool = opt(False, "Split images of the vision tower over context-parallel ranks.")
    enable_compile: bool = opt(
        False, "Torch.compile each decoder layer (not in 1.x, which has it for archon only); needs a C++ compiler."
    )
