"""vLLM servers: how the one remote engine talks to them.

In: requests and weight sources. Out: calls of vLLM's public routes (generation, pause, versions; opened by
``--enable-scale-out`` and ``VLLM_SERVER_DEV_MODE=1``), and ``/collective_rpc`` to our worker extension
(``vllm_ext/vllm_worker_extension.py``) for what they cannot do. Used by ``inference.remote``.

- Log-probs are those of the distribution that was sampled from (``--logprobs-mode processed_logprobs``): after
  penalties and bans, at the temperature, renormalised over what top-k and top-p kept. Greedy ones are at temperature 1.
- A token's version is the one that the server stamped when it drew it.
- A collective call stops vLLM's engine loop while it lasts, so weights are received while generation is paused.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlencode

from areal.api.config.rollout import GenerationHyperparameters
from areal.engine.core.shared_weights import WeightManifest
from areal.engine.core.weight_sources import DiskSource, WeightGroup, XcclSource
from areal.engine.core.weight_sync import ParamRecord
from areal.engine.inference.discovery import server_token
from areal.engine.inference.protocol import Capabilities, GenerationPart, ReplyError, ServerCall, ServerProtocol
from areal.engine.inference.remote_engine import RemoteInfEngine
from areal.engine.native.requests import InvalidRequestError
from areal.utils.errors import WeightSyncError

if TYPE_CHECKING:
    from areal.api.config.rollout import InferenceEngineConfig
    from areal.api.io_struct import ModelRequest, StopReason
    from areal.engine.core.weight_sources import WeightSource

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0
"""vLLM raises a lower one to the first without a word and refuses a higher one than the second."""
_SEED_MASK = 2**63 - 1
_NO_LOGPROB = -9999.0
_FIRST_VERSION = "default"
_TOP_K_OFF = GenerationHyperparameters().top_k
_STOP_REASONS: dict[str, StopReason] = {"stop": "stop", "length": "length", "abort": "abort"}
_RPC_SLACK_S = 30.0


class VLLMProtocol(ServerProtocol):
    """Requests and replies of ``vllm.entrypoints.openai.api_server``, 0.32."""

    name: ClassVar[str] = "vllm"
    capabilities: ClassVar[Capabilities] = Capabilities(
        keeps_requests=True,
        weight_modes=("shm", "xccl", "disk"),
        seeds=True,
        stamps=True,
        named_adapters=True,
        refusals={"use_beam_search": "a beam has no log-probs of sampling, so no backend offers it; set it to false"},
    )
    endpoints: ClassVar[tuple[str, ...]] = (
        "/health",
        "/inference/v1/generate",
        "/abort_requests",
        "/pause",
        "/resume",
        "/collective_rpc",
        "/reset_prefix_cache",
        "/update_weight_version",
    )

    def health(self) -> ServerCall:
        """Answers 200 while paused, and while the weights are on their way, too."""
        return ServerCall("GET", "/health")

    def check(self, gconfig: GenerationHyperparameters) -> None:
        """Refuse values that vLLM would change or reject.

        Raises:
            InvalidRequestError: names the setting.
        """
        greedy = gconfig.greedy or gconfig.temperature == 0
        if not greedy and not MIN_TEMPERATURE <= gconfig.temperature <= MAX_TEMPERATURE:
            raise InvalidRequestError(
                f"gconfig.temperature={gconfig.temperature}: vLLM samples at {MIN_TEMPERATURE} to {MAX_TEMPERATURE}; "
                "0 is greedy, and the backends native and sglang take any"
            )

    def generate(self, req: ModelRequest, gconfig: GenerationHyperparameters, seed: int | None) -> ServerCall:
        """Token ids in, token ids out; text is decoded by the server only to find stop strings."""
        self.check(gconfig)
        if req.image_data or req.vision_msg_vllm:
            raise InvalidRequestError("image_data: only text models are served")
        body = {
            "request_id": req.rid,
            "token_ids": req.input_ids,
            "sampling_params": _sampling_params(gconfig, seed),
            "stream": False,
        }
        return ServerCall("POST", "/inference/v1/generate", body)

    def parse(self, reply: Any) -> GenerationPart:
        """One choice; an aborted request that had not begun has no log-probs at all."""
        choice = _only_choice(reply)
        tokens, reason = choice.get("token_ids"), choice.get("finish_reason")
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise ReplyError(f"vLLM: choices[0].token_ids is {_brief(tokens)}, not a list of integers")
        if reason not in _STOP_REASONS:
            raise ReplyError(f"vLLM: choices[0].finish_reason is {_brief(reason)}, not one of {sorted(_STOP_REASONS)}")
        spans = choice.get("weight_versions")
        return GenerationPart(tokens, _logprobs(choice, tokens), _STOP_REASONS[reason], _versions(spans, len(tokens)))

    def abort(self, rid: str) -> ServerCall:
        """The engine's name of a request has a prefix of its route."""
        return ServerCall("POST", "/abort_requests", {"request_ids": [f"generate-tokens-{rid}"]})

    def pause(self, keep: bool) -> list[ServerCall]:
        """Kept requests lose their cache, so that they are computed again under the new weights."""
        query = urlencode({"mode": "keep" if keep else "abort", "clear_cache": "true"})
        return [ServerCall("POST", f"/pause?{query}")]

    def resume(self) -> list[ServerCall]:
        return [ServerCall("POST", "/resume")]

    def join_group(self, group: WeightGroup) -> list[ServerCall]:
        """Every worker joins, as the rank of the group plus its own."""
        names = ("name", "host", "port", "rank", "world_size", "backend", "stage", "timeout_s")
        return [self._rpc("areal_join", group.timeout_s, group={name: getattr(group, name) for name in names})]

    def leave_group(self, group: WeightGroup) -> list[ServerCall]:
        return [self._rpc("areal_leave", group.timeout_s, name=group.name)]

    def stage(self, source: WeightSource, version: int) -> list[ServerCall]:
        """All of a version's tensors reach every worker, or the old weights serve on."""
        if isinstance(source, XcclSource):
            buckets = [[[spec.name, list(spec.shape), spec.dtype] for spec in bucket] for bucket in source.buckets]
            name, limit_s = source.group.name, source.group.timeout_s
            return [self._rpc("areal_stage_xccl", limit_s, version=version, group=name, buckets=buckets)]
        if isinstance(source, DiskSource):
            return [self._rpc("areal_stage_disk", version=version, path=source.path)]
        return [self._rpc("areal_stage_shm", version=version, **_manifest_wire(source))]

    def records(self, replies: Sequence[Any]) -> list[list[ParamRecord]] | None:
        """One list per worker, whatever the number of calls."""
        ranks: list[list[ParamRecord]] = []
        for reply in replies:
            results = _results(reply)
            ranks = ranks or [[] for _ in results]
            for rank, result in zip(ranks, results, strict=True):
                rank += _records(result)
        return ranks

    def commit(self, version: int) -> list[ServerCall]:
        """Reload, drop every cached prefix, and only then stamp the version."""
        return [
            self._rpc("areal_commit", version=version),
            ServerCall("POST", "/reset_prefix_cache?reset_running_requests=true"),
            *self.stamp(version),
        ]

    def discard(self) -> list[ServerCall]:
        return [self._rpc("areal_discard")]

    def load_adapter(self, name: str, path: str) -> list[ServerCall]:
        """Needs ``--enable-lora``. Cached prefixes are kept apart by adapter.

        Without ``load_inplace``, which would have vLLM read the directory again at every step.
        """
        body = {"lora_name": name, "lora_path": path}
        return [*self.unload_adapter(name), ServerCall("POST", "/v1/load_lora_adapter", body, once=True)]

    def unload_adapter(self, name: str) -> list[ServerCall]:
        unknown = f"{name}' cannot be found"
        return [ServerCall("POST", "/v1/unload_lora_adapter", {"lora_name": name}, once=True, harmless=unknown)]

    def with_adapter(self, call: ServerCall, name: str) -> ServerCall:
        return dataclasses.replace(call, body={**(call.body or {}), "model": name})

    def stamp(self, version: int) -> list[ServerCall]:
        """Name the version of the tokens that follow; a server that was just started calls its own ``default``."""
        return [ServerCall("POST", "/update_weight_version", {"new_version": str(version)})]

    def confirm(self, replies: Sequence[Any]) -> None:
        """Check the replies to calls about weights, which are 200 even if a worker failed.

        Raises:
            WeightSyncError: says what failed.
        """
        for reply in replies:
            if isinstance(reply, Mapping) and "results" in reply:
                _results(reply)
            elif isinstance(reply, Mapping) and reply.get("success") is False:
                raise WeightSyncError(f"vLLM could not drop its prefix cache or stamp the version: {_brief(reply)}")

    def _rpc(self, method: str, limit_s: float | None = None, **arguments: Any) -> ServerCall:
        """One call of every worker of the server; sent once, for the workers change with it."""
        body: dict[str, Any] = {"method": method, "kwargs": arguments}
        if limit_s is None:
            return ServerCall("POST", "/collective_rpc", body, once=True)
        return ServerCall("POST", "/collective_rpc", body, timeout_s=limit_s + _RPC_SLACK_S, once=True)


class RemotevLLMEngine(RemoteInfEngine):
    """The inference engine over vLLM servers; see :class:`RemoteInfEngine`."""

    backend_name: ClassVar[str] = "vllm"

    def __init__(self, config: InferenceEngineConfig, **options: Any) -> None:
        super().__init__(config, VLLMProtocol(server_token()), **options)


def _sampling_params(gconfig: GenerationHyperparameters, seed: int | None) -> dict[str, Any]:
    """All that vLLM reads, so that no default of the server or of the model's directory takes part."""
    greedy = gconfig.greedy or gconfig.temperature == 0
    least = min(gconfig.min_new_tokens, gconfig.max_new_tokens)
    stop = list(gconfig.stop or ())
    if gconfig.ignore_eos and least:  # vLLM's min_tokens would ban EOS; the client ends the text at a stop string
        least, stop = 0, []
    return {
        "n": 1,
        "max_tokens": gconfig.max_new_tokens,
        "min_tokens": least,
        "temperature": 0.0 if greedy else gconfig.temperature,
        "top_p": 1.0 if greedy else gconfig.top_p,
        "top_k": 0 if greedy or gconfig.top_k >= _TOP_K_OFF else gconfig.top_k,
        "frequency_penalty": gconfig.frequency_penalty,
        "seed": None if seed is None else seed & _SEED_MASK,
        "stop": stop,
        "stop_token_ids": [] if gconfig.ignore_eos else list(gconfig.stop_token_ids),
        "ignore_eos": gconfig.ignore_eos,
        "skip_special_tokens": False,  # stop strings are looked for in the whole text
        "detokenize": bool(stop),
        "logprobs": 0,  # the sampled token's alone
    }


def _only_choice(reply: Any) -> Mapping[str, Any]:
    choices = reply.get("choices") if isinstance(reply, Mapping) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], Mapping):
        raise ReplyError(f"vLLM: expected an object with one entry in choices, got {_brief(reply)}")
    return choices[0]


def _logprobs(choice: Mapping[str, Any], tokens: list[int]) -> list[float]:
    found = choice.get("logprobs")
    content = found.get("content") if isinstance(found, Mapping) else found
    if content is None and not tokens:
        return []
    if not isinstance(content, list) or len(content) != len(tokens):
        raise ReplyError(f"vLLM: {len(tokens)} tokens came with logprobs {_brief(found)}")
    return [_logprob(token, entry) for token, entry in zip(tokens, content, strict=True)]


def _logprob(token: int, entry: Any) -> float:
    value = entry.get("logprob") if isinstance(entry, Mapping) else None
    if not isinstance(value, int | float) or entry.get("token_id") != token:
        raise ReplyError(f"vLLM: the log-prob of token {token} is {_brief(entry)}")
    if not math.isfinite(value) or value <= _NO_LOGPROB:  # how vLLM writes "none" and "not a number"
        raise ReplyError(f"vLLM: the log-prob of token {token} is {value}; nothing finite was computed")
    return float(value)


def _versions(spans: Any, count: int) -> list[int] | None:
    """One version per token; None where the server was never told one."""
    if not spans:
        return None
    try:
        names = [span["version"] for span in spans]
        if all(name == _FIRST_VERSION for name in names):
            return None
        versions = [int(span["version"]) for span in spans for _ in range(span["start"], span["end"])]
        edges = [0, *(span["end"] for span in spans)]
        if len(versions) == count and edges[:-1] == [span["start"] for span in spans]:
            return versions
    except (KeyError, TypeError, ValueError):
        pass
    raise ReplyError(f"vLLM: weight_versions {_brief(spans)} do not give each of {count} tokens a known version")


def _manifest_wire(manifest: WeightManifest) -> dict[str, Any]:
    """What a reader on the same host needs of a manifest, as plain JSON."""
    params = [{"name": p.name, "shape": list(p.shape), "dtype": p.dtype, "offset": p.offset} for p in manifest.params]
    return {"pid": manifest.pid, "fd": manifest.fd, "size_bytes": manifest.size_bytes, "params": params}


def _results(reply: Any) -> list[Mapping[str, Any]]:
    """The workers' answers of a collective call, none of which failed."""
    results = reply.get("results") if isinstance(reply, Mapping) else None
    if not results or not all(isinstance(result, Mapping) for result in results):
        raise WeightSyncError(f"vLLM: expected a list of objects in results, got {_brief(reply)}")
    for result in results:
        if "error" in result:
            raise WeightSyncError(f"vLLM: {result['error']}")
    return list(results)


def _records(result: Mapping[str, Any]) -> list[ParamRecord]:
    try:
        return [ParamRecord(name, tuple(shape), dtype, total) for name, shape, dtype, total in result["records"]]
    except (KeyError, TypeError, ValueError) as exc:
        raise WeightSyncError(f"vLLM: a worker's records cannot be read ({exc}): {_brief(result)}") from exc


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]} ..."
