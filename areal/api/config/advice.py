"""Settings that are accepted and yet deserve a word: fields that nothing reads, values that are rarely meant.

In: a config. Out: messages, each naming its key. The loader logs them once per load. Standard library only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from areal.api.config.convert import to_plain
from areal.api.config.fields import is_section

_UNREAD: dict[str, tuple[str, ...]] = {
    "OptimizerConfig": ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"),
    "SchedulingSpec": ("task_type",),
    "WandBConfig": ("config",),
    "SwanlabConfig": ("config", "logdir"),
    "SchedulerConfig": (
        "endpoint",
        "deploy_mode",
        "functioncall_service_domain",
        "reward_functioncall_config",
        "reward_model_path",
        "reward_model_service_url",
    ),
    "TrainDatasetConfig": ("pin_memory",),
    "ValidDatasetConfig": ("pin_memory",),
}
_UNREAD_ROOT = ("total_train_n_seqs",)


def advise(config: Any) -> list[str]:
    """Return what the user should know about ``config``; empty when there is nothing to say."""
    parts = (_sampling, _distribution, _normalisation, _decoupled, _preference, _frozen, _turns, _staleness)
    return [*_unread(config, ""), *(message for part in parts for message in part(config))]


def _unread(config: Any, path: str) -> Iterator[str]:
    names = _UNREAD.get(type(config).__name__, ())
    for spec in dataclasses.fields(config):
        value = getattr(config, spec.name)
        key = f"{path}.{spec.name}" if path else spec.name
        if (spec.name in names or (not path and spec.name in _UNREAD_ROOT)) and value != field_default(spec):
            yield f"{key}={to_plain(value)!r} has no effect: nothing reads this field"
        for index, part in enumerate(value if isinstance(value, list) else [value]):
            if is_section(part):
                yield from _unread(part, f"{key}.{index}" if isinstance(value, list) else key)


def field_default(spec: dataclasses.Field[Any]) -> Any:
    """Return the default of a field, made anew if it has a factory."""
    if spec.default_factory is not dataclasses.MISSING:
        return spec.default_factory()
    return spec.default


def _sampling(config: Any) -> Iterator[str]:
    gconfig, actor = getattr(config, "gconfig", None), getattr(config, "actor", None)
    if not is_section(gconfig) or not is_section(actor):
        return
    if gconfig.greedy or gconfig.temperature == 0:
        setting = "greedy=true" if gconfig.greedy else "temperature=0"
        yield f"gconfig.{setting}: all samples of a prompt are equal, so group-normalised advantages are 0"
    elif gconfig.temperature != actor.temperature:
        yield (
            f"actor.temperature={actor.temperature:g} differs from gconfig.temperature={gconfig.temperature:g}: "
            "log-probs of trainer and sampler will not agree"
        )
    for name in ("ref", "teacher"):
        other = getattr(config, name, None)
        if is_section(other) and other.temperature != actor.temperature:
            yield f"{name}.temperature={other.temperature:g} differs from actor.temperature={actor.temperature:g}"


def _distribution(config: Any) -> Iterator[str]:
    """Samples from another distribution than the softmax at a temperature, which is all that the loss knows."""
    gconfig, actor = getattr(config, "gconfig", None), getattr(config, "actor", None)
    if not is_section(gconfig) or not is_section(actor):
        return
    # Reported log-probs: vLLM's are after penalties, masks and truncation, SGLang's after penalties and masks, those of
    # native are the model's own.
    backend = str(getattr(getattr(config, "rollout", None), "backend", ""))
    vllm = backend.startswith("vllm")
    if gconfig.top_p < 1 or gconfig.top_k < 100_000:
        reported = (
            "vLLM's log-probs are renormalised over the tokens that are kept and lie above the trainer's by as much as "
            "was cut (the mismatch statistics show it)"
            if vllm
            else "the sampler's log-probs are of the whole one, so that no statistic shows it"
        )
        yield (
            f"gconfig.top_p={gconfig.top_p:g}, top_k={gconfig.top_k}: training samples come from a truncated "
            f"distribution while the loss uses the whole one, which biases the ratio; {reported}; use top_p=1 and the "
            "default top_k"
        )
    if gconfig.frequency_penalty != 0:
        yield (
            f"gconfig.frequency_penalty={gconfig.frequency_penalty:g}: training samples come from a distribution that "
            "the loss does not know, which biases the ratio; use 0"
        )
    if backend.startswith(("vllm", "sglang")) and gconfig.min_new_tokens > 0:
        yield (
            f"gconfig.min_new_tokens={gconfig.min_new_tokens}: log-probs of {backend.partition(':')[0]} leave out the "
            "stop tokens there and lie above the trainer's"
        )


def _normalisation(config: Any) -> Iterator[str]:
    gconfig, actor = getattr(config, "gconfig", None), getattr(config, "actor", None)
    for name in ("reward_norm", "adv_norm"):
        norm = getattr(actor, name, None)
        if is_section(norm) and "group" in (norm.mean_level, norm.std_level):
            size = getattr(gconfig, "n_samples", 1)
            if norm.group_size not in (1, size):
                yield (
                    f"actor.{name}.group_size={norm.group_size} has no effect: a group is what came from one prompt "
                    f"(here gconfig.n_samples={size})"
                )


def _decoupled(config: Any) -> Iterator[str]:
    actor = getattr(config, "actor", None)
    if is_section(getattr(config, "ref", None)) and getattr(actor, "kl_ctl", 1) == 0:
        yield "ref is given but actor.kl_ctl=0, so no reference model is built"
    sampling = getattr(actor, "rejection_sampling", None)
    if not is_section(actor) or not hasattr(actor, "use_decoupled_loss"):
        return
    if is_section(sampling) and not actor.use_decoupled_loss:
        yield "actor.rejection_sampling has no effect without actor.use_decoupled_loss=true"
    if is_section(sampling) and sampling.level == "token" and sampling.agg != "mean":
        yield f"actor.rejection_sampling.agg={sampling.agg!r} has no effect at level=token"
    if actor.use_decoupled_loss and sampling is None:
        yield "actor.use_decoupled_loss=true without actor.rejection_sampling: stale tokens are not filtered"


def _preference(config: Any) -> Iterator[str]:
    """Settings of a DPO reference's own loss: the reference is only scored."""
    actor, ref = getattr(config, "actor", None), getattr(config, "ref", None)
    if not is_section(ref) or not hasattr(ref, "loss_type"):
        return
    for spec in dataclasses.fields(ref):
        if spec.name in ("beta", "loss_type", "label_smoothing", "reference_free"):
            value = getattr(ref, spec.name)
            if value not in (field_default(spec), getattr(actor, spec.name)):
                yield f"ref.{spec.name}={value!r} has no effect: the loss reads actor.{spec.name}"


def _frozen(config: Any) -> Iterator[str]:
    """Optimizers of roles that are only scored."""
    for name in ("ref", "teacher"):
        if getattr(getattr(config, name, None), "optimizer", None) is not None:
            yield f"{name}.optimizer takes memory and has no effect: this model is not trained; set it to null"


def _turns(config: Any) -> Iterator[str]:
    roles = [getattr(config, name, None) for name in ("actor", "ref", "critic", "teacher")]
    asked = getattr(config, "enable_offload", False) and hasattr(config, "rollout")
    if asked and not any(getattr(role, "offload", False) for role in roles):
        yield "enable_offload=true has no effect: no role sets offload=true"


def _staleness(config: Any) -> Iterator[str]:
    actor, rollout = getattr(config, "actor", None), getattr(config, "rollout", None)
    if not is_section(rollout) or not is_section(actor) or getattr(actor, "use_decoupled_loss", True):
        return
    lag, objective = rollout.max_head_offpolicyness, actor.objective()
    if lag > 0 and actor.recompute_logprob:
        remedy = "actor.use_decoupled_loss=true (and actor.rejection_sampling)"
        yield (
            f"actor.recompute_logprob=true with rollout.max_head_offpolicyness={lag}: the recomputed log-probs replace "
            "those that stale samples were drawn with, so nothing corrects for their age; set "
            f"{remedy if objective == 'ppo' else 'actor.recompute_logprob=false'}"
        )
    elif lag > 1 and objective == "ppo":
        yield (
            f"rollout.max_head_offpolicyness={lag} without actor.use_decoupled_loss: the ratio is clipped around the "
            "old policy that drew a sample, which holds stale tokens back; set actor.use_decoupled_loss=true (and "
            "actor.rejection_sampling)"
        )
