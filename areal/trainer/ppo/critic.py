"""The value role of PPO: values for the advantages, and the update towards the returns, on an engine that it holds.

Every method takes a ``PackedBatch`` or, for the public API, a list of padded trajectories; the result has the form of
the input. Called by ``PPOTrainer``.

    batch = critic.annotate(critic.pack(trajectories), "values")   # before actor.compute_advantages(batch)
    critic.ppo_update(batch)                                        # after it
    critic.evaluate(validation_trajectories, config.actor)          # learns nothing
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from areal.trainer.ppo.advantages import check_finite, compute_advantages
from areal.trainer.ppo.mini_batches import mini_batches
from areal.trainer.ppo.stats import train_scalars
from areal.trainer.ppo.validation import answer_columns
from areal.utils import stats_tracker
from areal.utils.batch import PackedBatch, pack
from areal.utils.errors import DataError
from areal.utils.functional.critic_loss import critic_loss, explained_variance

if TYPE_CHECKING:
    from areal.api.config.ppo import PPOActorConfig, PPOCriticConfig
    from areal.api.engine_api import TrainEngine

Trajectories = list[dict[str, Any]]

_NEEDED = ("loss_mask", "values", "returns")
_READ = ("input_ids", "position_ids", *_NEEDED)


class PPOCritic:
    """Scores states and learns their returns.

    Args:
        config: value clip and mini-batch settings.
        engine: an initialised ``TrainEngine`` whose model has a value head (``is_critic``).
        stats_name: tracker that receives the statistics.
    """

    least_rows = 1
    """Groups that a step needs at least."""

    def __init__(self, config: PPOCriticConfig, engine: TrainEngine, stats_name: str = "ppo_critic") -> None:
        self.config = config
        self.engine = engine
        self.stats_name = stats_name

    def pack(self, trajectories: Trajectories | PackedBatch) -> PackedBatch:
        """Pack trajectories once."""
        return trajectories if isinstance(trajectories, PackedBatch) else pack(trajectories)

    def pack_answers(self, data: Trajectories | PackedBatch) -> PackedBatch:
        """Pack what :meth:`evaluate` reads of validation trajectories, whose other columns may differ."""
        return data if isinstance(data, PackedBatch) else pack([answer_columns(table) for table in data])

    @torch.no_grad()
    def compute_values(self, data: Trajectories | PackedBatch) -> Any:
        """Values under the current weights, float32: one ``[n, S]`` per trajectory, or ``[T]`` for a packed batch.

        Entry t is the value of the text up to and with token t, so it is aligned with the prediction of token t + 1.
        """
        self.engine.eval()
        return self.engine.forward_batch(data)

    def annotate(self, batch: PackedBatch, key: str = "values") -> PackedBatch:
        """Return ``batch`` with ``compute_values``'s result as token field ``key``."""
        return batch.with_tokens(**{key: self.compute_values(batch)})

    def ppo_update(self, data: Trajectories | PackedBatch) -> None:
        """One optimizer step per mini-batch on the result of ``PPOActor.compute_advantages``.

        Statistics go to the tracker: ``new_value``, ``old_value``, ``target_value``, ``critic_loss`` and ``clip_ratio``
        over ``n_valid_tokens``; ``clipped_new_value`` and ``clipped_old_value`` over ``clipped_tokens``; settings, and
        what every optimizer step reported.

        Raises:
            DataError: a field of ``values``, ``returns``, ``loss_mask`` is absent.
        """
        batch = self.pack(data)
        missing = [name for name in _NEEDED if name not in batch.tokens]
        if missing:
            raise DataError(
                f"PPOCritic.ppo_update needs {', '.join(missing)}: store compute_values' result as 'values' before "
                "actor.compute_advantages, whose result is what the critic learns from"
            )
        tracker = stats_tracker.get(self.stats_name)
        config = self.config
        tracker.scalar(mask_no_eos_with_zero=float(config.mask_no_eos_with_zero), eps_clip=config.eps_clip)
        loss = CriticLoss(config, tracker)
        unread = [name for name in (*batch.tokens, *batch.sequences) if name not in _READ]
        self.engine.train()
        for part in mini_batches(batch.without(*unread), config, self.engine.data_parallel_group):
            result = self.engine.train_batch(part.batch, loss, value_tokens)
            train_scalars(tracker, result)

    @torch.no_grad()
    def evaluate(self, data: Trajectories | PackedBatch, actor: PPOActorConfig) -> None:
        """How well the values predict what answers earn that nothing was learnt from; the weights stay as they are.

        The target of a token is its return with lambda 1 and without KL: the reward to come, shaped and discounted as
        in training; no value counts in it, also where an answer was cut off. Statistics go to the tracker
        ``<stats_name>-eval``: ``value``, ``target_value`` and ``critic_loss`` (not clipped) over ``n_valid_tokens``,
        and ``explained_variance``. All data-parallel ranks must call.

        Args:
            data: trajectories with ``rewards``, as the sampler gives them; log-probs are not needed.
            actor: settings of the policy; says how rewards are shaped.

        Raises:
            NonFiniteInputError: a value of a trained token is not finite.
        """
        group = self.engine.data_parallel_group
        plain = replace(
            actor,
            use_decoupled_loss=False,
            recompute_logprob=False,
            kl_ctl=0.0,
            advantage_fn="gae",
            gae_lambda=1.0,
            adv_norm=None,
        )
        batch = self.pack_answers(data).without("values")
        values = self.compute_values(batch).float()
        # Without values: GAE would take the critic's own word for what an answer that was cut off still earns.
        tokens = compute_advantages(batch.with_tokens(logprobs=torch.zeros_like(values)), plain, group).tokens
        mask = tokens["loss_mask"] != 0
        value, target = (torch.where(mask, x, 0.0) for x in (values, tokens["returns"].float()))
        check_finite(value)
        tracker = stats_tracker.get(f"{self.stats_name}-eval")
        tracker.denominator(n_tokens=torch.ones_like(mask), n_valid_tokens=mask)
        tracker.stat(
            denominator="n_valid_tokens",
            value=value,
            target_value=target,
            critic_loss=(value - target).square() / 2,
        )
        tracker.scalar(explained_variance=explained_variance(value, target, mask, group))


class CriticLoss:
    """The loss callback of one update: clipped value loss of a micro-batch plus its statistics.

    Args:
        config: the critic's.
        tracker: receives the statistics.
    """

    def __init__(self, config: PPOCriticConfig, tracker: stats_tracker.DistributedStatsTracker) -> None:
        self.config, self.tracker = config, tracker

    def replay_arguments(self) -> dict[str, Any]:
        """See ``areal.engine.core.failure_files.ReplayableLoss``."""
        return {"role": self.tracker.name}

    @classmethod
    def for_replay(cls, config: PPOCriticConfig, arguments: dict[str, Any]) -> CriticLoss:
        """See ``areal.engine.core.failure_files.ReplayableLoss``."""
        return cls(config, stats_tracker.DistributedStatsTracker(arguments["role"]))

    def __call__(self, values: Tensor, packed_input: dict[str, Any]) -> Tensor:
        """Mean loss over the micro-batch's trained tokens; tensors are ``[T]``."""
        mask = packed_input["loss_mask"] != 0
        old, target = packed_input["values"], packed_input["returns"]
        loss, found = critic_loss(
            values,
            old,
            target,
            mask,
            eps_clip=self.config.eps_clip,
            kind=self.config.value_loss,
            huber_delta=self.config.huber_delta,
        )
        with torch.no_grad():
            clipped = found["clip_mask"] & mask
            new, old, target = (torch.where(mask, x.float(), 0.0) for x in (values, old, target))
            self.tracker.denominator(n_tokens=torch.ones_like(mask), n_valid_tokens=mask, clipped_tokens=clipped)
            self.tracker.stat(
                denominator="n_valid_tokens",
                new_value=new,
                old_value=old,
                target_value=target,
                critic_loss=found["loss"].float(),
                clip_ratio=clipped.float(),
            )
            self.tracker.stat(denominator="clipped_tokens", clipped_new_value=new, clipped_old_value=old)
        return loss


def value_tokens(packed_input: dict[str, Any]) -> Tensor:
    """Weight of a micro-batch: its trained tokens."""
    mask: Tensor = packed_input["loss_mask"]
    return mask.count_nonzero()
