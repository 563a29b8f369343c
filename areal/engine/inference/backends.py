"""Which class speaks to which kind of inference server; strings become classes here and nowhere else."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from areal.utils.dynamic_import import import_from_string
from areal.utils.errors import UnsupportedFeatureError

if TYPE_CHECKING:
    from areal.engine.inference.protocol import ServerProtocol

PROTOCOLS = {
    "native": "areal.engine.native_remote.NativeProtocol",
    "sglang": "areal.engine.sglang_remote.SGLangProtocol",
    "vllm": "areal.engine.vllm_remote.VLLMProtocol",
}


def protocol_class(backend: str) -> type[ServerProtocol]:
    """The protocol of ``backend``.

    Raises:
        UnsupportedFeatureError: names the backends that there are.
    """
    if backend not in PROTOCOLS:
        raise UnsupportedFeatureError(f"inference backend {backend!r} is not known; use {', '.join(PROTOCOLS)}")
    return cast("type[ServerProtocol]", import_from_string(PROTOCOLS[backend]))
