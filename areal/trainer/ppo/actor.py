"""The policy role of the PPO family: log-probs, advantages and the update, on an engine it holds.

Every method takes a ``PackedBatch`` (the trainer packs a step's rows once) or, for the public API, a list of padded
trajectories; the result has the form of the input. Called by ``PPOTrainer``.

    batch = actor.pack(trajectories)
    batch = actor.annotate(batch, "prox_logp")          # if actor.should_compute_prox_logp()
    actor.ppo_update(actor.compute_advantages(batch))
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, overload

import torch
import torch.distributed as dist
from torch import Tensor

from areal.trainer.ppo.advantages import compute_advantages
from areal.trainer.ppo.mismatch import MismatchError, MismatchMeter, judge, record_mismatch
from areal.trainer.ppo.stats import LossTensors, record_batch, record_loss, record_proximal, train_scalars
from areal.utils import logging, stats_tracker
from areal.utils.batch import MicroBatch, PackedBatch, pack, roll_packed, split_like, split_micro_batches
from areal.utils.errors import UnsupportedFeatureError
from areal.utils.functional import compute_prox_logp_approximations, ppo_actor_loss_fn
from areal.utils.ranks import is_first_rank, value_of_rank

if TYPE_CHECKING:
    from areal.api.config.ppo import PPOActorConfig
    from areal.api.engine_api import TrainEngine

logger = logging.getLogger("PPOActor")

Trajectories = list[dict[str, Any]]

# Fields that compute_advantages adds or replaces; the list form pads them back per trajectory.
ADVANTAGE_FIELDS = (
    "loss_mask",
    "logprobs",
    "prox_logp",
    "aligned_versions",
    "advantages",
    "returns",
    "kl_rewards",
    "tot_rewards",
)


class PPOActor:
    """Scores and updates a policy.

    Args:
        config: loss, shaping and mini-batch settings.
        engine: an initialised ``TrainEngine`` that runs the model.
        stats_name: tracker that receives the statistics.
    """

    def __init__(self, config: PPOActorConfig, engine: TrainEngine, stats_name: str = "ppo_actor") -> None:
        for name in ("use_sapo_loss", "m2_threshold"):
            if getattr(config, name):
                raise UnsupportedFeatureError(f"actor.{name}={getattr(config, name)} is not available yet; unset it")
        if config.rejection_sampling is not None and not config.use_decoupled_loss:
            logger.warning("actor.rejection_sampling has no effect without use_decoupled_loss: the ratio is always 1")
        self.config = config
        self.engine = engine
        self.stats_name = stats_name
        self._warned_zero_reference = False

    least_rows = 1
    """Groups that a step needs at least."""

    def pack(self, trajectories: Trajectories | PackedBatch) -> PackedBatch:
        """Pack a step's trajectories once; sequences without ``group_id`` are grouped by trajectory."""
        if isinstance(trajectories, PackedBatch):
            return trajectories
        batch = pack(trajectories)
        if "group_id" not in batch.sequences:
            sizes = torch.tensor([t["input_ids"].shape[0] for t in trajectories], device=batch.device)
            group_id = torch.arange(len(trajectories), device=batch.device).repeat_interleave(sizes)
            batch = batch.with_sequences(group_id=group_id)
        return batch

    def should_compute_prox_logp(self) -> bool:
        """Whether the update needs a forward pass first (``annotate(batch, "prox_logp")``)."""
        return self.config.should_compute_prox_logp()

    @torch.no_grad()
    def compute_logp(self, data: Trajectories | PackedBatch) -> Any:
        """Aligned log-probs under the current weights: one ``[n, S]`` per trajectory, or ``[T]`` for a packed batch."""
        self.engine.eval()
        return self.engine.forward_batch(data)

    def annotate(self, batch: PackedBatch, key: str) -> PackedBatch:
        """Return ``batch`` with ``compute_logp``'s result as token field ``key`` (``prox_logp``, ``ref_logp``)."""
        return batch.with_tokens(**{key: self.compute_logp(batch)})

    @overload
    def compute_advantages(self, data: Trajectories) -> Trajectories: ...
    @overload
    def compute_advantages(self, data: PackedBatch) -> PackedBatch: ...
    def compute_advantages(self, data: Trajectories | PackedBatch) -> Trajectories | PackedBatch:
        """Shape rewards and compute advantages; the input stays as it is. Recomputed log-probs are compared with the
        sampler's.

        Returns: a new batch, or a new list of new dicts, with the fields of ``ADVANTAGE_FIELDS``; mask and log-probs in
            it are aligned (see ``areal.trainer.ppo.advantages``).

        Raises:
            MismatchError: sampler and trainer disagree, and ``actor.mismatch.action=stop``.
        """
        packed = self.pack(data)
        if self.config.kl_ctl > 0 and "ref_logp" not in packed.tokens and not self._warned_zero_reference:
            self._warned_zero_reference = True
            logger.warning(
                "actor.kl_ctl=%g without ref_logp penalises the log-probs themselves (reference 0): configure ref, "
                "or set actor.kl_ctl=0",
                self.config.kl_ctl,
            )
        with torch.no_grad():
            batch = compute_advantages(packed, self.config, self.engine.data_parallel_group)
            if self.should_compute_prox_logp():
                self._compare_recomputed(packed, batch)
        if isinstance(data, PackedBatch):
            return batch
        columns = {
            key: split_like(batch.tokens[key], batch.lens, data) for key in ADVANTAGE_FIELDS if key in batch.tokens
        }
        return [{**t, **{key: parts[i] for key, parts in columns.items()}} for i, t in enumerate(data)]

    def ppo_update(self, data: Trajectories | PackedBatch) -> None:
        """One optimizer step per mini-batch on the result of ``compute_advantages``; statistics go to the tracker.

        Without recomputed log-probs, the sampler's are compared with those of the first mini-batch, whose weights are
        still the ones that the step began with.

        Raises:
            MismatchError: sampler and trainer disagree, and ``actor.mismatch.action=stop``; the other mini-batches are
                left out.
        """
        batch = self.pack(data)
        tracker = stats_tracker.get(self.stats_name)
        version = self.engine.get_version()
        with torch.no_grad():
            record_batch(tracker, batch, self.config, version)
        loss = ActorLoss(self.config, tracker, version)
        if not self.should_compute_prox_logp():
            loss.meter = MismatchMeter(self.config.mismatch.token_bound, version)
        self.engine.train()
        for mini_batch in self._mini_batches(batch.without("rewards", "tot_rewards", "kl_rewards")):
            with tracker.scope("update"):
                result = self.engine.train_batch(mini_batch.batch, loss, loss_tokens, token_mask="loss_mask")
                train_scalars(tracker, result)
            if loss.meter is not None:
                meter, loss.meter = loss.meter, None
                self._close_meter(meter)

    def _compare_recomputed(self, packed: PackedBatch, batch: PackedBatch) -> None:
        """Compare the log-probs that came with ``packed`` with the recomputed ones; ``batch`` has the aligned mask."""
        meter = MismatchMeter(self.config.mismatch.token_bound, self.engine.get_version())
        sampler = roll_packed(packed.tokens["logprobs"], packed.cu_seqlens)
        mask = batch.tokens["loss_mask"] != 0
        meter.add(sampler, packed.tokens["prox_logp"], mask, batch.tokens.get("aligned_versions"))
        self._close_meter(meter)

    def _close_meter(self, meter: MismatchMeter) -> None:
        """Record what a meter found on all ranks, and act on it; one host sync."""
        engine = self.engine
        numbers = meter.reduce(engine.data_parallel_group)
        # Log-probs that a loss compares are on one pipeline stage; all of them must come to the same verdict.
        model_group = engine.context_and_model_parallel_group
        numbers = value_of_rank(numbers, engine.current_data_parallel_head(), model_group)
        record_mismatch(stats_tracker.get(self.stats_name), numbers, meter.current_version)
        problem = judge(numbers, self.config, meter.current_version)
        if problem is None:
            return
        if self.config.mismatch.action == "stop":
            raise MismatchError(f"{problem}, or set actor.mismatch.action=warn")
        if is_first_rank():
            logger.warning(problem)

    def _mini_batches(self, batch: PackedBatch) -> list[MicroBatch]:
        """Balanced parts of the batch, as many on every data-parallel rank."""
        wanted = self.config.ppo_n_minibatches
        granularity = self.config.mb_spec.granularity
        count = min(wanted, batch.n_sequences // granularity)
        group = self.engine.data_parallel_group
        if group is not None:
            smallest = torch.tensor(count, device=batch.device)
            dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=group)
            count = int(smallest)
        if count < wanted:
            logger.warning(
                "only %d sequences for ppo_n_minibatches=%d: %d optimizer steps", batch.n_sequences, wanted, count
            )
        spec = replace(self.config.mb_spec, n_mbs=count, max_tokens_per_mb=None, n_mbs_divisor=1)
        return split_micro_batches(batch, spec)


class ActorLoss:
    """The loss callback of one update: PPO loss of a micro-batch plus its statistics.

    Args:
        config: the actor's.
        tracker: receives the statistics, in the scope that is open when the loss is called.
        current_version: version of the weights before the update (v_theta).
    """

    def __init__(
        self, config: PPOActorConfig, tracker: stats_tracker.DistributedStatsTracker, current_version: int
    ) -> None:
        self.config = config
        self.tracker = tracker
        self.current_version = current_version
        self.meter: MismatchMeter | None = None
        """Compares with the sampler's log-probs while it is set; only as long as ``logprobs`` are those."""

    def replay_arguments(self) -> dict[str, Any]:
        """See ``areal.engine.core.failure_files.ReplayableLoss``."""
        return {"role": self.tracker.name, "current_version": self.current_version}

    @classmethod
    def for_replay(cls, config: PPOActorConfig, arguments: dict[str, Any]) -> ActorLoss:
        """See ``areal.engine.core.failure_files.ReplayableLoss``."""
        tracker = stats_tracker.DistributedStatsTracker(arguments["role"])
        return cls(config, tracker, arguments["current_version"])

    def __call__(
        self, logprobs: Tensor, entropy: Tensor, packed_input: dict[str, Any], **logit_range: Tensor
    ) -> Tensor:
        """Mean loss over the micro-batch's trained tokens; tensors are ``[T]``."""
        config = self.config
        mask = packed_input["loss_mask"] != 0
        old = packed_input["logprobs"]
        theta = torch.where(mask, logprobs.detach(), 0.0)
        prox = self._proximal(theta, old, mask, packed_input)
        loss, loss_stats = ppo_actor_loss_fn(
            logprobs=logprobs,
            proximal_logprobs=prox,
            old_logprobs=old,
            advantages=packed_input["advantages"],
            eps_clip=config.eps_clip,
            loss_mask=mask,
            eps_clip_higher=config.eps_clip_higher,
            c_clip=config.c_clip,
            importance_sampling_level=config.importance_sampling_level,
            rejection_sampling=config.rejection_sampling,
            cu_seqlens=packed_input["cu_seqlens"],
        )
        with torch.no_grad():
            if self.meter is not None:
                self.meter.add(old, theta, mask, packed_input.get("aligned_versions"))
            tensors = LossTensors(mask, theta, prox, old, torch.where(mask, entropy.detach(), 0.0), loss_stats)
            record_loss(self.tracker, tensors, **{k: v.detach() for k, v in logit_range.items()})
            if config.use_decoupled_loss and "aligned_versions" in packed_input:
                versions = packed_input["aligned_versions"]
                record_proximal(self.tracker, tensors, versions, self.current_version, config.prox_logp_method)
        return loss

    def _proximal(self, theta: Tensor, old: Tensor, mask: Tensor, packed_input: dict[str, Any]) -> Tensor:
        if not (self.config.use_decoupled_loss and self.config.prox_logp_method == "loglinear"):
            prox: Tensor = packed_input["prox_logp"]
            return prox
        versions = torch.where(mask, packed_input["aligned_versions"], -1)
        return compute_prox_logp_approximations(old, theta, versions, self.current_version, "loglinear")["loglinear"]


def loss_tokens(packed_input: dict[str, Any]) -> Tensor:
    """Weight of a micro-batch: its trained tokens."""
    mask: Tensor = packed_input["loss_mask"]
    return mask.count_nonzero()
