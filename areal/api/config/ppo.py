"""Policy, value model and teacher of the PPO family; read by ``areal.trainer.ppo`` and ``areal.utils.functional``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from areal.api.config.fields import ConfigSection, DefaultInt, check_fields, opt, section
from areal.api.config.train import TrainEngineConfig


@dataclass
class NormConfig(ConfigSection):
    """How rewards or advantages are standardised before the update."""

    mean_level: Literal["batch", "group"] | None = opt(
        "batch",
        "Which set of samples the mean is taken over: whole batch (all-reduced over DP), prompt group, or no "
        "centering.",
    )
    std_level: Literal["batch", "group"] | None = opt(
        "batch", "Which set the standard deviation is taken over; null skips scaling (and then eps is treated as 0)."
    )
    std_unbiased: bool = opt(True, "Divide by n-1 (true) or n (false).")
    eps: float = opt(1e-05, "Added to the std before dividing.", ge=0)
    group_size: int = opt(
        1,
        "Samples that a prompt is meant to have; a group is what came from one prompt, whatever this says. Only 1 "
        "makes a difference: groups of one are by design, and their raw value is kept instead of 0.",
        unit="rows",
        ge=1,
    )
    mean_leave1out: bool = opt(False, "Each element's mean leaves that element out (RLOO-style).")


@dataclass
class RejectionSamplingConfig(ConfigSection):
    """Which stale tokens or sequences are dropped or bounded in the decoupled loss."""

    level: Literal["token", "sequence"] = opt("token", "Judge each token, or the whole sequence.")
    action: Literal["mask", "clamp"] = opt("mask", "Drop from the loss, or bound the weight.")
    metric: Literal["ratio", "kl_k1", "kl_k2", "kl_k3"] = opt("ratio", "Ratio prox/behaviour, or a KL estimate.")
    upper: float = opt(5.0, "Upper bound of the metric. Range: > 1 for ratio, > 0 for kl_k2 and kl_k3, any for kl_k1.")
    agg: Literal["sum", "mean", "max"] = opt("mean", "How tokens combine for sequence level (ratio: in log space).")
    lower: float | None = opt(
        None, "Lower bound of the metric; clamp turns null into 0. Range: <= upper; > 0 for ratio."
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.action == "clamp":
            if self.metric != "ratio":
                raise self.fail("action", "mask, because clamp exists for metric=ratio only")
            self.lower = 0.0 if self.lower is None else self.lower
            if self.lower < 0:
                raise self.fail("lower", ">= 0 for action=clamp, or null")
        elif self.metric == "ratio" and self.lower is not None and self.lower <= 0:
            raise self.fail("lower", "> 0 for metric=ratio, or null")
        if self.metric == "ratio" and self.upper <= 1:
            raise self.fail("upper", "> 1 for metric=ratio")
        if self.metric in ("kl_k2", "kl_k3") and self.upper <= 0:
            raise self.fail("upper", f"> 0 for metric={self.metric}")
        if self.lower is not None and self.lower > self.upper:
            raise self.fail("lower", f"<= upper ({self.upper:g})")


@dataclass
class MismatchConfig(ConfigSection):
    """How far the sampler's log-probs may lie from the trainer's for the same tokens and weights."""

    metric: Literal["abs_diff_mean", "abs_diff_max", "kl_k1", "kl_k3", "over_bound"] = opt(
        "abs_diff_mean",
        "What the limit holds for: mean or largest |difference| of a token's log-probs, KL(sampler || trainer) by the "
        "estimators k1 (its absolute value) or k3, or the share of tokens over token_bound.",
    )
    limit: float | None = opt(
        None,
        "Largest value of the metric, taken over the tokens of the smallest version lag that a step has. null = one "
        "that only a defect exceeds: tight where the actor runs in float32 and the lag is 0, wide elsewhere.",
        gt=0,
    )
    action: Literal["warn", "stop", "off"] = opt(
        "warn", "Beyond the limit: warn once per step, stop the run before the policy is updated further, or nothing."
    )
    token_bound: float = opt(0.5, "Difference from which on a token counts in over_bound.", unit="nats", gt=0)


@dataclass
class PPOActorConfig(TrainEngineConfig):
    """The policy: its engine and the PPO family's loss, reward shaping and advantages."""

    ppo_n_minibatches: int = opt(4, "Optimizer steps per batch.", ge=1)
    eps_clip: float = opt(0.2, "Ratio clip (lower side when eps_clip_higher is set).", ge=0)
    eps_clip_higher: float | None = opt(None, "Ratio clip on the upper side; null = eps_clip.", ge=0)
    reward_norm: NormConfig | None = section(None, "How rewards are standardised; null = not.")
    reward_scaling: float = opt(1.0, "Multiplies (reward + bias). Range: any number.")
    reward_bias: float = opt(0.0, "Added to the reward before scaling. Range: any number.")
    reward_clip: float = opt(20.0, "Absolute bound after scaling.", gt=0)
    discount: float = opt(1.0, "Discount factor gamma per trained token.", ge=0, le=1)
    gae_lambda: float = opt(1.0, "Lambda of generalised advantage estimation.", ge=0, le=1)
    adv_norm: NormConfig | None = section(None, "How advantages are standardised; null = not.")
    kl_ctl: float = opt(
        0.1, "Coefficient of the KL penalty in the reward; a reference model is built only when it is above 0.", ge=0
    )
    kl_estimator: Literal["k1", "k2", "k3"] = opt("k1", "Estimator of the KL divergence in that penalty.")
    recompute_logprob: bool = opt(False, "Old log-probs from a trainer forward pass.")
    use_decoupled_loss: bool = opt(False, "Separate behaviour and proximal policy.")
    rejection_sampling: RejectionSamplingConfig | None = section(
        None, "Filter for stale tokens; only with decoupled loss."
    )
    importance_sampling_level: Literal["token", "sequence"] = opt("token", "Token (PPO/GRPO) or sequence (GSPO).")
    max_new_tokens: int = opt(
        DefaultInt(1024),
        "Response limit that the overlong penalty counts from. Not written: follows gconfig.max_new_tokens.",
        unit="tokens",
        ge=1,
    )
    c_clip: float | None = opt(None, "Dual-clip constant; null = off.", gt=1)
    m2_threshold: float | None = opt(None, "M2PO second-moment threshold.", gt=0)
    overlong_reward_penalty: bool = opt(False, "DAPO length penalty switch.")
    overlong_tokens: int | None = opt(None, "Length of the penalised tail.", unit="tokens", ge=1)
    overlong_penalty_factor: float | None = opt(None, "Penalty at the length limit.", ge=0)
    mask_no_eos_with_zero: bool = opt(False, "No reward for sequences that were cut off by a length limit.")
    use_sapo_loss: bool = opt(False, "SAPO objective; excludes decoupled loss.")
    sapo_tau_pos: float = opt(1.0, "SAPO temperature for positive advantages.", gt=0)
    sapo_tau_neg: float = opt(1.05, "SAPO temperature for other advantages.", gt=0)
    prox_logp_method: Literal["recompute", "loglinear", "metrics"] = opt(
        "recompute", "Recompute, loglinear (no forward) or metrics."
    )
    mismatch: MismatchConfig = section(
        MismatchConfig, "Limit of the difference between the sampler's log-probs and the trainer's."
    )
    loss_agg: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = opt(
        "token-mean",
        "How token losses become the loss of an optimizer step: mean over its tokens; mean over its sequences of their "
        "token means; or mean over its sequences of their token sums divided by loss_agg_constant (Dr.GRPO).",
    )
    loss_agg_constant: int | None = opt(
        None, "Divisor of seq-mean-token-sum-norm; null = max_new_tokens.", unit="tokens", ge=1
    )
    overlong_filter: bool = opt(False, "Sequences that were cut off by a length limit do not train (DAPO).")
    loss_fn: str | None = opt(
        None,
        "Policy loss: ppo, sapo, cispo, or the import path of a function (LossInput) -> LossOutput of "
        "areal.trainer.ppo.losses. null = sapo with use_sapo_loss, else ppo.",
    )
    advantage_fn: str = opt(
        "gae",
        "Advantages: gae, or the import path of a function (AdvantageInput) -> AdvantageOutput of "
        "areal.trainer.ppo.advantages.",
    )
    log_agent_stats: bool = opt(False, "Log per-trajectory agent numbers.")
    log_agent_stats_keys: list[str] = opt(help="Which keys (must be non-empty if on).", factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_objective()
        if self.overlong_reward_penalty:
            for name in ("overlong_tokens", "overlong_penalty_factor"):
                if getattr(self, name) is None:
                    raise self.fail(name, "a number, because overlong_reward_penalty=true")
        if self.log_agent_stats and not self.log_agent_stats_keys:
            raise self.fail("log_agent_stats_keys", "at least one key, because log_agent_stats=true")

    def _check_objective(self) -> None:
        if self.use_sapo_loss and self.loss_fn not in (None, "sapo"):
            raise self.fail("loss_fn", "sapo or null, because use_sapo_loss=true")
        if self.objective() == "sapo" and self.use_decoupled_loss:
            raise self.fail("use_decoupled_loss", "false, because SAPO has one old policy (use_sapo_loss, loss_fn)")
        if self.objective() == "cispo" and self.importance_sampling_level != "token":
            raise self.fail("importance_sampling_level", "token, because loss_fn=cispo weighs tokens")
        if self.m2_threshold is not None and self.use_decoupled_loss and self.prox_logp_method == "loglinear":
            raise self.fail("prox_logp_method", "recompute or metrics, because m2_threshold judges a whole step")
        if self.loss_agg_constant is not None and self.loss_agg != "seq-mean-token-sum-norm":
            raise self.fail("loss_agg_constant", f"null, because loss_agg={self.loss_agg} does not read it")

    def objective(self) -> str:
        """Name or import path of the policy loss."""
        return self.loss_fn or ("sapo" if self.use_sapo_loss else "ppo")

    def loss_agg_divisor(self) -> int:
        """Divisor of ``seq-mean-token-sum-norm``."""
        return int(self.max_new_tokens if self.loss_agg_constant is None else self.loss_agg_constant)

    def should_compute_prox_logp(self) -> bool:
        """Whether a forward pass before the update gives the proximal (or old) log-probs."""
        if self.use_decoupled_loss:
            return self.prox_logp_method != "loglinear"
        return self.recompute_logprob


@dataclass
class PPOCriticConfig(TrainEngineConfig):
    """The value model and its loss."""

    ppo_n_minibatches: int = opt(4, "Optimizer steps per batch.", ge=1)
    eps_clip: float = opt(0.5, "Bound of the change of a value per update.", gt=0)
    value_loss: Literal["mse", "huber"] = opt(
        "mse", "Error of a value d: mse is d^2/2; huber is linear beyond huber_delta."
    )
    huber_delta: float = opt(10.0, "Where huber becomes linear.", gt=0)
    mask_no_eos_with_zero: bool = opt(False, "As in the actor: cut-off sequences get no reward.")


@dataclass
class TeacherConfig(PPOActorConfig):
    """A distillation teacher."""

    rl_loss_weight: float = opt(1.0, "Weight of the policy-gradient term.", ge=0)
    distill_loss_weight: float = opt(0.005, "Weight of the distillation term.", ge=0)
    distill_estimator: Literal["k1", "k2"] = opt(
        "k1",
        "Term of joint distillation, d = log-prob - teacher's: k1 is d (the 1.x term; its gradient does not depend on "
        "the teacher), k2 is d^2/2 (the gradient of the reverse KL).",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rl_loss_weight == 0 and self.distill_loss_weight == 0:
            raise self.fail("distill_loss_weight", "> 0, because rl_loss_weight=0")

    def loss_settings(self) -> dict[str, float | str]:
        """What the loss reads beside a batch's ``teacher_logp``, by field of the batch."""
        return {
            "rl_loss_weight": float(self.rl_loss_weight),
            "distill_loss_weight": float(self.distill_loss_weight),
            "distill_estimator": self.distill_estimator,
        }
