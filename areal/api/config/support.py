"""Features whose settings exist but which cannot run yet; no setting is silently without effect.

In: a checked config. Out: nothing, or one :class:`UnsupportedFeatureError` that names every such setting at once.
Called by the trainers when a run is built, and by ``--dry-run``; loading a file never refuses, so that a file for other
hardware can be read and checked. A section counts only if the run uses it: ``vllm.*`` does not matter with a
``native`` rollout.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from collections.abc import Callable, Iterator
from typing import Any

from areal.api.config.advice import field_default
from areal.api.config.convert import to_plain
from areal.api.config.experiment import RWConfig
from areal.api.config.fields import is_section, plain
from areal.utils.errors import UnsupportedFeatureError

_TRAIN_ROLES = ("actor", "ref", "critic", "teacher")


@dataclasses.dataclass(frozen=True)
class Missing:
    """One feature that is not there.

    Attributes:
        key: setting, relative to its section.
        reason: what cannot be done, and what to set instead.
        asked: whether a value asks for the feature; None: any value but the default does.
    """

    key: str
    reason: str
    asked: Callable[[Any], bool] | None = None


def _is_true(value: Any) -> bool:
    return value is True


def _is_shared(value: Any) -> bool:
    return bool(value == "colocation")


def _is_given(value: Any) -> bool:
    return value is not None


ROOT = (
    Missing("memory_profiler", "device memory snapshots are not available; set it to null", _is_given),
    Missing("rollout.scheduling_strategy.type", "actor and rollout cannot take turns; use separation", _is_shared),
    Missing("actor.scheduling_strategy.type", "actor and rollout cannot take turns; use separation", _is_shared),
)
SINGLE_CONTROLLER = (
    Missing("allocation_mode", "only SPMD launchers read it; set actor.backend and rollout.backend", bool),
)
TRAIN = (
    Missing("_version", "the v2 services of 1.x are not part of this version; use v1", lambda v: v != "v1"),
    Missing("use_kernels", "hub kernels are not available; set it to false", _is_true),
    Missing("dtype", "float16 needs loss scaling, which is not available; use bfloat16", lambda v: v == "float16"),
)
FSDP = (Missing("fsdp.shard_vision_across_sp", "image models are not available; set it to false", _is_true),)
ARCHON = (
    Missing("archon.fp8_config.mode", "fp8 matmuls are not available; set it to disabled", lambda v: v != "disabled"),
)
MEGATRON = (
    Missing("use_lora", "the Megatron engine trains all weights; set it to false or use fsdp or archon", _is_true),
    Missing("enable_tree_training", "the Megatron engine shares no prefixes; set it to false", _is_true),
    Missing("megatron.wrap_with_ddp", "megatron's buffers keep the gradients; set it to true", lambda v: v is False),
    Missing("megatron.use_torch_fsdp2", "it is not available; use backend fsdp", _is_true),
    Missing("megatron.use_custom_fsdp", "it is not available; use backend fsdp", _is_true),
    Missing("megatron.ddp.fp8_param_gather", "weights are not kept in fp8; set it to false", _is_true),
    Missing("megatron.ddp.overlap_param_gather", "it is not available; set it to false", _is_true),
    Missing("megatron.ddp.align_param_gather", "it is not available; set it to false", _is_true),
    Missing("megatron.overlap_param_gather_with_optimizer_step", "it is not available; set it to false", _is_true),
    Missing("megatron.use_precision_aware_optimizer", "states are float32; set it to false", _is_true),
    *(
        Missing(f"megatron.{name}_dtype", "states are float32; leave it out", lambda v: v != "float32")
        for name in ("main_grads", "main_params", "exp_avg", "exp_avg_sq")
    ),
    Missing("megatron.moe_enable_deepep", "DeepEP is not available; set it to false", _is_true),
    Missing("megatron.moe_token_dispatcher_type", "flex needs DeepEP; use alltoall", lambda v: v == "flex"),
    Missing("megatron.moe_shared_expert_overlap", "no supported model has shared experts; set it to false", _is_true),
    Missing(
        "megatron.async_save", "recover points are written at once; saver.mode=async is for saved models", _is_true
    ),
    Missing("megatron.fp8_config.direct_convert", "weights leave in dtype; set it to true", lambda v: v is False),
    Missing("megatron.bridge_type", "the engine has its own map of names; leave it out", lambda v: v != "mbridge"),
    Missing("megatron.use_mbridge_save", "the engine writes weights itself; set it to false", _is_true),
)
BACKEND_SETTINGS = {"fsdp": FSDP, "archon": ARCHON, "megatron": MEGATRON}
"""Train backends that exist, and what each of them lacks."""
LANGUAGE = (Missing("is_critic", "this role is a language model; set it to false", _is_true),)
ROLLOUT = (
    Missing("_version", "the v2 services of 1.x are not part of this version; use v1", lambda v: v != "v1"),
    Missing("return_routed_experts", "routing replay needs SGLang; set it to false", _is_true),
    Missing("agent.mode", "agent workflows are not available", None),
    Missing("agent.agent_cls_path", "agent workflows are not available", None),
    Missing("model", "the v2 services of 1.x are not part of this version", None),
    Missing("poll_interval", "the v2 services of 1.x are not part of this version", None),
    Missing("api_url", "the v2 services of 1.x are not part of this version", None),
    Missing("provider_api_key", "the v2 services of 1.x are not part of this version", None),
)
GENERATION = (
    Missing("use_beam_search", "beam search is not available; set it to false", _is_true),
    Missing("skip_special_tokens", "the embedded engine returns token ids, not text; leave it at true", None),
)
WEIGHT_MODES = {"native": ("shm", "xccl", "disk"), "vllm": ("shm", "xccl", "disk"), "sglang": ("xccl", "disk")}
"""How samplers of each inference backend can receive weights, when they live in processes of their own."""
SGLANG_PARTNERS = {"q_proj": "v_proj", "k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
"""Layers that SGLang fuses: it takes an adapter of the first only beside one of the second, in the same block. Without
it, it refuses the adapter with a name that is missing, or ends at the first request."""
DATASET = (Missing("num_dataset_workers", "remote data workers are not available; leave it at 1", None),)


def check_supported(config: Any, *, spmd: bool = False) -> None:
    """Refuse a run that asks for something this version cannot do.

    Args:
        config: experiment root (``PPOConfig``, ``SFTConfig``, …).
        spmd: an SPMD launcher started this process.
    Raises:
        UnsupportedFeatureError: names every offending key, its value and the remedy.
    """
    problems = unsupported(config, spmd=spmd)
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise UnsupportedFeatureError(f"this run asks for what is not available:\n{listed}")


def unsupported(config: Any, *, spmd: bool = False) -> list[str]:
    """Return one line per setting that cannot be honoured; empty when the run can be built."""
    problems = list(_find(config, "", ROOT if spmd else (*SINGLE_CONTROLLER, *ROOT)))
    problems += [*_turns(config), *_critic(config), *_lora(config)]
    for role in _TRAIN_ROLES:
        engine = getattr(config, role, None)
        if role == "ref" and getattr(config.actor, "kl_ctl", 1) == 0:
            continue  # not built, hence not used
        if is_section(engine):
            problems.extend(_train_engine(engine, role))
            if role != "critic" and not isinstance(config, RWConfig):
                problems.extend(_find(engine, role, LANGUAGE))
    rollout = getattr(config, "rollout", None)
    if is_section(rollout):
        problems.extend(_rollout(config, rollout))
    for name in ("gconfig", "eval_gconfig"):
        if is_section(getattr(config, name, None)):
            problems.extend(_find(getattr(config, name), name, GENERATION))
    for name in ("train_dataset", "valid_dataset"):
        if is_section(getattr(config, name, None)):
            problems.extend(_find(getattr(config, name), name, DATASET))
    return problems


def missing_settings(config: Any, table: tuple[Missing, ...]) -> list[str]:
    """One line for each setting of ``table`` that one engine's ``config`` asks for."""
    return list(_find(config, "", table))


def _train_engine(engine: Any, role: str) -> Iterator[str]:
    yield from _backend(engine.backend, role, tuple(BACKEND_SETTINGS))
    yield from _find(engine, role, (*TRAIN, *BACKEND_SETTINGS.get(_kind(engine.backend), ())))
    if not engine.path:
        yield f"{role}.path='': a model directory or hub id is needed"


def _turns(config: Any) -> Iterator[str]:
    """What is asked of models that leave the device while others work."""
    leaving = _TRAIN_ROLES if is_section(getattr(config, "rollout", None)) else ()
    if config.enable_offload and not leaving:
        yield "enable_offload=true: models take turns in RL runs only; set it to false"
    for role in _TRAIN_ROLES:
        if not getattr(getattr(config, role, None), "offload", False):
            continue
        if role not in leaving:
            yield f"{role}.offload=true: models take turns in RL runs only; set it to false"
        elif not config.enable_offload:
            yield f"{role}.offload=true: models leave the device only with enable_offload=true"


def _critic(config: Any) -> Iterator[str]:
    critic = getattr(config, "critic", None)
    if critic is None:
        return
    if critic.optimizer is None:
        yield "critic.optimizer=null: a critic is trained; give it an optimizer"
    if critic.mask_no_eos_with_zero and not config.actor.mask_no_eos_with_zero:
        yield (
            "critic.mask_no_eos_with_zero=true: returns are made by the actor; set actor.mask_no_eos_with_zero=true too"
        )


def _lora(config: Any) -> Iterator[str]:
    """What is asked of adapters."""
    for role in _TRAIN_ROLES:
        engine = getattr(config, role, None)
        if engine is not None and engine.use_lora:
            yield from _adapted_role(config, engine, role)
    rollout = getattr(config, "rollout", None)
    if is_section(rollout) and rollout.use_lora:
        yield from _adapter_samplers(config, rollout)


def _adapted_role(config: Any, engine: Any, role: str) -> Iterator[str]:
    if role in ("ref", "teacher") and not (role == "ref" and getattr(config.actor, "kl_ctl", 1) == 0):
        yield f"{role}.use_lora=true: no adapter of it is trained, it is the model at its path; set it to false"
    if importlib.util.find_spec("peft") is None:
        yield f"{role}.use_lora=true: the package peft is not installed; pip install 'areal[lora]'"
    if engine.init_from_scratch:
        yield (
            f"{role}.use_lora=true with {role}.init_from_scratch=true: checkpoints hold the adapter alone, so its base "
            "would be saved nowhere; start from a saved model"
        )
    sizes = re.findall(r"[tpe](\d+)", engine.backend.partition(":")[2])
    if any(int(size) > 1 for size in sizes):
        yield f"{role}.use_lora=true: adapters are not cut by t, p or e ({engine.backend}); use d and c"


def _adapter_samplers(config: Any, rollout: Any) -> Iterator[str]:
    if not config.actor.use_lora:
        yield "rollout.use_lora=true: no adapter is trained; set actor.use_lora=true too"
    if not config.gconfig.lora_name:
        yield "gconfig.lora_name='': adapters of rollout.use_lora=true need a name, at least one character"
    kind, mode = _kind(rollout.backend), config.actor.weight_update_mode
    if kind in ("vllm", "sglang") and mode not in ("auto", "disk"):
        yield f"actor.weight_update_mode={mode}: {kind} takes adapters by disk; use disk or auto"
    if kind == "sglang":
        yield from _fused_targets(config.actor.target_modules)
    if kind == "vllm" and rollout.on_weight_update == "keep":
        yield "rollout.on_weight_update=keep: a kept request goes on with the old adapter; use abort or auto"
    if config.eval_gconfig is not None and config.eval_gconfig.lora_name != config.gconfig.lora_name:
        yield "eval_gconfig.lora_name: samplers offer one adapter; leave it or take the name of gconfig"


def _fused_targets(targets: list[str]) -> Iterator[str]:
    """Adapters on part of what SGLang fuses."""
    lacking = []
    for target in targets:
        name = target.rpartition(".")[2]
        partner = SGLANG_PARTNERS.get(name)
        if partner is not None and not _is_named(target.removesuffix(name) + partner, targets):
            lacking.append(f"{target} is without {partner}")
    if lacking and "all-linear" not in targets:
        rules = ", ".join(f"{name} needs {partner}" for name, partner in SGLANG_PARTNERS.items())
        yield (
            f"actor.target_modules=[{', '.join(targets)}]: {', '.join(lacking)}; SGLang loads no such adapter: {rules} "
            "in the same layers. Name them too, leave the list empty for all linear layers, or set "
            "rollout.use_lora=false, which sends merged weights"
        )


def _is_named(module: str, targets: list[str]) -> bool:
    """Whether ``targets`` have every layer that ``module`` stands for."""
    for target in targets:
        wider, narrower = f".{module}".endswith(f".{target}"), f".{target}".endswith(f".{module}")
        more = target.removesuffix(module)
        if wider or (narrower and not re.search(r"(^|\.)\d+\.", more)):  # a number stands for one layer alone
            return True
    return False


def _backend(text: str, role: str, available: tuple[str, ...]) -> Iterator[str]:
    if _kind(text) not in available:
        yield f"{role}.backend={text}: not available; use {' or '.join(f'{name}:d1' for name in available)}"


def _kind(backend: str) -> str:
    return backend.partition(":")[0].partition("[")[0].strip()


def _rollout(config: Any, rollout: Any) -> Iterator[str]:
    yield from _find(rollout, "rollout", ROLLOUT)
    text, mode = rollout.backend, config.actor.weight_update_mode
    kind, sizes = _kind(text), text.partition(":")[2].strip()
    if kind not in WEIGHT_MODES:
        yield from _backend(text, "rollout", tuple(WEIGHT_MODES))
        return
    if kind == "native" and not re.fullmatch(r"d\d+", sizes):
        yield f"rollout.backend={text}: a native replica is one process; use native:dN"
    elif config.scheduler.type == "inline":
        if kind != "native":
            yield f"rollout.backend={text}: scheduler.type=inline starts no servers; use native:d1 or type=local"
        elif sizes != "d1":
            yield f"rollout.backend={text}: scheduler.type=inline hosts one replica; use native:d1 or type=local"
        if mode not in ("auto", "shm"):
            yield f"actor.weight_update_mode={mode}: scheduler.type=inline copies weights in process; use auto"
    elif mode != "auto" and mode not in WEIGHT_MODES[kind]:
        yield (
            f"actor.weight_update_mode={mode}: {kind} receives weights by {', '.join(WEIGHT_MODES[kind])}; use one of "
            "them or auto"
        )
    elif kind == "sglang" and mode != "disk" and "p" in sizes and not re.search(r"p1(?!\d)", sizes):
        yield f"rollout.backend={text}: SGLang with pipeline stages takes weights by disk only; set weight_update_mode"
    if rollout.on_weight_update == "keep" and kind == "sglang":
        yield "rollout.on_weight_update=keep: SGLang cannot keep requests and tell which weights drew a token; use auto"


def _find(config: Any, path: str, table: tuple[Missing, ...]) -> Iterator[str]:
    for entry in table:
        found = _lookup(config, entry.key)
        if found is None:
            continue
        value, default = found
        if entry.asked(value) if entry.asked else plain(value) != plain(default):
            shown = "{…}" if is_section(value) else to_plain(value)
            yield f"{f'{path}.' if path else ''}{entry.key}={shown}: {entry.reason}"


def _lookup(config: Any, key: str) -> tuple[Any, Any] | None:
    """Return value and default of a dotted key, None when the config has no such field (or section)."""
    default: Any = None
    value = config
    for depth, name in enumerate(key.split(".")):
        spec = (
            next((spec for spec in dataclasses.fields(value) if spec.name == name), None) if is_section(value) else None
        )
        if spec is None:
            return None
        default = getattr(default, name) if depth and is_section(default) else field_default(spec)
        value = getattr(value, name)
    return value, default
