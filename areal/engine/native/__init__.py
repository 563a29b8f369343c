"""The embedded inference engine: continuous batching over Qwen2, Qwen3 and Llama checkpoints, on a CPU or one GPU.

Reading order: ``engine`` (threads, public calls) -> ``scheduler`` (which request does what in a step) -> ``model``
(the forward pass) -> ``kv_cache``, ``sampling``, ``weights``. ``requests`` holds what one request is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal.engine.native.engine import NativeEngine
    from areal.engine.native.requests import InvalidRequestError

__all__ = ["InvalidRequestError", "NativeEngine"]

_HOMES = {"NativeEngine": "areal.engine.native.engine", "InvalidRequestError": "areal.engine.native.requests"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
