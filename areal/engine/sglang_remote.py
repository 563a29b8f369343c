"""SGLang servers: how the one remote engine talks to them.

In: requests and weight sources. Out: calls of SGLang's public routes, unpatched, 0.5. Used by ``inference.remote``.

- Log-probs are those of the distribution that was sampled from, before top-k and top-p, after penalties and bans, at
  the temperature. Greedy ones are at temperature 1.
- Requests never stay in place during an update: SGLang stamps a reply with the version of the moment it is written, so
  only an abort keeps parts of different versions apart.
- Weights are applied as they arrive, bucket by bucket: they travel while generation is paused, and an update that
  fails half-way leaves a server that must be started again (:meth:`SGLangProtocol.harmed`).
- Cache flushes are calls of their own: one that fails inside an update ends SGLang's scheduler.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from areal.api.config.rollout import GenerationHyperparameters
from areal.engine.core.weight_heads import HEAD, ServerHeads
from areal.engine.core.weight_sources import DiskSource, WeightGroup, XcclSource
from areal.engine.core.weight_sync import ParamRecord
from areal.engine.inference.discovery import server_token
from areal.engine.inference.protocol import Capabilities, GenerationPart, ReplyError, ServerCall, ServerProtocol
from areal.engine.inference.remote_engine import RemoteInfEngine
from areal.engine.native.requests import InvalidRequestError
from areal.engine.native.weights import ARCHITECTURES
from areal.utils.errors import CheckpointError, UnsupportedFeatureError, WeightSyncError

if TYPE_CHECKING:
    from areal.api.cli_args import InferenceEngineConfig
    from areal.api.io_struct import ModelRequest, StopReason
    from areal.engine.core.weight_sources import WeightSource

_TOP_K_OFF = GenerationHyperparameters().top_k
_SEED_MASK = 2**31 - 1
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_FLUSH_S = 30  # longest wait until SGLang's scheduler is idle, which it is soon after an abort
_SLACK_S = 30.0
_SHORT_DTYPES = {"half": "float16", "float": "float32"}
_STOP_REASONS: dict[str, StopReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class SGLangProtocol(ServerProtocol):
    """Requests and replies of ``sglang.launch_server``."""

    name: ClassVar[str] = "sglang"
    CONTEXT_MARGIN: ClassVar[int] = 7
    """Last tokens of ``context_length`` that prompt and output must leave free: SGLang refuses longer prompts, and a
    part that is sent again brings its output as prompt."""
    capabilities: ClassVar[Capabilities] = Capabilities(
        keeps_requests=False,
        weight_modes=("xccl", "disk"),
        seeds=False,
        stamps=True,
        refusals={"use_beam_search": "a beam has no log-probs of sampling, so no backend offers it; set it to false"},
        applies_at_once=True,
        torch_groups=True,
        named_adapters=True,
    )
    endpoints: ClassVar[tuple[str, ...]] = (
        "/generate",
        "/model_info",
        "/abort_request",
        "/pause_generation",
        "/continue_generation",
        "/flush_cache",
        "/update_weights_from_disk",
        "/init_weights_update_group",
        "/destroy_weights_update_group",
        "/update_weights_from_distributed",
        "/update_weight_version",
    )

    def health(self) -> ServerCall:
        """SGLang's own ``/health`` generates a token, and hangs for 20 s while paused."""
        return ServerCall("GET", "/model_info")

    def generate(self, req: ModelRequest, gconfig: GenerationHyperparameters, seed: int | None) -> ServerCall:
        """Token ids in, token ids out. A seed counts where the server runs with deterministic inference."""
        return generation_call(req, gconfig, None if seed is None else seed & _SEED_MASK)

    def parse(self, reply: Any) -> GenerationPart:
        """One reply; one that was aborted in the queue has neither tokens nor log-probs."""
        return read_generation(reply, "SGLang")

    def abort(self, rid: str) -> ServerCall:
        return ServerCall("POST", "/abort_request", {"rid": rid})

    def pause(self, keep: bool) -> list[ServerCall]:
        """In-flight requests come back with what they have; later ones wait."""
        if keep:
            raise UnsupportedFeatureError(
                "rollout.on_weight_update=keep: SGLang cannot tell which version made a token of a request that "
                "stayed; use abort, or the backends native and vllm"
            )
        return [ServerCall("POST", "/pause_generation", {"mode": "abort"})]

    def resume(self) -> list[ServerCall]:
        return [ServerCall("POST", "/continue_generation", {})]

    def join_group(self, group: WeightGroup) -> list[ServerCall]:
        """Every tensor-parallel rank joins, as the rank of the group plus its own."""
        return [_once("/init_weights_update_group", group_body(group), group.timeout_s)]

    def leave_group(self, group: WeightGroup) -> list[ServerCall]:
        return [_once("/destroy_weights_update_group", {"group_name": group.name}, group.timeout_s)]

    def stage(self, source: WeightSource, version: int) -> list[ServerCall]:
        """Apply a version at once; generation must be paused.

        Raises:
            WeightSyncError: the directory is incomplete, which SGLang itself would load without a word.
        """
        if isinstance(source, XcclSource):
            return [_bucket_call(source, number) for number in range(len(source.buckets))]
        if isinstance(source, DiskSource):
            _check_directory(source)
            body = {"model_path": source.path, "flush_cache": False, "abort_all_requests": False}
            return [_once("/update_weights_from_disk", body, None)]
        raise UnsupportedFeatureError(
            "actor.weight_update_mode=shm: SGLang cannot read another process's memory; use xccl or disk"
        )

    def records(self, replies: Sequence[Any]) -> list[list[ParamRecord]] | None:
        """SGLang keeps no records; it is asked what it holds, and a probe of log-probs does the rest."""
        for reply in replies:
            if not isinstance(reply, Mapping) or reply.get("success") is not True:
                raise WeightSyncError(f"SGLang did not take the weights: {reply!r:.300}")
        return None

    def heads(self, shapes: Mapping[str, Sequence[int]]) -> list[ServerCall]:
        """Its dtype, then the first values of each tensor; of a matrix SGLang gives whole rows.

        Only some of its model classes can be asked (Llama and what derives from it): the others refuse.
        """
        calls = [ServerCall("GET", "/server_info")]
        for name, shape in shapes.items():
            body = {"name": name, "truncate_size": HEAD if len(shape) < 2 else 1}
            calls.append(ServerCall("POST", "/get_weights_by_name", body))
        return calls

    def read_heads(self, names: Sequence[str], replies: Sequence[Any]) -> ServerHeads:
        """Quantized weights are none that anybody sent: nothing is said about them."""
        info, *tables = replies
        if not isinstance(info, Mapping):
            raise ReplyError(f"SGLang: /server_info is {info!r:.200}, not an object")
        if info.get("quantization"):
            return ServerHeads("", {})
        dtype = str(info.get("dtype"))
        values = {name: _first_values(name, table) for name, table in zip(names, tables, strict=True)}
        return ServerHeads(_SHORT_DTYPES.get(dtype, dtype), values)

    def harmed(self, source: WeightSource, error: BaseException) -> bool:
        """Buckets are applied one by one, and a directory that fails half-way is rolled back from itself."""
        return not isinstance(source, DiskSource) or "Failed to get weights iterator" not in str(error)

    def commit(self, version: int) -> list[ServerCall]:
        """Flush what the old weights cached, then stamp the version."""
        flush = _once(f"/flush_cache?timeout={_FLUSH_S}", None, _FLUSH_S + _SLACK_S)
        return [flush, *self.stamp(version)]

    def discard(self) -> list[ServerCall]:
        """Nothing is kept aside."""
        return []

    def load_adapter(self, name: str, path: str) -> list[ServerCall]:
        """Needs ``--enable-lora``. Cached prefixes are kept apart by adapter."""
        load = _once("/load_lora_adapter", {"lora_name": name, "lora_path": path}, None)
        return [*self.unload_adapter(name), load]

    def unload_adapter(self, name: str) -> list[ServerCall]:
        unknown = f"{name} does not exist"
        return [ServerCall("POST", "/unload_lora_adapter", {"lora_name": name}, once=True, harmless=unknown)]

    def with_adapter(self, call: ServerCall, name: str) -> ServerCall:
        return dataclasses.replace(call, body={**(call.body or {}), "lora_path": name})

    def stamp(self, version: int) -> list[ServerCall]:
        body = {"new_version": str(version), "abort_all_requests": False}
        return [ServerCall("POST", "/update_weight_version", body)]


class RemoteSGLangEngine(RemoteInfEngine):
    """The inference engine over SGLang servers; see :class:`RemoteInfEngine`."""

    backend_name: ClassVar[str] = "sglang"

    def __init__(self, config: InferenceEngineConfig, **options: Any) -> None:
        super().__init__(config, SGLangProtocol(server_token()), **options)


def _once(path: str, body: dict[str, Any] | None, timeout_s: float | None) -> ServerCall:
    return ServerCall("POST", path, body, timeout_s, once=True)


def _bucket_call(source: XcclSource, number: int) -> ServerCall:
    bucket, group = source.buckets[number], source.group
    body = {
        "names": [spec.name for spec in bucket],
        "dtypes": [spec.dtype for spec in bucket],
        "shapes": [list(spec.shape) for spec in bucket],
        "group_name": group.name,
        "flush_cache": False,
        "abort_all_requests": False,
    }
    return _once("/update_weights_from_distributed", body, group.timeout_s)


def _first_values(name: str, table: Any) -> tuple[float, ...]:
    """Of rows, or rows of every data-parallel rank, or the values themselves."""
    while isinstance(table, list) and table and isinstance(table[0], list):
        table = table[0]
    if not isinstance(table, list) or not all(type(value) is float for value in table):
        raise ReplyError(f"SGLang: {name} is {table!r:.200}, not a list of finite numbers")
    return tuple(table[:HEAD])


def _check_directory(source: DiskSource) -> None:
    """Every tensor that was written is there, whole, in its shape; and every layer has what the others have."""
    from areal.engine.core.hf_checkpoint import HfDirectory

    try:
        found = HfDirectory(source.path)
    except CheckpointError as exc:
        raise WeightSyncError(f"weights v{source.version}: {exc}") from exc
    for record in source.records:
        if found.shapes.get(record.name) != tuple(record.shape):
            raise WeightSyncError(
                f"weights v{source.version}: {source.path} has {record.name} as {found.shapes.get(record.name)}, "
                f"{tuple(record.shape)} was written"
            )
    if found.model_type in ARCHITECTURES and (absent := _absent(found.shapes, found.path)):
        raise WeightSyncError(f"weights v{source.version}: {source.path} lacks {', '.join(absent[:5])}")


def _absent(shapes: Mapping[str, Any], path: Path) -> list[str]:
    """Tensors that a model of equal layers must have and ``shapes`` has not."""
    config = json.loads((path / "config.json").read_text())
    matches = [match for name in shapes if (match := _LAYER.match(name)) is not None]
    suffixes = {match[2] for match in matches}
    expected = ["model.embed_tokens.weight", "model.norm.weight"]
    if not config.get("tie_word_embeddings", False):
        expected.append("lm_head.weight")
    expected += [
        f"model.layers.{i}.{suffix}" for i in range(config["num_hidden_layers"]) for suffix in sorted(suffixes)
    ]
    return [name for name in expected if name not in shapes]


def group_body(group: WeightGroup) -> dict[str, Any]:
    """What SGLang and the native server are told of a group that they join."""
    return {
        "master_address": group.host,
        "master_port": group.port,
        "rank_offset": group.rank,
        "world_size": group.world_size,
        "group_name": group.name,
        "backend": group.backend,
    }


def generation_call(req: ModelRequest, gconfig: GenerationHyperparameters, seed: int | None) -> ServerCall:
    """The call of ``/generate``, as SGLang and the native server read it.

    Raises:
        InvalidRequestError: the request brings images.
    """
    if req.image_data or req.vision_msg_vllm:
        raise InvalidRequestError("image_data: only text models are served")
    params: dict[str, Any] = {
        "max_new_tokens": gconfig.max_new_tokens,
        "min_new_tokens": gconfig.min_new_tokens,
        "temperature": 0.0 if gconfig.greedy else gconfig.temperature,
        "top_p": gconfig.top_p,
        "top_k": -1 if gconfig.top_k >= _TOP_K_OFF else gconfig.top_k,
        "stop_token_ids": gconfig.stop_token_ids,
        "ignore_eos": gconfig.ignore_eos,
        "skip_special_tokens": gconfig.skip_special_tokens,
        "frequency_penalty": gconfig.frequency_penalty,
    }
    if gconfig.stop:
        params["stop"] = gconfig.stop
    if seed is not None:
        params["sampling_seed"] = seed
    body = {"rid": req.rid, "input_ids": req.input_ids, "sampling_params": params}
    return ServerCall("POST", "/generate", {**body, "return_logprob": True, "stream": False})


def read_generation(reply: Any, server: str) -> GenerationPart:
    """Read a reply of ``/generate`` as SGLang and the native server give it.

    Args:
        reply: parsed JSON.
        server: its kind, for messages.
    Raises:
        ReplyError: names the field that is missing or wrong.
    """
    meta = reply.get("meta_info") if isinstance(reply, Mapping) else None
    if not isinstance(meta, Mapping):
        raise ReplyError(f"{server}: the reply has no meta_info: {reply!r:.200}")
    finish = meta.get("finish_reason")
    reason = finish.get("type") if isinstance(finish, Mapping) else None
    if not isinstance(finish, Mapping) or reason not in _STOP_REASONS:
        raise ReplyError(f"{server}: meta_info.finish_reason is {finish!r:.200}, not one of {sorted(_STOP_REASONS)}")
    if reason == "abort" and finish.get("status_code") is not None:
        raise ReplyError(f"{server} gave a request up: {finish.get('message')!r:.200}")
    tokens = _list(reply, "output_ids", int, server)
    entries = _list(meta, "output_token_logprobs", list, server)
    if not all(len(entry) >= 2 and type(entry[0]) is float and type(entry[1]) is int for entry in entries):
        raise ReplyError(
            f"{server}: meta_info.output_token_logprobs holds {entries!r:.200}, not [log-prob, token] pairs"
        )
    if [entry[1] for entry in entries] != tokens:
        raise ReplyError(f"{server}: output_ids has {len(tokens)} tokens that are not those of its {len(entries)} "
                         "log-probs")  # fmt: skip
    versions = _versions(meta, len(tokens))
    return GenerationPart(tokens, [entry[0] for entry in entries], _STOP_REASONS[str(reason)], versions)


def _list(holder: Mapping[str, Any], name: str, kind: type, server: str) -> list[Any]:
    found = holder.get(name)
    found = [] if found is None else found
    if not isinstance(found, list) or not all(type(entry) is kind for entry in found):
        raise ReplyError(f"{server}: {name} is {found!r:.200}, not a list of {kind.__name__}")
    return found


def _versions(meta: Mapping[str, Any], count: int) -> list[int] | None:
    """Per token if the server says so, else that of the whole reply; None if it has no number yet."""
    each = meta.get("output_token_versions")
    if isinstance(each, list) and all(type(version) is int for version in each):
        return each
    version = meta.get("weight_version")
    return [int(version)] * count if isinstance(version, str) and version.isascii() and version.isdigit() else None
