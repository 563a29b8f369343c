"""What the live ranks run to compare a layout with one process: a model, losses, micro-batch counts, shards of rows."""

from __future__ import annotations

import unittest.mock
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from areal.api.alloc_mode import ParallelStrategy
from areal.api.io_struct import SaveLoadMeta
from areal.engine.core import lm_head
from areal.engine.core.tensor_parts import full_tensor
from areal.engine.fsdp_engine import FSDPEngine
from areal.utils.batch import pack, roll_packed
from areal.utils.errors import ArealError
from tests.engine_fakes import ADAM, batch, build_engine, engine_config, predicting_mask, reference_logprobs, weight_fn

LENGTHS = (7, 12, 3, 9, 12, 5, 2, 4)


def rows(lengths: tuple[int, ...] = LENGTHS, masked: tuple[int, ...] = ()) -> list[dict[str, Tensor]]:
    """Trajectories with what PPO and value losses read, and a number for each token; ``masked`` ones have no loss."""
    generator = torch.Generator().manual_seed(1)
    offset = 0
    trajectories = batch(lengths)
    for index, row in enumerate(trajectories):
        shape = row["input_ids"].shape
        row["token_id"] = torch.arange(offset, offset + shape[1])[None]
        row["logprobs"] = -4.0 + torch.randn(shape, generator=generator)
        row["advantages"] = torch.randn(shape, generator=generator)
        row["returns"] = torch.randn(shape, generator=generator)
        row["predicting"] = torch.cat([row["loss_mask"][:, 1:], row["loss_mask"][:, :1] * 0], dim=1)
        if index in masked:
            row["loss_mask"] = torch.zeros_like(row["loss_mask"])
        offset += shape[1]
    return trajectories


def sft(logprobs: Tensor, entropy: Tensor, packed: dict[str, Any]) -> Tensor:
    """Mean negative log-prob."""
    mask = predicting_mask(packed)
    return (-logprobs * mask).sum() / mask.sum()


def ppo(logprobs: Tensor, entropy: Tensor, packed: dict[str, Any]) -> Tensor:
    """Clipped ratio with an entropy bonus."""
    mask = predicting_mask(packed)
    old = roll_packed(packed["logprobs"], packed["cu_seqlens"])
    ratio = torch.exp(logprobs - old).where(mask > 0, 1.0)
    gain = torch.minimum(ratio * packed["advantages"], ratio.clamp(0.8, 1.2) * packed["advantages"])
    return ((-gain - 0.1 * entropy) * mask).sum() / mask.sum()


def value(logprobs: Tensor, entropy: Tensor, packed: dict[str, Any]) -> Tensor:
    """Squared error of a prediction per token, as a value head's loss is."""
    mask = predicting_mask(packed)
    return ((torch.tanh(logprobs + entropy) - packed["returns"]).square() * mask).sum() / mask.sum()


LOSSES: dict[str, Callable[..., Tensor]] = {"sft": sft, "ppo": ppo, "value": value}


@dataclass
class Outcome:
    """Results of a few optimizer steps."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    logprobs: list[Tensor] = field(default_factory=list)
    entropy: Tensor | None = None
    results: list[dict[str, float]] = field(default_factory=list)
    most_tokens: int = 0


def reference(model: Any, loss_name: str, trajectories: list[dict[str, Tensor]], steps: int = 2) -> Outcome:
    """The same steps in one process with transformers and torch alone; trains ``model``."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=ADAM["lr"], eps=ADAM["eps"], weight_decay=ADAM["weight_decay"])
    packed = pack(trajectories).as_loss_input()
    outcome = Outcome()
    for _ in range(steps):
        pairs = [reference_logprobs(model, row) for row in trajectories]
        zero = torch.zeros(1)
        logprobs = torch.cat([torch.cat([logp, zero]) for logp, _ in pairs])
        entropy = torch.cat([torch.cat([h, zero]) for _, h in pairs])
        loss = LOSSES[loss_name](logprobs, entropy, packed)
        optimizer.zero_grad()
        loss.backward()
        outcome.losses.append(loss.item())
        outcome.gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
        outcome.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), ADAM["gradient_clipping"]).item())
        optimizer.step()
        if outcome.entropy is None:
            outcome.entropy = entropy.detach()
            outcome.logprobs = [logp.detach() for logp, _ in pairs]
    outcome.weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    return outcome


def compare(
    path: str,
    backend: str,
    cases: list[tuple[str, int]],
    shards: list[list[int]],
    masked: tuple[int, ...] = (),
    token_mask: str | None = None,
    **settings: Any,
) -> list[Outcome]:
    """Two steps from the saved weights for each ``(loss, micro-batches)``; ``shards[r]`` are rank r's rows (of d)."""
    engine = build_engine(path, backend=backend, **settings)
    initial = {name: local(p).clone() for name, p in engine.module.named_parameters()}
    own = [row for i, row in enumerate(rows(masked=masked)) if i in shards[engine.data_parallel_rank]]
    outcomes = []
    for loss_name, n_mbs in cases:
        engine.config.mb_spec.n_mbs = n_mbs
        with torch.no_grad():
            for name, parameter in engine.module.named_parameters():
                local(parameter).copy_(initial[name])
        engine.loop.optimizer.torch_optimizer.state.clear()
        outcomes.append(_two_steps(engine, loss_name, own, token_mask))
    engine.destroy()
    return outcomes


def local(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter, without autograd."""
    part = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return part.detach()


def _two_steps(engine: FSDPEngine, loss_name: str, own: list[dict[str, Tensor]], token_mask: str | None) -> Outcome:
    outcome = Outcome(logprobs=engine.forward_batch(own))
    loss_fn, optimizer = LOSSES[loss_name], engine.loop.optimizer
    whole = torch.zeros(sum(n + 2 for n in LENGTHS))

    def watched(logprobs: Tensor, entropy: Tensor, packed: dict[str, Any]) -> Tensor:
        whole[packed["token_id"]] = entropy.detach().float()
        outcome.most_tokens = max(outcome.most_tokens, logprobs.shape[0])
        return loss_fn(logprobs, entropy, packed)

    def step(*args: Any, **kwargs: Any) -> dict[str, float]:
        outcome.gradients.append({n: full_tensor(p.grad).clone() for n, p in engine.module.named_parameters()})
        return type(optimizer).step(optimizer, *args, **kwargs)

    optimizer.step = step
    for index in range(2):
        outcome.losses.append(engine.eval_batch(own, watched, weight_fn).item())
        if index == 0:
            outcome.entropy = whole.clone()
        outcome.results.append(engine.train_batch(own, loss_fn, weight_fn, token_mask=token_mask))
        outcome.norms.append(outcome.results[-1]["grad_norm"])
    del optimizer.step
    outcome.weights = {name: tensor.clone() for name, tensor in engine.named_full_tensors()}
    return outcome


def refusal(
    path: str,
    backend: str,
    lengths: tuple[tuple[int, ...], ...] = (),
    strategy: dict[str, int] | None = None,
    **settings: Any,
) -> tuple[str, str]:
    """Class and message of the error that building (or scoring ``lengths[rank]``) raises; empty when it works."""
    engine = FSDPEngine(engine_config(path, backend=backend, **settings))
    try:
        engine.create_process_group(ParallelStrategy(**strategy) if strategy is not None else None)
        engine.initialize(None, None)
        if lengths:
            engine.forward_batch(batch(lengths[dist.get_rank()]))
    except ArealError as exc:
        return type(exc).__name__, str(exc)
    finally:
        engine.destroy()
    return "", ""


def places(path: str, backend: str) -> dict[str, Any]:
    """Where a rank stands, and how many parameters it holds."""
    engine = build_engine(path, backend=backend)
    model_group = engine.context_and_model_parallel_group
    found = {
        "data": (engine.data_parallel_rank, engine.data_parallel_world_size),
        "model": None if model_group is None else dist.get_process_group_ranks(model_group),
        "head": engine.current_data_parallel_head(),
        "is_head": engine.is_data_parallel_head(),
        "elements": sum(local(p).numel() for p in engine.module.parameters()),
    }
    engine.destroy()
    return found


def export(path: str, backend: str, out: str) -> dict[str, Tensor]:
    """One step, then a Hugging Face export; returns the full tensors, read again from the export into the layout."""
    engine = build_engine(path, backend=backend)
    engine.train_batch(rows(), sft, weight_fn)
    before = {name: tensor.clone() for name, tensor in engine.named_full_tensors()}
    engine.save(SaveLoadMeta(out, "hf", False))
    engine.train_batch(rows(), sft, weight_fn)
    engine.load(SaveLoadMeta(out, "hf", False))
    for name, tensor in engine.named_full_tensors():
        assert torch.equal(tensor, before[name]), name
    engine.destroy()
    return before


def losses_of(path: str, backend: str, shards: list[list[int]], **settings: Any) -> list[float]:
    """Losses of four steps."""
    engine = build_engine(path, backend=backend, **settings)
    own = [row for i, row in enumerate(rows()) if i in shards[engine.data_parallel_rank]]
    losses = []
    for _ in range(4):
        losses.append(engine.eval_batch(own, sft, weight_fn).item())
        engine.train_batch(own, sft, weight_fn)
    engine.destroy()
    return losses


def through_logits(path: str, backend: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits of the whole batch and gradients of a 1.x callback that makes its loss from them."""
    engine = build_engine(path, backend=backend)
    seen: list[Tensor] = []

    def process(logits: Tensor, packed: dict[str, Any]) -> Tensor:
        seen.append(logits.detach().clone())
        return torch.log_softmax(logits, -1)[:, 3].sum()

    engine.forward_backward_batch([pack(rows())], process)
    gradients = {n: full_tensor(p.grad).clone() for n, p in engine.module.named_parameters() if p.grad is not None}
    engine.destroy()
    return seen[0], gradients


def vocabulary_parallel(chunk_rows: int, keep: int, rows_key: str) -> dict[str, float]:
    """Largest differences between a sharded head and a whole one, values and gradients, for a head of all ranks."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(23, 16, generator=generator), torch.randn(48, 16, generator=generator)
    labels = torch.randint(0, 48, (23,), generator=generator)
    grads = torch.randn(2, 23, generator=generator)
    chosen = {"all": None, "some": torch.arange(0, 23, 3), "none": torch.arange(0)}[rows_key]
    size, rank = dist.get_world_size(), dist.get_rank()

    def run(head: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
        x, w = hidden.clone().requires_grad_(), head.clone().requires_grad_()
        out = lm_head.token_output(x, w, labels, chosen, 0.7, None, group)
        (out.logprobs * grads[0] + out.entropy * grads[1]).sum().backward()
        return [out.logprobs, out.entropy, out.vocab_min_logits, out.vocab_max_logits, x.grad, w.grad]

    whole = run(weight, None)
    with unittest.mock.patch.multiple(lm_head, CHUNK_ROWS=chunk_rows, CHUNK_ELEMENTS_CPU=0, KEEP_ELEMENTS=keep):
        own = run(weight.chunk(size)[rank], dist.group.WORLD)
    dist.all_reduce(own[4])
    whole[5] = whole[5].chunk(size)[rank]
    names = ("logprobs", "entropy", "low", "high", "hidden", "head")
    return {n: (a - b).abs().max().item() for n, a, b in zip(names, own, whole, strict=True)}
