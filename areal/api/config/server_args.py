"""Flags and environment of vLLM and SGLang servers, from their config sections. Standard library only.

In: a section, a :class:`ServerPlace` (where it listens, on what it runs, which model). Out: :class:`ServerFlags`: flags
by name, environment, and what was changed of the defaults that nobody wrote. A value that the user wrote is passed on
as it is; the server refuses it if it cannot be. Called by ``areal.engine.inference.launch`` and by the static methods
``build_args`` and ``build_cmd`` of the sections.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from areal.api.config.fields import is_default, plain

if TYPE_CHECKING:
    from areal.api.config.inference import SGLangConfig, vLLMConfig

VLLM_MODULE = "vllm.entrypoints.openai.api_server"
SGLANG_MODULE = "sglang.launch_server"
_EXTENSION_PACKAGE = "areal.engine.vllm_ext."
_NOT_FLAGS = ("python", "kv_cache_gb")
_VLLM_LORA = ("max_lora_rank", "max_loras", "lora_modules")
_SGLANG_LORA = ("max_lora_rank", "max_loaded_loras", "lora_paths", "lora_backend")
_SGLANG_LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_VLLM_GPU_ONLY = ("gpu_memory_utilization", "block_size", "cpu_offload_gb")
_SGLANG_GPU_ONLY = ("attention_backend", "cpu_offload_gb", "lora_backend")
_CPU_PREFILL_TOKENS = 8192
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclasses.dataclass(frozen=True)
class ServerPlace:
    """Where one server runs and what it serves.

    Attributes:
        host, port: where it listens.
        tensor, pipeline: devices along each.
        device: ``cuda`` or ``cpu``.
        dtype: compute dtype where the section's is an unwritten default; None keeps the default.
        index: number of the server; added to the seed.
        model: content of the model's ``config.json``, if known.
        base_gpu_id: first of its devices among the visible ones (SGLang).
        n_nodes, node_rank, dist_init_addr: several machines for one server.
        unwritten: names of the section's fields that nobody wrote; None: those marked as defaults.
    """

    host: str | None = None
    port: int | None = None
    tensor: int = 1
    pipeline: int = 1
    device: str = "cuda"
    dtype: str | None = None
    index: int = 0
    model: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    base_gpu_id: int = 0
    n_nodes: int = 1
    node_rank: int = 0
    dist_init_addr: str | None = None
    unwritten: Collection[str] | None = None


@dataclasses.dataclass
class ServerFlags:
    """What a server is started with.

    Attributes:
        args: flag name with underscores -> value, as ``get_py_cmd`` takes them.
        env: environment variables.
        changes: defaults that were replaced, as phrases.
    """

    args: dict[str, Any]
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    changes: list[str] = dataclasses.field(default_factory=list)


def unwritten_fields(section: Any) -> list[str]:
    """Names of the fields whose value is a default that nobody wrote and that may be replaced."""
    return [spec.name for spec in dataclasses.fields(section) if is_default(getattr(section, spec.name))]


def vllm_flags(section: vLLMConfig, place: ServerPlace) -> ServerFlags:
    """Flags of one vLLM server."""
    flags = _section_flags(section, place, "max_model_len", _VLLM_GPU_ONLY)
    args = flags.args
    if not section.enable_lora:
        _drop(args, _VLLM_LORA)
    args["seed"] = section.seed + place.index
    args["worker_extension_cls"] = section.worker_extension_cls.removeprefix(_EXTENSION_PACKAGE)
    args |= {
        "tokenizer": section.model,
        "load_format": "auto",
        "tensor_parallel_size": place.tensor,
        "pipeline_parallel_size": place.pipeline,
        "host": place.host,
        "port": place.port,
        "enable_scale_out": True,
        "logprobs_mode": "processed_logprobs",
    }
    if place.n_nodes > 1:
        address, _, port = (place.dist_init_addr or "").rpartition(":")
        args |= {"nnodes": place.n_nodes, "node_rank": place.node_rank, "master_addr": address, "master_port": port}
        args["headless"] = place.node_rank > 0
    flags.env = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if section.enable_lora:
        flags.env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if place.device == "cpu":
        args["enforce_eager"] = True  # compiling takes minutes and a C++ compiler
        # 0.32 dies on a CPU when a request with a seed is prefilled in chunks; whole prompts need room in one step
        if not args["no_enable_chunked_prefill"]:
            _replace(flags, "no_enable_chunked_prefill", True, "vLLM dies of it on a CPU where requests have seeds")
        args["max_num_batched_tokens"] = max(
            args["max_model_len"] or model_limit(place.model) or 0, _CPU_PREFILL_TOKENS
        )
        flags.env |= {"VLLM_CPU_KVCACHE_SPACE": f"{section.kv_cache_gb:g}", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return flags


def sglang_flags(section: SGLangConfig, place: ServerPlace) -> ServerFlags:
    """Flags of one SGLang server."""
    flags = _section_flags(section, place, "context_length", _SGLANG_GPU_ONLY)
    args = flags.args
    if args.pop("enable_multithread_load", False):
        args["model_loader_extra_config"] = json.dumps({"enable_multithread_load": True, "num_threads": 8})
    if not section.enable_lora:
        _drop(args, _SGLANG_LORA)
    elif not section.lora_paths:  # it must know before the first adapter which layers may have one
        args["lora_target_modules"] = list(_SGLANG_LORA_TARGETS)
    args["random_seed"] = section.random_seed + place.index
    args |= {
        "tokenizer_path": section.model_path,
        "tokenizer_mode": "auto",
        "load_format": "auto",
        "tp_size": place.tensor,
        "base_gpu_id": place.base_gpu_id,
        "nnodes": place.n_nodes,
        "node_rank": place.node_rank,
        "dist_init_addr": place.dist_init_addr,
        "pp_size": place.pipeline if place.pipeline > 1 else None,
        "host": place.host,
        "port": place.port,
        "skip_server_warmup": True,  # a probe generation follows
        "grammar_backend": "none",
    }
    if place.device == "cpu":
        args |= {"device": "cpu", "sleep_on_idle": True, "max_total_tokens": _kv_tokens(section, place, args)}
        args.pop("base_gpu_id")
        if section.enable_lora and "lora_backend" not in args:
            args["lora_backend"] = "torch_native"
        flags.env = {"SGLANG_USE_CPU_ENGINE": "1"}
    return flags


def _section_flags(section: Any, place: ServerPlace, length_field: str, gpu_only: Collection[str]) -> ServerFlags:
    """The section's own values, with defaults that nobody wrote adapted to device and model."""
    args = {
        spec.name: plain(getattr(section, spec.name))
        for spec in dataclasses.fields(section)
        if spec.name not in _NOT_FLAGS
    }
    free = set(unwritten_fields(section) if place.unwritten is None else place.unwritten)
    flags = ServerFlags(args)
    longest = model_limit(place.model)
    if length_field in free and longest is not None and args[length_field] > longest:
        _replace(flags, length_field, longest, "the model's limit")
    on_cpu = place.device == "cpu"
    wanted = place.dtype or ("float32" if on_cpu else None)
    if "dtype" in free and wanted is not None and args["dtype"] != plain(wanted):
        _replace(flags, "dtype", plain(wanted), "as the trainer computes" if place.dtype else "the device is a CPU")
    if on_cpu:
        for name in gpu_only:
            if name in free:
                _drop(args, (name,))
                flags.changes.append(f"{name} is not passed: the device is a CPU")
    return flags


def _replace(flags: ServerFlags, name: str, value: Any, reason: str) -> None:
    flags.changes.append(f"{name}={value} instead of the default {flags.args[name]}: {reason}")
    flags.args[name] = value


def _drop(args: dict[str, Any], names: Collection[str]) -> None:
    for name in names:
        args.pop(name, None)


def model_limit(model: Mapping[str, Any]) -> int | None:
    """Longest sequence of a model, from its ``config.json``; None if that does not say."""
    value = _text(model).get("max_position_embeddings")
    return value if isinstance(value, int) and value > 0 else None


def model_vocabulary(model: Mapping[str, Any]) -> int | None:
    """Rows of a model's embedding, from its ``config.json``; None if that does not say."""
    value = _text(model).get("vocab_size")
    return value if isinstance(value, int) and value > 0 else None


def _text(model: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = model.get("text_config")
    return inner if isinstance(inner, Mapping) else model


def _kv_tokens(section: SGLangConfig, place: ServerPlace, args: Mapping[str, Any]) -> int:
    """Tokens that ``kv_cache_gb`` holds; at least one sequence, at most what can run at once."""
    text = _text(place.model)
    heads = text.get("num_attention_heads") or 1
    head_dim = text.get("head_dim") or (text.get("hidden_size") or 4096) // heads
    layers, kv_heads = text.get("num_hidden_layers") or 32, text.get("num_key_value_heads") or heads
    per_token = 2 * layers * kv_heads * head_dim * _DTYPE_BYTES.get(args["dtype"], 4)
    context = args["context_length"] or model_limit(place.model) or 4096
    fits = int(section.kv_cache_gb * (1 << 30)) // per_token
    return max(context, min(fits, context * (section.max_running_requests or 256)))


def command(python: str, module: str, args: Mapping[str, Any]) -> list[str]:
    """Command that runs ``module`` under ``python`` (empty: the running interpreter) with ``args`` as flags.

    Underscores become dashes; None, False, empty strings and empty lists are left out; True is a bare flag; a list is
    its flag followed by its items.
    """
    words = [python or sys.executable, "-m", module]
    for name, value in args.items():
        if value is None or value is False or value in ("", []):
            continue
        words.append("--" + name.replace("_", "-"))
        if value is not True:
            words.extend(str(item) for item in (value if isinstance(value, list | tuple) else [value]))
    return words
