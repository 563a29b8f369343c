"""How far the sampler's log-probs lie from the trainer's on the tokens a step trains: the first sign of weights that
never arrived, of another temperature, of a truncated distribution.

In: both log-probs of the same tokens, taken before the step changes the weights. Out: numbers under ``mismatch/`` of
the actor's statistics, over all tokens and by version lag (the trainer's version minus the one that drew the token),
and a verdict on ``actor.mismatch``. Called by ``PPOActor``; the run's hooks repeat a warning of a worker process.

    PPOActor: meter.add (no host sync) ─► meter.reduce (one exchange between ranks, one host sync per step) ─► judge

Only tokens of lag 0 compare equal weights: there the difference is numerical, and small. At a larger lag the policy's
own change adds to it, which is what the staleness bound allows. Hence the limit holds for the smallest lag that the
step has (for all tokens where no version is known), and its default is wide unless that lag is 0 and the actor runs in
float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from areal.utils.errors import ArealError
from areal.utils.ranks import group_device

if TYPE_CHECKING:
    from areal.api.config.ppo import MismatchConfig, PPOActorConfig
    from areal.utils.stats_tracker import DistributedStatsTracker

SCOPE = "mismatch"
MAX_LAG = 4  # tokens of this lag and of larger ones count together
LAGS = (*(f"lag_{lag}" for lag in range(MAX_LAG)), f"lag_{MAX_LAG}_or_more")
BOUND_NATS = 50.0  # of one token's difference; one that is no number counts as this much
_NO_VERSION = len(LAGS)  # bucket of tokens whose version is unknown: they count in the totals only

# Metric -> default limit (actor in float32 and lag 0; anything else).
DEFAULT_LIMITS = {
    "abs_diff_mean": (0.02, 0.3),
    "abs_diff_max": (1.0, 15.0),
    "kl_k1": (0.02, 0.3),
    "kl_k3": (0.01, 0.3),
    "over_bound": (0.01, 0.25),
}
_MEANING = {
    "abs_diff_mean": "the mean |difference| of log-probs",
    "abs_diff_max": "the largest |difference| of log-probs",
    "kl_k1": "KL(sampler || trainer) by k1",
    "kl_k3": "KL(sampler || trainer) by k3",
    "over_bound": "the share of tokens over actor.mismatch.token_bound",
}
CAUSES = (
    "the sampler never got the weights (set rollout.weight_probe_interval=1 to check every update); "
    "actor.temperature differs from the sampling temperature; gconfig.top_p or top_k cuts the sampler's distribution; "
    "the sampler computes in another dtype than the actor"
)


class MismatchError(ArealError, RuntimeError):
    """Sampler and trainer give the same tokens different log-probs, beyond ``actor.mismatch.limit``."""


class MismatchMeter:
    """Collects one step's differences; every tensor stays on its device until :meth:`reduce`.

    With d = log sampler - log trainer of a token that the sampler drew, a bucket of tokens gives:

    - ``n_tokens``;
    - ``abs_diff_mean``, ``abs_diff_max``: of |d|;
    - ``kl_k1``: mean of d, ``kl_k3``: mean of exp(-d) - 1 + d. Both estimate KL(sampler || trainer) without bias; k1
      may be negative, k3 is not and varies less;
    - ``over_bound``: share of tokens with |d| > ``token_bound``.

    Args:
        token_bound: nats.
        current_version: version of the weights that gave the trainer's log-probs.

    Source: J. Schulman, Approximating KL divergence (2020).
    """

    def __init__(self, token_bound: float, current_version: int) -> None:
        self.token_bound = token_bound
        self.current_version = current_version
        self._table: Tensor | None = None  # [buckets, count | |d| | d | k3 | over | not finite], float64
        self._largest: Tensor | None = None  # [buckets]

    @torch.no_grad()
    def add(self, sampler: Tensor, trainer: Tensor, mask: Tensor, versions: Tensor | None = None) -> None:
        """Take in tokens; no host sync.

        Args:
            sampler, trainer: aligned log-probs ``[T]``; anything off the mask.
            mask: bool ``[T]``, the trained tokens.
            versions: int ``[T]``, the version that drew each token, < 0 where unknown; None: all are unknown.
        """
        if self._table is None or self._largest is None:
            self._table = torch.zeros(len(LAGS) + 1, 6, dtype=torch.float64, device=mask.device)
            self._largest = torch.zeros(len(LAGS) + 1, dtype=torch.float64, device=mask.device)
        raw = torch.where(mask, sampler.detach().double() - trainer.detach().double(), 0.0)
        bound = BOUND_NATS
        d = torch.nan_to_num(raw, nan=bound, posinf=bound, neginf=-bound).clamp(-bound, bound)
        size, k3 = d.abs(), torch.expm1(-d) + d
        columns = torch.stack(
            [mask.double(), size, d, k3, (size > self.token_bound).double(), (~raw.isfinite()).double()]
        )
        bucket = torch.full(mask.shape, _NO_VERSION, device=mask.device)
        if versions is not None:
            lag = (self.current_version - versions.long()).clamp(0, MAX_LAG)
            bucket = torch.where(versions >= 0, lag, bucket)
        self._table.index_add_(0, bucket, columns.T)
        self._largest.scatter_reduce_(0, bucket, size, "amax")

    def reduce(self, group: dist.ProcessGroup | None = None) -> dict[str, float]:
        """The numbers of all ranks of ``group``, every one of which must call; one host sync.

        Returns: the keys of the class, over all tokens and under ``lag_<n>/`` for each lag that has tokens; plus
            ``n_nonfinite``, tokens with a log-prob that is NaN or infinite. No tokens: ``n_tokens`` alone, 0.
        """
        table, largest = self._table, self._largest
        if table is None or largest is None:
            table, largest = torch.zeros(len(LAGS) + 1, 6).double(), torch.zeros(len(LAGS) + 1).double()
        if group is not None:
            table, largest = table.to(group_device(group)), largest.to(group_device(group))
            dist.all_reduce(table, op=dist.ReduceOp.SUM, group=group)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        total = torch.cat([table.sum(0), largest.max().reshape(1)])
        rows = torch.cat([total[None], torch.cat([table, largest[:, None]], dim=1)[: len(LAGS)]]).tolist()
        numbers: dict[str, float] = {}
        for prefix, row in zip(("", *(f"{lag}/" for lag in LAGS)), rows, strict=True):
            numbers.update({f"{prefix}{key}": value for key, value in _means(row).items()})
        numbers["n_tokens"] = rows[0][0]
        if rows[0][0]:
            numbers["n_nonfinite"] = rows[0][5]
        return numbers


def _means(row: list[float]) -> dict[str, float]:
    count, size, d, k3, over, _, largest = row
    if not count:
        return {}
    means = {"abs_diff_mean": size, "kl_k1": d, "kl_k3": k3, "over_bound": over}
    return {"n_tokens": count, "abs_diff_max": largest, **{key: value / count for key, value in means.items()}}


def judge(numbers: Mapping[str, float], config: PPOActorConfig, version: int) -> str | None:
    """What is wrong with a step's numbers (keys of :meth:`MismatchMeter.reduce`); None: within the limit, or off."""
    settings = config.mismatch
    if settings.action == "off" or not numbers.get("n_tokens"):
        return None
    lag = next((index for index, name in enumerate(LAGS) if f"{name}/n_tokens" in numbers), None)
    prefix = "" if lag is None else f"{LAGS[lag]}/"
    value = numbers[f"{prefix}{settings.metric}"]
    limit = _limit(settings, exact=config.dtype == "float32" and lag == 0)
    if abs(value) <= limit:
        return None
    which = "tokens without a version" if lag is None else f"tokens of version {LAGS[lag].replace('_', ' ')}"
    if lag:
        which += " (the smallest; a part of it is the change of the policy since)"
    broken = numbers.get("n_nonfinite", 0)
    also = f" {broken:.0f} tokens have a log-prob that is NaN or infinite." if broken else ""
    return (
        f"sampler and trainer v{version} disagree: {_MEANING[settings.metric]} ({settings.metric}) is {value:.4g}, "
        f"over the limit {limit:g}, on {numbers[f'{prefix}n_tokens']:.0f} {which}.{also} Likely causes: {CAUSES}. "
        "If the difference is expected, raise actor.mismatch.limit"
    )


def _limit(settings: MismatchConfig, *, exact: bool) -> float:
    return settings.limit if settings.limit is not None else DEFAULT_LIMITS[settings.metric][0 if exact else 1]


def record_mismatch(tracker: DistributedStatsTracker, numbers: Mapping[str, float], version: int) -> None:
    """Put a step's numbers, which are the same on every rank, into the statistics."""
    with tracker.scope(SCOPE):
        tracker.scalar(**numbers, version=version)


def judge_stats(stats: Mapping[str, float], config: PPOActorConfig, role: str = "ppo_actor") -> str | None:
    """:func:`judge`, from a step's exported statistics."""
    prefix = f"{role}/{SCOPE}/"
    numbers = {key.removeprefix(prefix): value for key, value in stats.items() if key.startswith(prefix)}
    return judge(numbers, config, int(numbers.get("version", 0)))
