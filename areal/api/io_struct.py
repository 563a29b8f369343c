"""The small objects that cross borders: requests, responses, steps, weight updates.

Standard library only, so that configuration, clients and tools can import it without torch. Created by workflows,
engines and trainers; read by everyone.
"""

from __future__ import annotations

import copy
import getpass
import os
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from areal.api.config.rollout import GenerationHyperparameters

if TYPE_CHECKING:
    import subprocess

    from areal.api.alloc_mode import ModelAllocation

StopReason = Literal["length", "stop", "tool_calls", "abort"]

_IMAGE_PREFIXES = {"iVBOR": "image/png", "/9j/": "image/jpeg", "R0lGOD": "image/gif", "UklGR": "image/webp"}


@dataclass
class ModelRequest:
    """One generation request: prompt token ids in, one continuation out.

    ``seed`` fixes the sampling stream (64-bit); ``order`` is the admission order inside an engine, smaller first. Both
    are filled from the running episode when a workflow leaves them alone.
    """

    rid: str = field(default_factory=lambda: str(uuid.uuid4()))
    input_ids: list[int] = field(default_factory=list)
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    metadata: dict[str, Any] = field(default_factory=dict)
    tokenizer: Any = None
    image_data: list[str] | None = field(default_factory=list)
    processor: Any = None
    vision_msg_vllm: list[Any] | None = None
    seed: int | None = None
    order: tuple[int, ...] = ()

    def copy(self) -> ModelRequest:
        """Copy lists, dicts and ``gconfig`` one level deep; share tokenizer and processor."""
        duplicate = copy.copy(self)
        duplicate.input_ids = list(self.input_ids)
        duplicate.metadata = dict(self.metadata)
        duplicate.gconfig = self.gconfig.new()
        duplicate.image_data = None if self.image_data is None else list(self.image_data)
        duplicate.vision_msg_vllm = None if self.vision_msg_vllm is None else list(self.vision_msg_vllm)
        return duplicate


@dataclass
class ModelResponse:
    """One continuation, token by token.

    ``output_tokens``, ``output_logprobs`` (natural log, sampling temperature) and ``output_versions`` (weight version
    that drew the token) have equal length. ``latency`` and ``ttft`` are seconds; ``itl`` is seconds between tokens.
    """

    input_tokens: list[int] = field(default_factory=list)
    output_tokens: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    output_versions: list[int] = field(default_factory=list)
    stop_reason: StopReason = "stop"
    tokenizer: Any = None
    input_images: list[str] = field(default_factory=list)
    processor: Any = None
    latency: float = float("inf")
    ttft: float = float("inf")
    itl: list[float] = field(default_factory=list)
    routed_experts: Any = None

    @property
    def input_len(self) -> int:
        """Number of prompt tokens."""
        return len(self.input_tokens)

    @property
    def output_len(self) -> int:
        """Number of generated tokens, the stop token included."""
        return len(self.output_tokens)

    def _stop_ids(self) -> set[int]:
        if self.tokenizer is None:
            raise ValueError("ModelResponse.tokenizer is None: set it to tell stop tokens from text")
        return {i for i in (self.tokenizer.eos_token_id, self.tokenizer.pad_token_id) if i is not None}

    @property
    def end_with_stop(self) -> bool:
        """Whether the last generated token is eos or pad. Raises ValueError without a tokenizer."""
        return bool(self.output_tokens) and self.output_tokens[-1] in self._stop_ids()

    @property
    def output_tokens_without_stop(self) -> list[int]:
        """Generated tokens without trailing eos/pad; unchanged when the reply was cut (length, abort)."""
        if self.stop_reason in ("length", "abort") or not self.output_tokens:
            return self.output_tokens
        stop_ids = self._stop_ids()
        end = len(self.output_tokens)
        while end and self.output_tokens[end - 1] in stop_ids:
            end -= 1
        if end == 0:
            raise ValueError("the reply holds nothing but stop tokens")
        return self.output_tokens[:end]


@dataclass
class FinetuneSpec:
    """Length of a run, known before it starts; ``max_steps`` (None: no limit) ends it early."""

    total_train_epochs: int
    dataset_size: int
    train_batch_size: int
    max_steps: int | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one pass over the data."""
        return self.dataset_size // self.train_batch_size

    @property
    def total_train_steps(self) -> int:
        """Optimizer steps of the whole run."""
        steps = self.total_train_epochs * self.steps_per_epoch
        return steps if self.max_steps is None else min(steps, self.max_steps)


@dataclass
class StepInfo:
    """Where a run stands; every number counts from 0."""

    epoch: int
    epoch_step: int
    global_step: int
    steps_per_epoch: int

    def next(self) -> StepInfo:
        """The step after this one; rolls over to the next epoch after its last step."""
        last = self.epoch_step == self.steps_per_epoch - 1
        return StepInfo(
            epoch=self.epoch + last,
            epoch_step=0 if last else self.epoch_step + 1,
            global_step=self.global_step + 1,
            steps_per_epoch=self.steps_per_epoch,
        )


@dataclass
class SaveLoadMeta:
    """What to save or load, where, and in which format (``hf`` to exchange, ``dcp`` to resume)."""

    path: str
    weight_format: str
    with_optim: bool
    tokenizer: Any = None
    processor: Any = None
    base_model_path: str | None = None
    naive_distributed: bool = False
    merged: bool = False  # hf of a model with adapters: the whole model with them merged in, not the adapter


@dataclass
class ParamSpec:
    """Name, shape and dtype (torch attribute name, such as ``bfloat16``) of one weight."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Bytes of the whole tensor."""
        import torch

        count = 1
        for extent in self.shape:
            count *= extent
        return count * int(getattr(torch, self.dtype).itemsize)


@dataclass
class RolloutStat:
    """Episodes by state."""

    accepted: int = 0
    enqueued: int = 0
    rejected: int = 0
    running: int = 0


@dataclass
class WeightUpdateMeta:
    """How one weight version travels from trainer to samplers."""

    type: Literal["inproc", "shm", "xccl", "disk", "awex"]
    path: str | None = None
    gen_allocation: ModelAllocation | None = None
    nccl_master_address: str | None = None
    nccl_master_port: int | None = None
    nccl_group_name: str | None = None
    weight_chunked_mem_mb: int = 1024
    use_lora: bool = False
    lora_name: str = ""
    lora_int_id: int = 0
    base_model_name: str = ""
    peft_config: dict[str, Any] = field(default_factory=dict)
    clear_checkpoint_after_load: bool = True
    version: int | None = None
    timeout_s: float | None = None  # of each step of the update; None: that of the engine that is asked

    def with_version(self, version: int) -> WeightUpdateMeta:
        """A copy for ``version`` (>= 0); a path ends in ``weight_update_v{version}``."""
        if version < 0:
            raise ValueError(f"version={version} must be >= 0")
        updated = copy.copy(self)
        updated.version = version
        if self.path is not None:
            updated.path = os.path.join(os.path.dirname(self.path), f"weight_update_v{version}")
        return updated

    @classmethod
    def from_disk(
        cls, experiment_name: str, trial_name: str, file_root: str, name: str = "default", **fields: Any
    ) -> WeightUpdateMeta:
        """Through a checkpoint directory under ``{file_root}/checkpoints/{user}/{experiment}/{trial}/{name}``."""
        root = os.path.join(file_root, "checkpoints", getpass.getuser(), experiment_name, trial_name, name)
        return cls(type="disk", path=os.path.join(root, "weight_update"), **fields)

    @classmethod
    def from_fsdp_xccl(cls, gen_allocation: ModelAllocation, **fields: Any) -> WeightUpdateMeta:
        """Through a collective between the trainer and the servers of ``gen_allocation``."""
        return cls(type="xccl", gen_allocation=gen_allocation, **fields)

    from_megatron_xccl = from_fsdp_xccl


def get_versioned_lora_name(name: str, version: int) -> str:
    """Adapter name under which a server offers version ``version``."""
    return f"{name}-v{version}"


@dataclass
class HttpRequest:
    """One call to an inference server."""

    endpoint: str
    payload: dict[str, Any]
    method: str = "POST"


@dataclass
class HttpGenerationResult:
    """A server's reply to one generation request, already parsed."""

    output_tokens: list[int]
    output_logprobs: list[float]
    stop_reason: StopReason
    routed_experts: Any = None


@dataclass
class WeightUpdateRequests:
    """Calls that make a server load a weight version, in order."""

    requests: list[HttpRequest]


@dataclass
class LocalInfServerInfo:
    """Address of a server started on this machine; ``process`` is None where it cannot be carried."""

    host: str
    port: int
    process: subprocess.Popen[bytes] | None = None


def detect_image_mime(image_b64: str) -> str:
    """MIME type of a base64 image, judged by its first bytes; JPEG when unknown."""
    for prefix, mime in _IMAGE_PREFIXES.items():
        if image_b64.startswith(prefix):
            return mime
    return "image/jpeg"
