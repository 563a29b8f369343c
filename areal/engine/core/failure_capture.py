"""Watches optimizer steps and keeps the ones that fail, so that ``areal replay`` can run them again.

In: losses of the micro-batches and the gradient norm of every step. Out: nothing for a good step; for one that is not
finite, or whose norm is far above its running median, a directory ``step_{version}`` with

    failure.json     what was seen, the loss function's import path, versions of the libraries
    config.json      the settings of the engine
    model/           Hugging Face config of the model
    state/           recover point of before the step: weights, optimizer, schedule, random state
    rank_{r}.pt      the batch of each rank, and the losses of its micro-batches

Only the first captures are kept. Called by ``engine/core/loop.py``; every rank comes to the same decision, because loss
and norm are those of all ranks. Read by ``engine/core/replay.py``.
"""

from __future__ import annotations

import dataclasses
import json
import math
import platform
import re
import statistics
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from areal.api.io_struct import SaveLoadMeta
from areal.engine.core.checkpoint import rng_state, set_rng_state, shared_directory
from areal.engine.core.distributed import all_reduce_sum, current_device, group_rank, group_size
from areal.engine.core.failure_files import (
    CONFIG_FILE,
    FAILURE_FILE,
    FORMAT_VERSION,
    MODEL_DIR,
    STATE_DIR,
    describe_callable,
    encode_batch,
    rank_file,
    type_path,
    written_settings,
)
from areal.utils import logging
from areal.utils.errors import CheckpointError
from areal.utils.ranks import gather_json, together

if TYPE_CHECKING:
    from areal.engine.core.parallel_dims import ParallelGroups

logger = logging.getLogger("FailureCapture")

HISTORY_STEPS = 64
MIN_HISTORY = 8  # norms of the first steps of a run say little


@dataclass(frozen=True)
class TrainCall:
    """Arguments of one ``train_batch`` call."""

    input_: Any
    loss_fn: Callable[..., Tensor]
    weight_fn: Callable[..., Tensor]
    token_mask: str | None


@dataclass
class StepFindings:
    """What one step showed.

    Attributes:
        loss: weighted mean over all micro-batches and ranks.
        grad_norm: before clipping.
        micro_losses: loss of each micro-batch of this rank, as the loss function returned it.
        first_bad_parameter, first_bad_gradient: names, in model order, of the first that is not finite on any rank.
    """

    loss: float
    grad_norm: float
    micro_losses: list[float] = field(default_factory=list)
    first_bad_parameter: str | None = None
    first_bad_gradient: str | None = None


class StepProbe:
    """Collects the losses of one step; ``inspect`` is called with the norm, before the weights change.

    Args:
        groups: process groups of this rank.
        total_weight: loss weight of all micro-batches and ranks.
        judge: gets the probe and the findings; every rank calls it.
    """

    def __init__(
        self, groups: ParallelGroups, total_weight: float, judge: Callable[[StepProbe, StepFindings], None]
    ) -> None:
        self.groups, self.total_weight, self.judge = groups, total_weight, judge
        self.rng = rng_state()
        self._losses: list[Tensor] = []
        self._weights: list[float] = []

    def add(self, loss: Tensor, weight: float) -> None:
        """Note the loss of one micro-batch; no host sync."""
        self._losses.append(loss.detach().float().reshape(()))
        self._weights.append(weight)

    def inspect(self, grad_norm: float) -> None:
        """Finish the step; one collective and one host sync."""
        losses = torch.stack(self._losses) if self._losses else torch.zeros(0, device=current_device())
        weighted = (losses * torch.tensor(self._weights, device=losses.device)).sum()
        all_reduce_sum(weighted, self.groups.pp)  # one pipeline stage has losses
        packed = torch.cat([all_reduce_sum(weighted, self.groups.loss).reshape(1), losses])
        total, *micro_losses = packed.tolist()
        self.judge(self, StepFindings(total / self.total_weight, grad_norm, micro_losses))


class StepWatcher(Protocol):
    """Sees every optimizer step of an engine."""

    def start(self, call: TrainCall, total_weight: float) -> StepProbe:
        """A probe for one step; called by the loop before the first micro-batch."""
        ...


class FailureCapture:
    """Keeps the steps of one engine that fail.

    Args:
        engine: an initialised engine; its ``save`` writes the state.
        directory: where captures go.
    """

    def __init__(self, engine: Any, directory: str | Path) -> None:
        self.engine, self.directory = engine, Path(directory)
        self.settings = engine.config.failure_capture
        self._norms: deque[float] = deque(maxlen=HISTORY_STEPS)
        self._call: TrainCall | None = None

    def start(self, call: TrainCall, total_weight: float) -> StepProbe:
        """See :class:`StepWatcher`."""
        self._call = call
        return StepProbe(self.engine.groups, total_weight, self._judge)

    def _judge(self, probe: StepProbe, findings: StepFindings) -> None:
        reason = self._why(findings)
        call, self._call = self._call, None
        if reason is not None and call is not None:
            self._capture(reason, call, probe, findings)
        if math.isfinite(findings.grad_norm) and findings.grad_norm > 0:
            self._norms.append(findings.grad_norm)

    def _why(self, findings: StepFindings) -> str | None:
        """Why the step failed, in words; None for a good one."""
        if not math.isfinite(findings.loss):
            return f"loss is {findings.loss}"
        if not math.isfinite(findings.grad_norm):
            return f"gradient norm is {findings.grad_norm}"
        factor = self.settings.grad_norm_factor
        if factor is None or len(self._norms) < MIN_HISTORY:
            return None
        median = statistics.median(self._norms)
        if findings.grad_norm <= factor * median:
            return None
        return f"gradient norm {findings.grad_norm:.6g} is more than {factor:g} times its running median {median:.6g}"

    def _capture(self, reason: str, call: TrainCall, probe: StepProbe, findings: StepFindings) -> None:
        """Write the step, whole or not at all; a failure to write is logged and the run goes on."""
        target = self._target()
        if target is None:
            logger.error(f"{reason}: not captured, {self.settings.max_captures} captures are in {self.directory}")
            return
        locate_bad_tensors(self.engine, findings)
        now = rng_state()
        set_rng_state(probe.rng)  # the recover point says what the random state was before the step
        try:
            with shared_directory(target, self.engine.groups.cpu) as aside:
                self._write(aside, reason, call, findings)
        except (OSError, RuntimeError) as exc:
            logger.error(f"{reason}: the step could not be captured in {target}: {exc}")
            return
        finally:
            set_rng_state(now)
        logger.error(f"{reason}: step captured; run it again with: areal replay {target}")

    def _target(self) -> Path | None:
        """Where to write; None when enough is kept. Rank 0 looks and tells the others."""
        choice: list[str | None] = [None]
        group = self.engine.groups.cpu
        if group_rank(group) == 0:
            kept = [path.name for path in self.directory.glob("step_*")]
            if len(kept) < self.settings.max_captures:
                name = f"step_{self.engine.get_version()}"
                names = [name, *(f"{name}.{n}" for n in range(2, len(kept) + 2))]
                choice = [next(n for n in names if n not in kept)]
        if group is not None:
            dist.broadcast_object_list(choice, src=dist.get_global_rank(group, 0), group=group)
        return None if choice[0] is None else self.directory / choice[0]

    def _write(self, aside: Path, reason: str, call: TrainCall, findings: StepFindings) -> None:
        group, rank = self.engine.groups.cpu, group_rank(self.engine.groups.cpu)
        # Every rank learns here of one that failed: the engine's save is a collective.
        with together(f"{aside} could not be written", CheckpointError, group, alone=group is None):
            if rank == 0:
                _write_json(aside / FAILURE_FILE, self._document(reason, call, findings))
                _write_json(aside / CONFIG_FILE, written_settings(self.engine.config))
                self.engine.hf_config.save_pretrained(aside / MODEL_DIR)
            share = {"batch": encode_batch(call.input_), "micro_losses": findings.micro_losses}
            torch.save(share, aside / rank_file(rank))
        self.engine.save(SaveLoadMeta(str(aside / STATE_DIR), "dcp", True))

    def _document(self, reason: str, call: TrainCall, findings: StepFindings) -> dict[str, Any]:
        engine = self.engine
        seen = dataclasses.asdict(findings)
        del seen["micro_losses"]  # each rank's own, in its file
        return {
            "format": FORMAT_VERSION,
            "reason": reason,
            "version": engine.get_version(),
            "world_size": group_size(engine.groups.cpu),
            "engine": type_path(type(engine)),
            "config": type_path(type(engine.config)),
            "training": engine.module.training,
            "schedule_steps": engine.loop.optimizer.schedule.total,
            "loss": describe_callable(call.loss_fn),
            "weight": describe_callable(call.weight_fn),
            "token_mask": call.token_mask,
            "findings": seen,
            "built_with": {
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "python": platform.python_version(),
                "device": str(engine.device),
            },
        }


def watch_for_failures(engine: Any) -> None:
    """Let an initialised engine capture its failing steps, where its config names a directory."""
    settings = engine.config.failure_capture
    if engine.config.optimizer is not None and settings.max_captures > 0 and settings.directory is not None:
        engine.loop.watcher = FailureCapture(engine, settings.directory)


def locate_bad_tensors(engine: Any, findings: StepFindings) -> None:
    """Fill in the first parameter and the first gradient that are not finite; every rank must call."""
    shards = engine.loop.optimizer.shards.shards
    findings.first_bad_parameter = _first_bad(shards, engine.groups)
    findings.first_bad_gradient = _first_bad({name: shard.grad for name, shard in shards.items()}, engine.groups)


def _first_bad(tensors: Mapping[str, Tensor | None], groups: ParallelGroups) -> str | None:
    """The first one in the order of the layers; ranks of other pipeline stages hold other names."""
    bad = (
        (_layer(name), place, name)
        for place, (name, tensor) in enumerate(tensors.items())
        if tensor is not None and not bool(torch.isfinite(tensor.detach()).all())
    )
    own = min(bad, default=None)
    ranks = [own] if groups.cpu is None else gather_json(own, groups.cpu)
    return min(tuple(found) for found in ranks if found)[2] if any(ranks) else None


def _layer(name: str) -> int:
    """Number of the layer that a parameter is in; the embedding comes before all of them, norm and head after."""
    found = re.search(r"\.(\d+)\.", name)
    return int(found[1]) if found else -1 if "embed" in name else sys.maxsize


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")
