"""Batches, losses and one-process references shared by the train-engine tests and their worker processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from areal.api.config.fields import DefaultStr
from areal.api.config.optimizer import OptimizerConfig
from areal.api.config.train import MicroBatchSpec, TrainEngineConfig
from areal.engine.fsdp_engine import FSDPEngine
from areal.utils.batch import roll_packed
from tests.fakes import VOCAB

# A large eps: with the usual one a first Adam step is the sign of the gradient, which rounding can flip.
ADAM = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.05, "gradient_clipping": 0.5}
LENGTHS = (7, 12, 3, 9, 12, 5, 2)


def engine_config(path: str, **settings: Any) -> TrainEngineConfig:
    """Float32 config with AdamW; ``optimizer`` and ``mb_spec`` may be dicts."""
    settings = {"dtype": "float32", "backend": "fsdp:d1", "optimizer": ADAM, **settings}
    if isinstance(settings["optimizer"], dict):
        settings["optimizer"] = OptimizerConfig(**settings["optimizer"])
    if isinstance(settings.get("mb_spec"), dict):
        settings["mb_spec"] = MicroBatchSpec(**settings["mb_spec"])
    settings.setdefault("attn_impl", DefaultStr("flash_attention_2"))
    return TrainEngineConfig(experiment_name="test", trial_name="test", path=path, **settings)


def build_engine(path: str, *, ft_spec: Any = None, **settings: Any) -> FSDPEngine:
    """An initialized engine in training mode."""
    engine = FSDPEngine(engine_config(path, **settings))
    engine.create_process_group()
    engine.initialize(None, ft_spec)
    return engine.train()


def batch(lengths: tuple[int, ...] = LENGTHS, seed: int = 0, prompt: int = 2) -> list[dict[str, Tensor]]:
    """One trajectory per length, right padded by two; the first ``prompt`` tokens carry no loss."""
    generator = torch.Generator().manual_seed(seed)
    trajectories = []
    for n in lengths:
        ids = torch.randint(2, VOCAB, (1, n + 2), generator=generator)
        mask = torch.arange(n + 2)[None] < n
        loss_mask = (mask & (torch.arange(n + 2)[None] >= prompt)).int()
        trajectories.append({"input_ids": ids, "attention_mask": mask, "loss_mask": loss_mask})
    return trajectories


def predicting_mask(packed_input: dict[str, Any]) -> Tensor:
    """Float mask of positions whose next token carries loss."""
    return roll_packed(packed_input["loss_mask"], packed_input["cu_seqlens"]).float()


def loss_fn(logprobs: Tensor, entropy: Tensor, packed_input: dict[str, Any]) -> Tensor:
    """Mean negative log-prob minus a little entropy over the loss tokens of a micro-batch."""
    mask = predicting_mask(packed_input)
    return ((-logprobs - 0.01 * entropy) * mask).sum() / mask.sum()


def weight_fn(packed_input: dict[str, Any]) -> Tensor:
    """Number of loss tokens."""
    return predicting_mask(packed_input).sum()


def reference_logprobs(model: Any, trajectory: dict[str, Tensor], temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Next-token log-probs and entropies ``[n - 1]`` of one unpadded sequence, alone in the model."""
    n = int(trajectory["attention_mask"].sum())
    ids = trajectory["input_ids"][:, :n]
    logp = torch.log_softmax(model(input_ids=ids).logits[0].float() / temperature, dim=-1)
    return logp[:-1].gather(1, ids[0, 1:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)[:-1]


def reference_step(
    model: Any, trajectories: list[dict[str, Tensor]], optimizer: torch.optim.Optimizer
) -> tuple[float, float]:
    """One plain step over all sequences; returns loss and gradient norm. ``optimizer`` owns the parameters."""
    total, count = torch.zeros(()), 0.0
    for trajectory in trajectories:
        n = int(trajectory["attention_mask"].sum())
        mask = trajectory["loss_mask"][0, 1:n].float()
        logp, entropy = reference_logprobs(model, trajectory)
        total = total + ((-logp - 0.01 * entropy) * mask).sum()
        count += mask.sum().item()
    loss = total / count
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), ADAM["gradient_clipping"])
    optimizer.step()
    return loss.item(), norm.item()


def adamw(model: Any) -> torch.optim.Optimizer:
    """The optimizer that ``ADAM`` describes, from torch."""
    return torch.optim.AdamW(model.parameters(), lr=ADAM["lr"], eps=ADAM["eps"], weight_decay=ADAM["weight_decay"])
