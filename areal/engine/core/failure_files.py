"""The files of a captured step, and how its parts are written so that another process can make them again.

Used by ``engine/core/failure_capture.py`` (writes) and ``engine/core/replay.py`` (reads).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from areal.api.config.convert import to_plain
from areal.api.config.fields import is_default
from areal.utils.batch import PackedBatch
from areal.utils.dynamic_import import import_from_string

FORMAT_VERSION = 1
FAILURE_FILE, CONFIG_FILE, MODEL_DIR, STATE_DIR = "failure.json", "config.json", "model", "state"


@runtime_checkable
class ReplayableLoss(Protocol):
    """A loss object (rather than a function) that can be made again in another process."""

    def replay_arguments(self) -> dict[str, Any]:
        """JSON values that ``for_replay`` needs besides the engine's config; ``role`` names the user."""
        ...

    @classmethod
    def for_replay(cls, config: Any, arguments: dict[str, Any]) -> Callable[..., Tensor]:
        """The same loss, with statistics going nowhere."""
        ...


def rank_file(rank: int) -> str:
    """Name of the file with the batch of one rank."""
    return f"rank_{rank}.pt"


def describe_callable(function: Any) -> dict[str, Any]:
    """Import path (null when it has none) and, for a loss object, the arguments to make it again."""
    if isinstance(function, ReplayableLoss):
        return {"import": type_path(type(function)), "arguments": function.replay_arguments()}
    path = f"{getattr(function, '__module__', None)}:{getattr(function, '__qualname__', None)}"
    try:
        found = import_from_string(path)
    except (ImportError, AttributeError, ValueError):
        found = None
    if found is not function or path.startswith("__main__"):
        return {"import": None, "name": path}
    return {"import": path}


def type_path(cls: type) -> str:
    """``package.module:Name`` of a class."""
    return f"{cls.__module__}:{cls.__qualname__}"


def written_settings(config: Any) -> dict[str, Any]:
    """``config`` as JSON data without secrets, and without an attention that nobody chose: each device has its own."""
    settings: dict[str, Any] = to_plain(config, mask_secrets=True)
    for spec in dataclasses.fields(config):
        if not spec.init or (spec.name == "attn_impl" and is_default(config.attn_impl)):
            del settings[spec.name]
    return settings


def encode_batch(source: Any) -> dict[str, Any]:
    """A train batch as plain containers of tensors on the host; :func:`decode_batch` is the way back."""
    if isinstance(source, PackedBatch):
        fields = ("tokens", "sequences", "cu_seqlens", "lens", "lists", "scalars")
        return {"form": "packed", "value": _to_host({name: getattr(source, name) for name in fields})}
    return {"form": "plain", "value": _to_host(source)}


def decode_batch(saved: dict[str, Any]) -> Any:
    """What :func:`encode_batch` was given, on the host."""
    return PackedBatch(**saved["value"]) if saved["form"] == "packed" else saved["value"]


def _to_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()  # a view would be saved with its whole storage
    if isinstance(value, dict):
        return {key: _to_host(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_to_host(item) for item in value)
    return value
