"""Native servers: how the one remote engine talks to them.

In: requests and weight sources. Out: calls of ``python -m areal.engine.native.server``. Used by ``inference.remote``
where ``rollout.backend`` is native and servers are given by address.

- Log-probs are the model's own at the temperature, over the whole vocabulary. Greedy ones are at temperature 1.
- Weights are received into a spare buffer while generation goes on; requests stay in place, and every token carries
  the version that drew it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from areal.engine.core.weight_sources import DiskSource, WeightGroup, XcclSource
from areal.engine.core.weight_sync import ParamRecord
from areal.engine.inference.discovery import server_token
from areal.engine.inference.protocol import Capabilities, GenerationPart, ServerCall, ServerProtocol
from areal.engine.inference.remote_engine import RemoteInfEngine
from areal.engine.native.wire import read_records, write_manifest
from areal.engine.sglang_remote import generation_call, group_body, read_generation
from areal.utils.errors import WeightSyncError

if TYPE_CHECKING:
    from areal.api.cli_args import InferenceEngineConfig
    from areal.api.config.rollout import GenerationHyperparameters
    from areal.api.io_struct import ModelRequest
    from areal.engine.core.weight_sources import WeightSource


class NativeProtocol(ServerProtocol):
    """Requests and replies of the native server; ``token`` is that of its ``--token-file``."""

    name: ClassVar[str] = "native"
    capabilities: ClassVar[Capabilities] = Capabilities(
        keeps_requests=True,
        weight_modes=("shm", "xccl", "disk"),
        seeds=True,
        stamps=True,
        refusals={"use_beam_search": "a beam has no log-probs of sampling, so no backend offers it; set it to false"},
    )
    endpoints: ClassVar[tuple[str, ...]] = ()

    def health(self) -> ServerCall:
        """Answers while paused, too."""
        return ServerCall("GET", "/health")

    def generate(self, req: ModelRequest, gconfig: GenerationHyperparameters, seed: int | None) -> ServerCall:
        """Token ids in, token ids out."""
        return generation_call(req, gconfig, seed)

    def parse(self, reply: Any) -> GenerationPart:
        """Versions are per token."""
        return read_generation(reply, "the native server")

    def abort(self, rid: str) -> ServerCall:
        return ServerCall("POST", "/abort_request", {"rid": rid})

    def pause(self, keep: bool) -> list[ServerCall]:
        return [ServerCall("POST", "/pause_generation", {"mode": "keep" if keep else "abort"})]

    def resume(self) -> list[ServerCall]:
        return [ServerCall("POST", "/continue_generation", {})]

    def join_group(self, group: WeightGroup) -> list[ServerCall]:
        body = {
            **group_body(group),
            "torch_helper": group.torch_helper,
            "stage": group.stage,
            "timeout_s": group.timeout_s,
        }
        return [ServerCall("POST", "/init_weights_update_group", body, group.timeout_s, once=True)]

    def leave_group(self, group: WeightGroup) -> list[ServerCall]:
        body = {"group_name": group.name}
        return [ServerCall("POST", "/destroy_weights_update_group", body, group.timeout_s, once=True)]

    def stage(self, source: WeightSource, version: int) -> list[ServerCall]:
        """Bring a version into the spare buffer."""
        body: dict[str, Any] = {"weight_version": version, "commit": False}
        if isinstance(source, XcclSource):
            specs = [spec for bucket in source.buckets for spec in bucket]
            body |= {
                "names": [spec.name for spec in specs],
                "dtypes": [spec.dtype for spec in specs],
                "shapes": [list(spec.shape) for spec in specs],
                "bucket_lengths": [len(bucket) for bucket in source.buckets],
                "group_name": source.group.name,
            }
            limit_s = source.group.timeout_s
            return [ServerCall("POST", "/update_weights_from_distributed", body, limit_s, once=True)]
        if isinstance(source, DiskSource):
            return [ServerCall("POST", "/update_weights_from_disk", {"model_path": source.path, **body})]
        return [ServerCall("POST", "/update_weights_from_shm", {**write_manifest(source), **body})]

    def records(self, replies: Sequence[Any]) -> list[list[ParamRecord]] | None:
        """Of every tensor, from the last reply."""
        last = replies[-1] if replies else None
        try:
            return read_records(last["records"])  # type: ignore[index]
        except (TypeError, KeyError) as exc:
            raise WeightSyncError(f"the native server's reply has no records of the weights: {last!r:.300}") from exc

    def commit(self, version: int) -> list[ServerCall]:
        """Exchange the buffers between two decode steps; no cache outlives that."""
        return [ServerCall("POST", "/commit_weights", {"weight_version": version}, once=True)]

    def discard(self) -> list[ServerCall]:
        return [ServerCall("POST", "/discard_weights", {})]

    def stamp(self, version: int) -> list[ServerCall]:
        return [ServerCall("POST", "/update_weight_version", {"new_version": version})]


class RemoteNativeEngine(RemoteInfEngine):
    """The inference engine over native servers; see :class:`RemoteInfEngine`."""

    backend_name: ClassVar[str] = "native"

    def __init__(self, config: InferenceEngineConfig, *, token: str | None = None, **options: Any) -> None:
        super().__init__(config, NativeProtocol(token or server_token()), **options)
