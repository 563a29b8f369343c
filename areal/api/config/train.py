"""A train engine and its micro-batches; read by ``areal.engine`` and the roles in ``areal.trainer``."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any, Literal

from areal.api.config.archon import ArchonEngineConfig
from areal.api.config.fields import MISSING, ConfigSection, DefaultFloat, DefaultStr, check_fields, opt, section
from areal.api.config.fsdp import FSDPEngineConfig
from areal.api.config.megatron import MegatronEngineConfig
from areal.api.config.optimizer import OptimizerConfig
from areal.api.config.scheduling import SchedulingSpec, SchedulingStrategy, check_placement

BUILTIN_ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
_HUB_KERNEL = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?(:[\w.]+)?")


@dataclass
class MicroBatchSpec(ConfigSection):
    """How a batch is cut into micro-batches."""

    n_mbs: int | None = opt(1, "Micro-batch count; becomes the minimum when max_tokens_per_mb is set.", ge=1)
    max_tokens_per_mb: int | None = opt(
        None, "Token budget of one micro-batch; null means practically unlimited (1e12).", unit="tokens", ge=1
    )
    granularity: int = opt(
        1, "That many adjacent rows are kept together when splitting (batch size must divide).", unit="rows", ge=1
    )
    n_mbs_divisor: int = opt(1, "Final micro-batch count is raised to a multiple of this (pipeline schedules).", ge=1)
    packing_algorithm: Literal["ffd", "kk"] = opt(
        "ffd", "Bin packing used to form micro-batches and to balance DP ranks in SPMD mode."
    )

    @classmethod
    def new(cls, mb_spec: MicroBatchSpec, **changes: Any) -> MicroBatchSpec:
        """Copy ``mb_spec`` with changes."""
        return dataclasses.replace(mb_spec, **changes)


@dataclass
class FailureCaptureConfig(ConfigSection):
    """What is kept of an optimizer step that fails, so that ``areal replay`` can run it again (not in 1.x).

    A step fails when its loss or its gradient norm is not finite, or when the norm is far above its running median.
    """

    max_captures: int = opt(
        3,
        "Captures kept, the first ones; each holds weights, optimizer state and batch of one step. 0 writes none.",
        unit="directories",
        ge=0,
    )
    grad_norm_factor: float | None = opt(
        100.0,
        "A gradient norm above this multiple of the running median (of the last 64 steps, from the ninth on) counts as "
        "divergent; null captures only what is not finite.",
        gt=1,
    )
    directory: str | None = opt(
        None, "Where captures go; null = 'failures' in the log directory of the run, and nowhere without a trainer."
    )


@dataclass
class TrainEngineConfig(ConfigSection):
    """One trained or scored model: weights, precision, layout and optimizer."""

    experiment_name: str = opt(MISSING, "Experiment name; taken from the root when not given.")
    trial_name: str = opt(MISSING, "Trial name; taken from the root when not given.")
    backend: str = opt(
        MISSING, "Backend and layout such as 'fsdp:d4'; critic, ref and teacher take the actor's when not given."
    )
    path: str = opt("", "Hugging Face model directory or hub id; critic and ref take the actor's when empty.")
    attn_impl: str = opt(
        DefaultStr("flash_attention_2"),
        "Attention backend: eager, sdpa, flash_attention_2, flash_attention_3, flex_attention or a hub "
        "kernel 'org/repo[@rev][:entry]'. Not written: the best one that the device runs; written: used as "
        "it is or refused.",
    )
    init_from_scratch: bool = opt(False, "Random weights from the config.")
    is_critic: bool = opt(False, "Scalar head instead of LM head.")
    temperature: float = opt(
        DefaultFloat(1.0),
        "Logits are divided by it when log-probs are computed. Not written: follows gconfig.temperature "
        "(actor) or the actor (critic, ref, teacher).",
        gt=0,
    )
    mb_spec: MicroBatchSpec = section(MicroBatchSpec, "How a batch is cut into micro-batches.")
    disable_dropout: bool = opt(False, "Zero the dropout modules.")
    gradient_checkpointing: bool = opt(False, "Recompute activations in the backward pass to save memory.")
    dtype: Literal["bfloat16", "float16", "float32"] = opt(
        DefaultStr("bfloat16"),
        "Compute dtype; under bfloat16 the master weights and optimizer states stay float32. Not written in "
        "critic, ref or teacher: the one of the actor.",
    )
    optimizer: OptimizerConfig | None = section(None, "Optimizer; null = the model is only scored.")
    weight_update_mode: Literal["auto", "shm", "xccl", "disk"] = opt(
        "auto",
        "How weights reach the samplers: auto = in-process copy inline, shm on one host, else xccl; shm = "
        "shared memory; xccl = collectives; disk = checkpoint directory.",
        refused={"awex": "awex of 1.x is not part of this version"},
    )
    weight_chunked_mem_mb: int = opt(
        1024, "xccl: most bytes of one bucket of tensors; a larger tensor travels alone.", unit="MiB", ge=1
    )
    weight_update_timeout_s: float = opt(600.0, "Limit of one weight update.", unit="s", gt=0)
    fsdp: FSDPEngineConfig = section(FSDPEngineConfig, "Settings of the backend fsdp.")
    failure_capture: FailureCaptureConfig = section(FailureCaptureConfig, "What is kept of a step that fails.")
    scheduling_spec: list[SchedulingSpec] = opt(
        help="One (worker) or two (worker, engine) specs.",
        factory=lambda: [SchedulingSpec(cmd="python -m areal.infra.rpc.rpc_server")],
    )
    scheduling_strategy: SchedulingStrategy = section(SchedulingStrategy, "Separation / colocation of this role.")
    use_kernels: bool = opt(False, "Apply hub kernels after model creation.")
    pad_to_maximum: bool = opt(False, "Pad each micro-batch to max_tokens_per_mb.")
    grad_reduce_dtype: Literal["bfloat16", "float16", "float32"] = opt("float32", "Gradient reduction dtype.")
    archon: ArchonEngineConfig = section(ArchonEngineConfig, "Settings of the backend archon.")
    megatron: MegatronEngineConfig = section(MegatronEngineConfig, "Settings of the backend megatron.")
    offload: bool = opt(False, "Move weights off device between phases (torch_memory_saver).")
    use_lora: bool = opt(False, "Train LoRA adapters only.")
    lora_rank: int = opt(32, "Rank of the adapters.", ge=1)
    lora_alpha: int = opt(16, "Scale of the adapters (alpha).", ge=1)
    target_modules: list[str] = opt(help="Adapted modules; empty or ['all-linear'] = all linear layers.", factory=list)
    peft_type: Literal["lora"] = opt("lora", "Kind of adapter that is trained.")
    enable_tree_training: bool = opt(False, "Share prefixes through flex attention.")
    admin_api_key: str = opt("areal-admin-key", "Key of the v2 service.", secret=True)
    log_level: Literal["debug", "info", "warning", "error", "critical"] = opt("warning", "Log level of the v2 service.")
    request_timeout: float = opt(3600.0, "Request timeout of the v2 service.", unit="s", gt=0)
    setup_timeout: float = opt(3600.0, "Start-up timeout of the v2 service.", unit="s", gt=0)
    _version: Literal["v1", "v2"] = opt("v1", "Controller generation of 1.x; only v1 exists here.")

    def __post_init__(self) -> None:
        check_fields(self)
        self.scheduling_spec = list(self.scheduling_spec)
        check_placement(self.scheduling_spec, (1, 2), self.scheduling_strategy)
        if self.attn_impl not in BUILTIN_ATTENTION and not _HUB_KERNEL.fullmatch(self.attn_impl):
            raise self.fail("attn_impl", f"{', '.join(BUILTIN_ATTENTION)} or a hub kernel 'org/repo[@rev][:entry]'")
        if self.fsdp.memory_efficient_load and self.init_from_scratch:
            raise self.fail("init_from_scratch", "false, because fsdp.memory_efficient_load=true")
