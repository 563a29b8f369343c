"""Statistics of a PPO step, recorded as tensors; nothing here waits for the device.

Called by ``PPOActor``: ``record_batch`` once per step, the others for every micro-batch inside the ``update`` scope.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from areal.utils.errors import DataError
from areal.utils.functional import compute_prox_logp_approximations
from areal.utils.functional.segments import segment_sum
from areal.utils.stats_reduction import ReduceType

if TYPE_CHECKING:
    from areal.api.config.ppo import PPOActorConfig
    from areal.utils.batch import PackedBatch
    from areal.utils.stats_tracker import DistributedStatsTracker


def record_batch(
    tracker: DistributedStatsTracker, batch: PackedBatch, config: PPOActorConfig, current_version: int
) -> None:
    """Rewards, lengths, advantages and staleness of one step's batch (after ``compute_advantages``)."""
    n, device = batch.n_sequences, batch.device
    mask = batch.tokens["loss_mask"] != 0
    rewards = batch.sequences["rewards"].float()
    seq_len = batch.cu_seqlens.diff().float()
    response_len = batch.sequences.get("response_len")
    if response_len is None:  # a list of trajectories brings only what belongs to tokens
        response_len = segment_sum(mask.float(), batch.seq_ids, n)
    truncated = batch.sequences.get("truncated")
    correct = rewards > 0
    tracker.denominator(
        n_seqs=torch.ones(n, dtype=torch.bool, device=device),
        n_tokens=torch.ones_like(mask),
        n_valid_tokens=mask,
        correct_n_seqs=correct,
        incorrect_n_seqs=~correct,
    )
    tracker.stat(denominator="correct_n_seqs", correct_seq_len=seq_len)
    tracker.stat(denominator="incorrect_n_seqs", incorrect_seq_len=seq_len)
    tracker.stat(
        denominator="n_seqs",
        task_reward=rewards,
        final_reward=segment_sum(batch.tokens["tot_rewards"], batch.seq_ids, n),
        no_eos_ratios=torch.zeros_like(rewards) if truncated is None else truncated.float(),
        prompt_len=seq_len - response_len,
        response_len=response_len,
        seq_len=seq_len,
    )
    tracker.stat(
        denominator="n_valid_tokens",
        advantages=batch.tokens["advantages"],
        kl_rewards=batch.tokens["kl_rewards"],
    )
    tracker.scalar(**_settings(config))
    if config.log_agent_stats:
        _record_agents(tracker, batch, config.log_agent_stats_keys)
    if "aligned_versions" in batch.tokens:
        _record_staleness(tracker, batch.tokens["aligned_versions"], mask, current_version)


def _settings(config: PPOActorConfig) -> dict[str, float]:
    values: dict[str, float] = {
        "mask_no_eos_with_zero": float(config.mask_no_eos_with_zero),
        "eps_clip": config.eps_clip,
        "use_dual_clip": float(config.c_clip is not None),
    }
    if config.c_clip is not None:
        values["c_clip"] = config.c_clip
    if config.rejection_sampling is not None:
        values["rs_upper"] = config.rejection_sampling.upper
        if config.rejection_sampling.lower is not None:
            values["rs_lower"] = config.rejection_sampling.lower
    return values


def _record_agents(tracker: DistributedStatsTracker, batch: PackedBatch, keys: list[str]) -> None:
    missing = [key for key in ("begin_of_trajectory", *keys) if key not in batch.sequences]
    if missing:
        raise DataError(f"log_agent_stats=true needs the per-sequence fields {missing}; the workflow must return them")
    tracker.denominator(agent=batch.sequences["begin_of_trajectory"] > 0)
    tracker.stat("agent", None, **{key: batch.sequences[key].float() for key in keys})


def _record_staleness(tracker: DistributedStatsTracker, versions: Tensor, mask: Tensor, current_version: int) -> None:
    with tracker.scope("update/version_stats"):
        tracker.denominator(n_valid_generated_tokens=mask & (versions >= 0))
        theta = (current_version - versions).float()
        for name, lag in (("theta", theta), ("proximal", theta - 1)):
            for suffix, reduce_type in (("avg", ReduceType.AVG), ("max", ReduceType.MAX), ("min", ReduceType.MIN)):
                values = {f"sample_staleness_{name}_{suffix}": lag}
                tracker.stat(denominator="n_valid_generated_tokens", reduce_type=reduce_type, **values)
        tracker.scalar(v_theta=current_version, v_proximal=current_version - 1)


# Statistics of a loss that are recorded under a denominator or a name of their own.
_NAMED = {
    "approx_kl",
    "behave_approx_kl",
    "behave_imp_weight",
    "behave_mask",
    "clip_mask",
    "dual_clip_mask",
    "filtered_fraction",
    "importance_weight",
    "loss",
}


@dataclass
class LossTensors:
    """Per-token tensors ``[T]`` of one micro-batch, without gradient.

    Attributes:
        mask: bool, the trained positions before rejection.
        theta, prox, old: log-probs of current, proximal and behaviour policy; 0 off the mask.
        entropy: of the current policy; 0 off the mask.
        loss_stats: of the loss function and of distillation; one that has no name below is averaged under its own.
    """

    mask: Tensor
    theta: Tensor
    prox: Tensor
    old: Tensor
    entropy: Tensor
    loss_stats: dict[str, Tensor]


def record_loss(tracker: DistributedStatsTracker, t: LossTensors, **logit_range: Tensor) -> None:
    """Ratios, clipping, entropy and loss of one micro-batch; ``logit_range``: vocab_min_logits, vocab_max_logits."""
    stats = t.loss_stats
    clipped = stats["clip_mask"]
    tracker.denominator(
        n_tokens=torch.ones_like(t.mask),
        n_valid_tokens=t.mask,
        clipped_tokens=clipped,
        dual_clipped_tokens=stats["dual_clip_mask"],
    )
    tracker.stat(
        "n_valid_tokens",
        None,
        importance_weight=stats["importance_weight"],
        approx_kl=stats["approx_kl"],
        new_logp=t.theta,
        old_logp=t.old,
        entropy=t.entropy,
        actor_loss=stats["loss"],
        clip_ratio=clipped.float(),
        dual_clip_ratio=stats["dual_clip_mask"].float(),
        **logit_range,
        **{name: torch.where(t.mask, stats[name].float(), 0.0) for name in sorted(stats.keys() - _NAMED)},
    )
    tracker.stat(denominator="clipped_tokens", clipped_new_logp=t.theta, clipped_old_logp=t.old)
    if "behave_mask" in stats:
        tracker.denominator(unclipped_behave_tokens=stats["behave_mask"])
        tracker.stat(
            denominator="unclipped_behave_tokens",
            behave_imp_weight=stats["behave_imp_weight"],
            behave_approx_kl=stats["behave_approx_kl"],
        )
        tracker.scalar(rs_filtered_fraction=stats["filtered_fraction"])


def record_proximal(
    tracker: DistributedStatsTracker, t: LossTensors, versions: Tensor, current_version: int, method: str
) -> None:
    """Approximations of the proximal policy, their error under ``metrics``, and the drift from behaviour to current."""
    versions = torch.where(t.mask, versions, -1)
    only = None if method == "metrics" else "loglinear"
    with tracker.scope("compute_logp"):
        tracker.denominator(n_valid_tokens=t.mask)
        drift = t.theta - t.old
        values = {
            "kl_div_direct": -drift,
            "kl_div_taylor": drift.square() / 2,
            "kl_div_dual": drift.exp() - 1 - drift,
        }
        if method != "loglinear":
            values["prox_logp_gt"] = t.prox
        if method != "recompute":
            approximations = compute_prox_logp_approximations(t.old, t.theta, versions, current_version, only)
            for name, approx in approximations.items():
                approx = torch.where(t.mask, approx, 0.0)
                values.update({f"{name}/{k}": v for k, v in _approximation_stats(approx, t, method).items()})
        tracker.stat("n_valid_tokens", None, **values)


def _approximation_stats(approx: Tensor, t: LossTensors, method: str) -> dict[str, Tensor]:
    behave, importance = (approx - t.old).exp(), (t.theta - approx).exp()
    stats = {"approx_logp": approx, "behave_imp_weight": behave, "importance_weight": importance}
    if method == "metrics":
        error = (approx - t.prox).abs()
        stats["abs_error"], stats["squared_error"] = error, error.square()
        stats["rel_error"] = error / (t.prox.abs() + 1e-8)
        truths = {"behave_imp_weight": (t.prox - t.old).exp(), "importance_weight": (t.theta - t.prox).exp()}
        for name, truth in truths.items():
            difference = (stats[name] - truth).abs()
            stats[f"{name}_abs_error"] = difference
            stats[f"{name}_rel_error"] = difference / (truth.abs() + 1e-8)
    return stats


def train_scalars(tracker: DistributedStatsTracker, result: dict[str, Any]) -> None:
    """What ``train_batch`` returned: update_successful, grad_norm, lr, num_micro_batches."""
    tracker.scalar(**result)
