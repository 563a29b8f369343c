"""The native server's JSON: request bodies to objects of the engine, and replies back to JSON.

Bodies and replies are those of SGLang's ``/generate`` and weight endpoints, plus ``output_token_versions`` in
``meta_info`` and the record of every tensor in the replies to weight updates. What cannot be honoured is refused, never
ignored. Called by ``server`` and, for what both sides must agree on, by ``areal.engine.native_remote``.
"""

from __future__ import annotations

import dataclasses
import math
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from areal.api.config.rollout import GenerationHyperparameters
from areal.api.io_struct import ModelRequest, ModelResponse, ParamSpec
from areal.engine.core.shared_weights import SharedParam, WeightManifest
from areal.engine.core.weight_sources import DiskSource, WeightGroup, XcclSource
from areal.engine.core.weight_sync import ParamRecord
from areal.engine.native.requests import InvalidRequestError
from areal.infra.rpc.rtensor import RTensor
from areal.utils.errors import ConfigError, EngineError

_DEFAULT_NEW_TOKENS = 128
_NO_TOP_K = 100_000_000
_MOST_REQUESTS = 4096  # of one body, samples included
_REQUIRED: Any = object()
_NUMBER = (int, float)

# sampling_params key -> (types, field of GenerationHyperparameters)
_SAMPLING: dict[str, tuple[Any, str]] = {
    "max_new_tokens": (int, "max_new_tokens"),
    "min_new_tokens": (int, "min_new_tokens"),
    "temperature": (_NUMBER, "temperature"),
    "top_p": (_NUMBER, "top_p"),
    "top_k": (int, "top_k"),
    "stop": ((str, list), "stop"),
    "stop_token_ids": (list, "stop_token_ids"),
    "ignore_eos": (bool, "ignore_eos"),
    "skip_special_tokens": (bool, "skip_special_tokens"),
    "frequency_penalty": (_NUMBER, "frequency_penalty"),
}
_GENERATE = ("input_ids", "text", "sampling_params", "return_logprob", "stream", "rid")
# Known to SGLang and accepted as long as they ask for nothing.
_NEUTRAL = (
    "image_data", "video_data", "audio_data", "lora_path", "return_routed_experts", "return_hidden_states",
    "logprob_start_len", "top_logprobs_num", "token_ids_logprob", "return_text_in_logprobs", "priority",
    "presence_penalty", "repetition_penalty", "min_p", "spaces_between_special_tokens", "no_stop_trim", "stop_regex",
    "json_schema", "regex", "ebnf", "structural_tag", "logit_bias", "custom_params", "stream_interval",
)  # fmt: skip
_ASKS_NOTHING: dict[str, Any] = {"repetition_penalty": 1.0, "spaces_between_special_tokens": True}
_ASKS_NOTHING |= {"logprob_start_len": -1}


def take(body: Mapping[str, Any], name: str, kind: Any, default: Any = _REQUIRED, *, at: str = "") -> Any:
    """The field ``name`` of ``body``, if it is of type ``kind``; null counts as absent.

    Raises:
        InvalidRequestError: it is missing, or of another type.
    """
    value = body.get(name)
    if value is None:
        if default is _REQUIRED:
            raise InvalidRequestError(f"{at}{name} is missing")
        return default
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        expected = " or ".join(k.__name__ for k in kinds)
        raise InvalidRequestError(f"{at}{name}={_short(value)} must be {expected}")
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequestError(f"{at}{name}={value} must be finite")
    return value


def take_ids(body: Mapping[str, Any], name: str, default: Any = _REQUIRED, *, at: str = "") -> list[int]:
    """A list of integers."""
    return _ids(take(body, name, list, default, at=at), f"{at}{name}")


def _ids(values: Any, name: str) -> list[int]:
    if not isinstance(values, list) or not all(type(i) is int for i in values):
        raise InvalidRequestError(f"{name}={_short(values)} must be a list of integers")
    return values


def take_version(body: Mapping[str, Any], name: str, default: Any = _REQUIRED) -> int:
    """A weight version, as a number or, as SGLang has it, as its digits."""
    value = take(body, name, (int, str), default)
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value)
    if not isinstance(value, int) or value < 0:
        raise InvalidRequestError(f"{name}={_short(value)} must be a version, a number >= 0")
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


# -- generation --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class GenerateCall:
    """What one ``/generate`` body asks for.

    Attributes:
        requests: for the engine; none asked for no token at all (``max_new_tokens`` 0) is left out.
        many: the reply is a list.
        logprobs: the reply carries them.
    """

    requests: list[ModelRequest]
    many: bool
    logprobs: bool


def read_generate(body: Mapping[str, Any], tokenizer: Any) -> GenerateCall:
    """Check a ``/generate`` body.

    Raises:
        InvalidRequestError: names the field.
    """
    refuse_unknown(body, _GENERATE)
    if take(body, "stream", bool, False):
        raise InvalidRequestError("stream=true: this server answers in one piece; send stream=false")
    prompts, batch = _prompts(body, tokenizer)
    params = take(body, "sampling_params", dict, {})
    samples, seed = take(params, "n", int, 1, at="sampling_params."), take(params, "sampling_seed", int, None)
    if samples < 1:
        raise InvalidRequestError(f"sampling_params.n={samples} must be >= 1")
    if len(prompts) * samples > _MOST_REQUESTS:
        raise InvalidRequestError(
            f"input_ids holds {len(prompts)} prompts and sampling_params.n={samples}: one body may ask for at most "
            f"{_MOST_REQUESTS} continuations"
        )
    gconfig = _read_sampling(params)
    many = batch or samples > 1
    rid = take(body, "rid", str, None)
    requests = []
    for number in range(len(prompts) * samples):
        own_rid = str(uuid.uuid4()) if rid is None else f"{rid}_{number}" if many else rid
        own_seed = None if seed is None else seed + number % samples
        request = ModelRequest(own_rid, list(prompts[number // samples]), gconfig, seed=own_seed)
        requests.append(request)
    return GenerateCall(requests, many, take(body, "return_logprob", bool, False))


def _prompts(body: Mapping[str, Any], tokenizer: Any) -> tuple[list[list[int]], bool]:
    """Token ids of every prompt, and whether the body holds several."""
    given = take(body, "input_ids", list, None)
    if given is not None:
        if given and all(isinstance(entry, list) for entry in given):
            return [_ids(entry, "input_ids") for entry in given], True
        return [_ids(given, "input_ids")], False
    text = take(body, "text", str, None)
    if text is None:
        raise InvalidRequestError("input_ids is missing")
    if tokenizer is None:
        raise InvalidRequestError("text needs a tokenizer, which this server was started without; send input_ids")
    return [tokenizer.encode(text)], False


def _read_sampling(params: Mapping[str, Any]) -> GenerationHyperparameters:
    at = "sampling_params."
    refuse_unknown(params, (*_SAMPLING, "n", "sampling_seed"), at)
    settings: dict[str, Any] = {"max_new_tokens": _DEFAULT_NEW_TOKENS, "max_tokens": 2**31 - 1}
    for key, (kind, name) in _SAMPLING.items():
        value = take(params, key, kind, None, at=at)
        if value is not None:
            settings[name] = float(value) if kind is _NUMBER else value
    if settings.get("top_k") == -1:
        settings["top_k"] = _NO_TOP_K
    if isinstance(settings.get("stop"), str):
        settings["stop"] = [settings["stop"]]
    if not all(isinstance(text, str) for text in settings.get("stop") or ()):
        raise InvalidRequestError(f"{at}stop={_short(settings['stop'])} must be strings")
    _ids(settings.get("stop_token_ids", []), f"{at}stop_token_ids")
    try:
        return GenerationHyperparameters(**settings)
    except ConfigError as exc:
        raise InvalidRequestError(f"sampling_params: {exc}") from exc


def refuse_unknown(body: Mapping[str, Any], known: Sequence[str], at: str = "") -> None:
    """Raise InvalidRequestError for a key that is not ``known``, unless SGLang knows it and it asks for nothing."""
    for key, value in body.items():
        if key in known or (key in _NEUTRAL and _asks_nothing(key, value)):
            continue
        if key in _NEUTRAL:
            raise InvalidRequestError(f"{at}{key}={_short(value)}: the native engine cannot do that")
        raise InvalidRequestError(f"{at}{key} is not known; known: {', '.join(known)}")


def _asks_nothing(key: str, value: Any) -> bool:
    return not value or value == _ASKS_NOTHING.get(key)


def write_reply(request: ModelRequest, response: ModelResponse, version: int, tokenizer: Any, logprobs: bool) -> Any:
    """JSON of one reply.

    Args:
        request, response: of the engine.
        version: in service now; the version of a reply without tokens.
        tokenizer: makes ``text``; without one it is empty.
        logprobs: whether they were asked for.
    Raises:
        EngineError: a log-prob is not finite.
    """
    tokens, stop = response.output_tokens, request.gconfig.stop
    text = tokenizer.decode(tokens, skip_special_tokens=False) if tokenizer is not None and stop else ""
    found = [s for s in stop or () if s in text] if response.stop_reason == "stop" else []
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": _finish_reason(response, found),
        "prompt_tokens": response.input_len,
        "completion_tokens": response.output_len,
        "cached_tokens": 0,
        "weight_version": str(response.output_versions[-1] if response.output_versions else version),
        "output_token_versions": response.output_versions,
        "e2e_latency": response.latency if math.isfinite(response.latency) else 0.0,
    }
    if logprobs:
        for value in response.output_logprobs:
            if not math.isfinite(value):
                raise EngineError(f"request {request.rid}: a log-prob is {value}; the weights hold what is not finite")
        pairs = zip(response.output_logprobs, tokens, strict=True)
        meta["output_token_logprobs"] = [[value, token, None] for value, token in pairs]
    return {"text": _reply_text(request, tokens, found, tokenizer), "output_ids": tokens, "meta_info": meta}


def _finish_reason(response: ModelResponse, found: list[str]) -> dict[str, Any]:
    if response.stop_reason == "abort":
        return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    if response.stop_reason == "length":
        return {"type": "length", "length": response.output_len}
    return {"type": "stop", "matched": found[0] if found else response.output_tokens[-1]}


def _reply_text(request: ModelRequest, tokens: list[int], found: list[str], tokenizer: Any) -> str:
    if tokenizer is None:
        return ""
    text: str = tokenizer.decode(tokens, skip_special_tokens=request.gconfig.skip_special_tokens)
    ends = [at for s in found if (at := text.find(s)) >= 0]
    return text[: min(ends)] if ends else text


# -- weights -----------------------------------------------------------------------------------------------------------


def read_group(body: Mapping[str, Any]) -> WeightGroup:
    """The group of an ``/init_weights_update_group`` body."""
    backend = take(body, "backend", str, "gloo")
    if backend not in ("gloo", "nccl"):
        raise InvalidRequestError(f"backend={backend!r} must be gloo or nccl")
    port = take(body, "master_port", (int, str))
    if isinstance(port, str):
        port = int(port) if port.isascii() and port.isdigit() else 0
    size, rank = take(body, "world_size", int), take(body, "rank_offset", int)
    if not 0 < port < 65536:
        raise InvalidRequestError(f"master_port={_short(body['master_port'])} must be a port, 1..65535")
    if not 0 < rank < size:
        raise InvalidRequestError(f"rank_offset={rank} must be in 1..world_size-1, world_size={size}; rank 0 sends")
    return WeightGroup(
        take(body, "group_name", str),
        take(body, "master_address", str),
        port,
        size,
        rank,
        backend,  # type: ignore[arg-type]
        take(body, "torch_helper", bool, True),
        take(body, "stage", int, 0),
        float(take(body, "timeout_s", _NUMBER, 600.0)),
    )


def read_disk(body: Mapping[str, Any], version: int) -> DiskSource:
    """The source of an ``/update_weights_from_disk`` body."""
    return DiskSource(version, take(body, "model_path", str))


def read_broadcast(body: Mapping[str, Any], version: int, group: WeightGroup) -> XcclSource:
    """The source of an ``/update_weights_from_distributed`` body: it names every tensor of the version, in order."""
    names, dtypes = take(body, "names", list), take(body, "dtypes", list)
    shapes = take(body, "shapes", list)
    if not len(names) == len(dtypes) == len(shapes) or not names:
        raise InvalidRequestError(f"names, dtypes and shapes must be equally long, not {len(names)}, {len(dtypes)}, "
                                  f"{len(shapes)}")  # fmt: skip
    specs = [_spec(*entry) for entry in zip(names, dtypes, shapes, strict=True)]
    lengths = take_ids(body, "bucket_lengths", [len(specs)])
    if sum(lengths) != len(specs) or min(lengths) < 1:
        raise InvalidRequestError(f"bucket_lengths={_short(lengths)} must add up to the {len(specs)} names")
    buckets, at = [], 0
    for length in lengths:
        buckets.append(specs[at : at + length])
        at += length
    return XcclSource(version, group, buckets)


def read_manifest(body: Mapping[str, Any], version: int) -> WeightManifest:
    """The source of an ``/update_weights_from_shm`` body, see :func:`write_manifest`."""
    params, size = [], take(body, "size_bytes", int)
    for entry in take(body, "params", list):
        if not isinstance(entry, dict):
            raise InvalidRequestError(f"params holds {_short(entry)}: every entry is an object")
        spec = _spec(entry.get("name"), entry.get("dtype"), entry.get("shape"))
        checksum, offset = take(entry, "checksum", int, at="params."), take(entry, "offset", int, at="params.")
        if not 0 <= offset <= size - spec.size or offset % dataclasses.replace(spec, shape=()).size:
            raise InvalidRequestError(
                f"params.offset={_short(offset)}: {spec.name} has {spec.size} bytes, which must lie within "
                f"size_bytes={size}, at a multiple of the size of {spec.dtype}"
            )
        params.append(SharedParam(spec.name, spec.shape, spec.dtype, checksum, offset))
    host = take(body, "host", str)
    nowhere = RTensor("", "", "uint8", (size,))  # read on one host only: the store of the writer is never asked
    return WeightManifest(version, host, take(body, "pid", int), take(body, "fd", int), size, params, nowhere)


def write_manifest(manifest: WeightManifest) -> dict[str, Any]:
    """What :func:`read_manifest` reads."""
    params = [dataclasses.asdict(param) for param in manifest.params]
    place = {"host": manifest.host, "pid": manifest.pid, "fd": manifest.fd, "size_bytes": manifest.size_bytes}
    return {**place, "params": params}


def _spec(name: Any, dtype: Any, shape: Any) -> ParamSpec:
    import torch

    if not isinstance(name, str) or not name:
        raise InvalidRequestError(f"names holds {_short(name)}: every name is a string")
    if not isinstance(dtype, str) or not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise InvalidRequestError(f"dtypes: {name} has {_short(dtype)}, which is not the name of a torch type")
    if any(extent < 0 for extent in _ids(shape, f"shapes of {name}")):
        raise InvalidRequestError(f"shapes: {name} has {_short(shape)}")
    return ParamSpec(name, tuple(shape), dtype)


def write_records(ranks: Sequence[Sequence[ParamRecord]]) -> list[list[dict[str, Any]]]:
    """Records as JSON."""
    return [[dataclasses.asdict(record) for record in records] for records in ranks]


def read_records(ranks: Any) -> list[list[ParamRecord]]:
    """What :func:`write_records` wrote; raises TypeError or KeyError for anything else."""
    return [[ParamRecord(r["name"], tuple(r["shape"]), r["dtype"], r["checksum"]) for r in rank] for rank in ranks]
