"""Plain data as JSON and back, keeping what JSON loses: tuples, bytes, tensors and keys that are no strings.

Used for the state files of recover points, which must never be pickled. Encoding is idempotent.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from areal.utils.errors import DataError

_TAG = "__areal__"


def encode(value: Any) -> Any:
    """A value that ``json.dumps`` takes.

    Raises:
        DataError: something in it is not plain data (numbers, text, bytes, tensors and containers of them).
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, tuple):
        return {_TAG: "tuple", "items": [encode(item) for item in value]}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and _TAG not in value:
            return {key: encode(item) for key, item in value.items()}
        if value.get(_TAG) is not None:
            return dict(value)  # encoded already
        return {_TAG: "dict", "items": [[encode(key), encode(item)] for key, item in value.items()]}
    if isinstance(value, bytes):
        return {_TAG: "bytes", "data": base64.b64encode(value).decode()}
    import torch

    if isinstance(value, torch.Tensor):
        data = base64.b64encode(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        dtype = str(value.dtype).removeprefix("torch.")
        return {_TAG: "tensor", "dtype": dtype, "shape": list(value.shape), "data": data.decode()}
    raise DataError(f"only plain data can be written, not {type(value).__name__}: {value!r:.80}")


def decode(value: Any) -> Any:
    """Inverse of ``encode``.

    Raises:
        DataError: the value was encoded by something else.
    """
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag = value.get(_TAG)
    if tag is None:
        return {key: decode(item) for key, item in value.items()}
    if tag == "tuple":
        return tuple(decode(item) for item in value["items"])
    if tag == "dict":
        return {decode(key): decode(item) for key, item in value["items"]}
    if tag == "bytes":
        return base64.b64decode(value["data"])
    if tag == "tensor":
        import torch

        raw = torch.frombuffer(bytearray(base64.b64decode(value["data"])), dtype=torch.uint8)
        return raw.view(getattr(torch, value["dtype"])).reshape(value["shape"])
    raise DataError(f"unknown value kind {tag!r}: written by a later version?")
