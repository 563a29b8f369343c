"""The policy role of the PPO family: log-probs, advantages and the update, on an engine it holds.

Every method takes a ``PackedBatch`` (the trainer packs a step's rows once) or, for the public API, a list of padded
trajectories; the result has the form of the input. Called by ``PPOTrainer``.

    batch = actor.pack(trajectories)
    batch = actor.annotate(batch, "prox_logp")          # if actor.should_compute_prox_logp()
    actor.ppo_update(actor.compute_advantages(batch))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from areal.trainer.ppo import ADVANTAGE_FNS, LOSS_FNS, resolve
from areal.trainer.ppo.advantages import compute_advantages
from areal.trainer.ppo.losses import LOSS_WEIGHTS, LossInput, run_loss
from areal.trainer.ppo.mini_batches import mini_batches
from areal.trainer.ppo.mismatch import MismatchError, MismatchMeter, judge, record_mismatch
from areal.trainer.ppo.stats import LossTensors, record_batch, record_loss, record_proximal, train_scalars
from areal.utils import logging, stats_tracker
from areal.utils.batch import PackedBatch, pack, roll_packed, split_like
from areal.utils.functional import (
    aggregate,
    compute_prox_logp_approximations,
    distillation_token_losses,
    m2po_mask,
    pure_distillation_token_losses,
)
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
DISTILL_LOSS_WEIGHT = 0.005  # of a batch with teacher_logp that does not say how much they count


class PPOActor:
    """Scores and updates a policy.

    Args:
        config: loss, shaping and mini-batch settings.
        engine: an initialised ``TrainEngine`` that runs the model.
        stats_name: tracker that receives the statistics.
    """

    def __init__(self, config: PPOActorConfig, engine: TrainEngine, stats_name: str = "ppo_actor") -> None:
        for problem in _idle_settings(config):
            logger.warning(problem)
        # A wrong name fails here, not in the first step.
        resolve("actor.loss_fn", config.objective(), LOSS_FNS)
        resolve("actor.advantage_fn", config.advantage_fn, ADVANTAGE_FNS)
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
            if self.config.m2_threshold is not None:
                batch = self._drop_off_policy(batch, self.config.m2_threshold)
        loss = ActorLoss(self.config, tracker, version)
        if not self.should_compute_prox_logp():
            loss.meter = MismatchMeter(self.config.mismatch.token_bound, version)
        weight = LOSS_WEIGHTS[self.config.loss_agg]
        self.engine.train()
        rows = batch.without("rewards", "tot_rewards", "kl_rewards", "response_len")
        for mini_batch in mini_batches(rows, self.config, self.engine.data_parallel_group):
            with tracker.scope("update"):
                result = self.engine.train_batch(mini_batch.batch, loss, weight, token_mask="loss_mask")
                train_scalars(tracker, result)
            if loss.meter is not None:
                meter, loss.meter = loss.meter, None
                self._close_meter(meter)

    def _drop_off_policy(self, batch: PackedBatch, threshold: float) -> PackedBatch:
        """M2PO over all tokens of the step, on all data-parallel ranks; what is dropped no longer counts anywhere."""
        tokens, group = batch.tokens, self.engine.data_parallel_group
        kept = m2po_mask(tokens["logprobs"], tokens["prox_logp"], tokens["loss_mask"], threshold, group)
        tracker = stats_tracker.get(self.stats_name)
        tracker.denominator(m2po_tokens=tokens["loss_mask"] != 0)
        tracker.stat(denominator="m2po_tokens", m2po_kept_fraction=kept.float())
        return batch.with_tokens(loss_mask=kept.to(tokens["loss_mask"].dtype))

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
        numbers = value_of_rank(numbers, engine.result_rank, model_group)
        record_mismatch(stats_tracker.get(self.stats_name), numbers, meter.current_version)
        problem = judge(numbers, self.config, meter.current_version)
        if problem is None:
            return
        if self.config.mismatch.action == "stop":
            raise MismatchError(f"{problem}, or set actor.mismatch.action=warn")
        if is_first_rank():
            logger.warning(problem)


class ActorLoss:
    """The loss callback of one update: policy loss and distillation of a micro-batch, plus their statistics.

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
        self.loss_fn = resolve("actor.loss_fn", config.objective(), LOSS_FNS)
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
        """Loss of the micro-batch as ``actor.loss_agg`` takes it; tensors are ``[T]``."""
        config = self.config
        x = self._input(logprobs, entropy, packed_input)
        output = run_loss(self.loss_fn, x)
        losses, distilled = self._distill(output.losses, x)
        loss = aggregate(losses, x.mask, config.loss_agg, config.loss_agg_divisor(), x.cu_seqlens)
        with torch.no_grad():
            theta = x.logprobs.detach()
            if self.meter is not None:
                self.meter.add(x.old_logprobs, theta, x.mask, packed_input.get("aligned_versions"))
            stats = {**output.stats, **distilled}
            tensors = LossTensors(x.mask, theta, x.proximal_logprobs, x.old_logprobs, x.entropy, stats)
            record_loss(self.tracker, tensors, **{k: v.detach() for k, v in logit_range.items()})
            if config.use_decoupled_loss and "aligned_versions" in packed_input:
                versions = packed_input["aligned_versions"]
                record_proximal(self.tracker, tensors, versions, self.current_version, config.prox_logp_method)
        return loss

    def _input(self, logprobs: Tensor, entropy: Tensor, packed_input: dict[str, Any]) -> LossInput:
        mask = packed_input["loss_mask"] != 0

        def on_mask(x: Tensor) -> Tensor:
            return torch.where(mask, x, 0.0)

        theta, old = on_mask(logprobs), on_mask(packed_input["logprobs"])
        return LossInput(
            logprobs=theta,
            proximal_logprobs=on_mask(self._proximal(theta.detach(), old, mask, packed_input)),
            old_logprobs=old,
            advantages=on_mask(packed_input["advantages"]),
            entropy=on_mask(entropy.detach()),
            mask=mask,
            cu_seqlens=packed_input["cu_seqlens"],
            config=self.config,
            fields=packed_input,
        )

    def _proximal(self, theta: Tensor, old: Tensor, mask: Tensor, packed_input: dict[str, Any]) -> Tensor:
        if not (self.config.use_decoupled_loss and self.config.prox_logp_method == "loglinear"):
            prox: Tensor = packed_input["prox_logp"]
            return prox
        versions = torch.where(mask, packed_input["aligned_versions"], -1)
        return compute_prox_logp_approximations(old, theta, versions, self.current_version, "loglinear")["loglinear"]

    def _distill(self, losses: Tensor, x: LossInput) -> tuple[Tensor, dict[str, Tensor]]:
        """Add the teacher's term (joint), or put it in the policy loss's place (pure, rl_loss_weight 0)."""
        teacher = x.fields.get("teacher_logp")
        if teacher is None:
            return losses, {}
        policy_weight = float(x.fields.get("rl_loss_weight", 1.0))
        weight = float(x.fields.get("distill_loss_weight", DISTILL_LOSS_WEIGHT))
        gap = distillation_token_losses(x.logprobs.detach(), teacher, x.mask)
        if policy_weight == 0:
            pure = pure_distillation_token_losses(x.logprobs, teacher, x.old_logprobs, x.mask)
            return weight * pure, {"rkl_loss": gap}
        kind = x.fields.get("distill_estimator", "k1")
        joint = distillation_token_losses(x.logprobs, teacher, x.mask, kind)
        return policy_weight * losses + weight * joint, {"rkl_loss": gap}


def _idle_settings(config: PPOActorConfig) -> list[str]:
    """One line per setting that the chosen objective does not read."""
    problems = []
    for name in ("rejection_sampling", "m2_threshold"):
        if getattr(config, name) is not None and not config.use_decoupled_loss:
            problems.append(f"actor.{name} has no effect without use_decoupled_loss: both policies are the same")
    for name in {"sapo": ("eps_clip_higher", "c_clip"), "cispo": ("c_clip",)}.get(config.objective(), ()):
        if getattr(config, name) is not None:
            problems.append(f"actor.{name} has no effect with the {config.objective()} loss")
    return problems
