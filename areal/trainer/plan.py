"""What a run will do, computed before anything starts: steps, sequences, tokens, memory.

Built by every trainer from its config and data; printed by ``areal train --dry-run``, which then stops the run.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from areal.api.config_loader import DRY_RUN

if TYPE_CHECKING:
    from areal.api.cli_args import BaseExperimentConfig, PPOConfig, TrainEngineConfig

_GIB = 1024**3
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass
class RunPlan:
    """Sizes of a run.

    Attributes:
        rows_per_step: prompts of one step.
        sequences_per_step: sequences of one step.
        max_tokens_per_step: upper bound of generated tokens of one step; 0 for supervised runs.
        steps_per_epoch, total_steps: optimizer steps (global steps).
        memory_gib: estimated GiB per role and process.
    """

    rows_per_step: int
    sequences_per_step: int
    max_tokens_per_step: int
    steps_per_epoch: int
    total_steps: int
    memory_gib: dict[str, float] = field(default_factory=dict)

    def total_rows(self, loader: Any) -> int:
        """Rows that the whole run trains on; ``loader`` knows the short last step of an epoch."""
        return sum(loader.step_size(step) for step in range(self.total_steps))

    def render(self) -> str:
        """A few lines for a person."""
        lines = [
            f"steps: {self.total_steps} ({self.steps_per_epoch} per epoch)",
            f"per step: {self.rows_per_step} rows, {self.sequences_per_step} sequences"
            + (f", at most {self.max_tokens_per_step:,} generated tokens" if self.max_tokens_per_step else ""),
        ]
        lines += [f"memory of {role}: about {gib:.2f} GiB" for role, gib in self.memory_gib.items()]
        return "\n".join(lines)


def count_parameters(path: str) -> tuple[int, Any]:
    """Number of parameters of the model at ``path`` and its HF config, without allocating them."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model_config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config)
    return sum(p.numel() for p in model.parameters()), model_config


def train_memory_gib(config: TrainEngineConfig, n_parameters: int, world_size: int) -> float:
    """GiB of weights, gradients and optimizer state on one rank; activations come on top.

    With an optimizer: fp32 master weights, fp32 gradients and two Adam moments, plus the compute copy below fp32.
    With adapters only the frozen weights are counted: what is trained is some per cent of them.
    """
    compute = _BYTES.get(config.dtype, 4)
    per_parameter = compute
    if config.optimizer is not None and not config.use_lora:
        per_parameter = 4 + 4 + (8 if config.optimizer.type == "adam" else 0) + (compute if compute < 4 else 0)
    return n_parameters * per_parameter / world_size / _GIB


def sampler_memory_gib(config: PPOConfig, n_parameters: int, model_config: Any) -> float:
    """GiB of the embedded sampler: two weight buffers and a full KV cache."""
    size = _BYTES.get(config.native.dtype or config.actor.dtype, 4)
    head_dim = getattr(model_config, "head_dim", None) or model_config.hidden_size // model_config.num_attention_heads
    length = min(config.gconfig.max_tokens, model_config.max_position_embeddings, config.native.max_seq_len or 4096)
    if config.train_dataset.max_length is not None:
        length = min(length, config.train_dataset.max_length + config.gconfig.max_new_tokens)
    per_token = 2 * model_config.num_hidden_layers * model_config.num_key_value_heads * head_dim * size
    total = 2 * n_parameters * size + config.native.max_running_requests * length * per_token
    return float(total / _GIB)


def build_plan(config: BaseExperimentConfig, loader: Any, gconfig: Any | None) -> RunPlan:
    """Plan of ``config`` with the training ``loader``; ``gconfig`` is None for supervised runs."""
    steps_per_epoch = len(loader)
    total = config.total_train_epochs * steps_per_epoch
    if config.total_train_steps is not None:
        total = min(total, config.total_train_steps)
    n_samples = gconfig.n_samples if gconfig is not None else 1
    if config.train_dataset.type in ("rw", "dpo"):
        n_samples = 2  # a row is a pair
    rows = loader.global_batch_size
    sequences = rows * n_samples
    tokens = sequences * min(gconfig.max_new_tokens, gconfig.max_tokens) if gconfig is not None else 0
    return RunPlan(rows, sequences, tokens, steps_per_epoch, total)


def add_memory(plan: RunPlan, config: Any) -> RunPlan:
    """Fill ``memory_gib`` for the roles that ``config`` names."""
    from areal.api.alloc_mode import ModelAllocation

    world_size = ModelAllocation.from_str(config.actor.backend).parallel.world_size
    n_parameters, model_config = count_parameters(config.actor.path)
    plan.memory_gib["actor"] = train_memory_gib(config.actor, n_parameters, world_size)
    ref = getattr(config, "ref", None)
    reference_free = getattr(config.actor, "reference_free", False)
    if ref is not None and not reference_free and getattr(config.actor, "kl_ctl", 1) > 0:  # DPO has no KL term
        n_reference, _ = count_parameters(ref.path)
        plan.memory_gib["ref"] = train_memory_gib(ref, n_reference, world_size)
    for name in ("critic", "teacher"):
        role = getattr(config, name, None)
        if role is not None:
            n_role, _ = count_parameters(role.path)
            ranks = ModelAllocation.from_str(role.backend).parallel.world_size
            plan.memory_gib[name] = train_memory_gib(role, n_role, ranks)
    if hasattr(config, "native") and hasattr(config, "rollout") and config.rollout.backend.startswith("native"):
        plan.memory_gib["rollout"] = sampler_memory_gib(config, n_parameters, model_config)
    return plan


def prepare_plan(config: Any, loader: Any, gconfig: Any | None) -> RunPlan:
    """Plan of a run. Under ``areal train --dry-run`` it is printed with every refusal, and the process ends here.

    Raises:
        SystemExit: under a dry run; code 0 when the run could start, 2 when a setting is refused.
    """
    plan = build_plan(config, loader, gconfig)
    if not DRY_RUN.get():
        return plan
    import yaml

    from areal.api.config.support import unsupported
    from areal.utils.manifest import masked_config

    refusals = unsupported(config)
    resolved = yaml.safe_dump(masked_config(config), sort_keys=False)
    try:
        shown = add_memory(plan, config).render()
    except (OSError, ValueError) as exc:  # no such model on this machine; the rest is still worth showing
        shown = f"{plan.render()}\nmemory: unknown, the model cannot be read: {str(exc).splitlines()[0]}"
    sys.stdout.write(f"{resolved}\n{shown}\n")
    for refusal in refusals:
        sys.stdout.write(f"refused: {refusal}\n")
    if not refusals:
        sys.stdout.write("the run can start\n")
    raise SystemExit(2 if refusals else 0)
