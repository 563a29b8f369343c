"""Values of torch, numpy, PIL and transformers in messages; each package is imported only when such a value occurs.

Called by ``pack``, ``unpack`` and the tensor stream. Tensors travel as the raw bytes of their elements, C-contiguous.
"""

from __future__ import annotations

import ctypes
import io
import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from areal.infra.rpc import tokenizers
from areal.infra.rpc.errors import WireError

if TYPE_CHECKING:
    import torch

AddBuffer = Callable[[memoryview], int]
GetBuffer = Callable[[Any], memoryview]

_NUMPY_KINDS = "biufcSUmM"
_PNG_MODES = ("1", "L", "LA", "I", "I;16", "P", "RGB", "RGBA")
_ELEMENTS = ("float", "bfloat", "int", "uint", "complex", "bool")  # not the quantized ones
_MAX_DIMS = 64
_HUGE_PAGE = 2 << 20
_HUGE_FROM_BYTES = 8 << 20
_MADV_HUGEPAGE = 14


def is_tensor(value: Any) -> bool:
    """Whether ``value`` is a torch tensor, without importing torch."""
    kind = _loaded("torch", "Tensor")
    return kind is not None and isinstance(value, kind)


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a torch type, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """Inverse of :func:`dtype_name`.

    Raises:
        WireError: there is no such type.
    """
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise WireError(f"there is no torch type {name!r}")
    return dtype


def plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements as a contiguous dense CPU tensor without gradient; shares memory where it can.

    Raises:
        WireError: it has no such form (sparse, quantized, meta, a shard of a distributed tensor).
    """
    import torch

    dense = tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_quantized
    if not dense or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise WireError(
            f"a {type(tensor).__name__} of layout {tensor.layout} on {tensor.device} cannot be sent; make it a plain "
            "dense tensor first (full_tensor(), to_dense(), dequantize())"
        )
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    import torch

    if tensor.numel() == 0:
        return memoryview(b"")
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)


def tensor_bytes(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], memoryview]:
    """Type name, shape and bytes of a tensor."""
    plain = plain_tensor(tensor)
    return dtype_name(plain.dtype), tuple(plain.shape), byte_view(plain)


def tensor_size(dtype: str, shape: Any) -> int:
    """Bytes of a tensor of that type and shape.

    Raises:
        WireError: the type does not exist or the shape is none.
    """
    bad = not isinstance(shape, list | tuple) or len(shape) > _MAX_DIMS
    if bad or any(type(extent) is not int or extent < 0 for extent in shape):
        raise WireError(f"{shape!r} is no shape of a tensor")
    if not dtype.startswith(_ELEMENTS):
        raise WireError(f"a tensor of type {dtype!r} cannot be sent")
    return int(math.prod(shape)) * torch_dtype(dtype).itemsize


def empty_tensor(dtype: str, shape: Any) -> tuple[torch.Tensor, memoryview]:
    """A new tensor and its memory, to be filled by a socket."""
    import torch

    tensor = torch.empty(tuple(shape), dtype=torch_dtype(dtype))
    if tensor.nbytes >= _HUGE_FROM_BYTES:
        _advise_huge_pages(tensor.data_ptr(), tensor.nbytes)
    return tensor, byte_view(tensor)


def _advise_huge_pages(start: int, size: int) -> None:
    """Ask for large pages: otherwise the first write of each 4 KiB takes as long as receiving it."""
    if sys.platform != "linux":
        return
    first = (start + _HUGE_PAGE - 1) & -_HUGE_PAGE
    length = ((start + size) & -_HUGE_PAGE) - first
    ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), _MADV_HUGEPAGE)  # only advice


def tensor_from(view: memoryview, dtype: str, shape: Any) -> torch.Tensor:
    """A tensor of these bytes; on the same memory when it is writable."""
    import torch

    if tensor_size(dtype, shape) != view.nbytes:
        raise WireError(f"a {dtype} tensor of shape {shape} does not have {view.nbytes} bytes")
    kind = torch_dtype(dtype)
    if view.nbytes == 0:
        return torch.empty(tuple(shape), dtype=kind)
    raw = torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)
    flat = raw.ne(0) if kind == torch.bool else raw.view(kind)  # other bytes than 0 and 1 are no booleans
    return flat.reshape(tuple(shape))


def pack(value: Any, add: AddBuffer) -> dict[str, Any] | None:
    """The node of a value of these packages; None for any other."""
    for module, name, pack_kind in _PACK:
        kind = _loaded(module, name)
        if kind is not None and isinstance(value, kind):
            return pack_kind(value, add)
    return tokenizers.pack(value, add)


def _loaded(module: str, name: str) -> Any:
    """A class of a package that is imported already; None if it is not, or not yet in another thread."""
    return getattr(sys.modules.get(module), name, None)


def _pack_numpy(value: Any, add: AddBuffer) -> dict[str, Any]:
    import numpy

    if value.dtype.kind not in _NUMPY_KINDS:
        raise WireError(f"a numpy array of type {value.dtype} cannot be sent; make it numbers, or a list")
    array = numpy.ascontiguousarray(value)
    view = memoryview(b"") if array.nbytes == 0 else memoryview(array.reshape(-1).view(numpy.uint8).data)
    if isinstance(value, numpy.generic):
        return {"N": [array.dtype.str, bytes(view)]}
    return {"n": [array.dtype.str, value.shape, add(view)]}


def _unpack_array(content: Any, get: GetBuffer) -> Any:
    dtype, shape, number = content
    return _numpy_from(get(number), dtype, shape)


def _unpack_scalar(content: Any, get: GetBuffer) -> Any:
    dtype, raw = content
    return _numpy_from(memoryview(raw), dtype, ())[()]


def _numpy_from(view: memoryview, dtype: Any, shape: Any) -> Any:
    import numpy

    if not isinstance(dtype, str) or len(dtype) > 32:
        raise WireError(f"{dtype!r} is no numpy type")
    kind = numpy.dtype(dtype)
    if kind.kind not in _NUMPY_KINDS or math.prod(shape) * kind.itemsize != view.nbytes:
        raise WireError(f"a numpy array of type {dtype} and shape {shape} does not have {view.nbytes} bytes")
    if view.nbytes == 0:
        return numpy.empty(tuple(shape), kind)
    raw = numpy.frombuffer(bytearray(view) if view.readonly else view, numpy.uint8)
    flat = raw != 0 if kind.kind == "b" else raw.view(kind)
    return flat.reshape(tuple(shape))


def _pack_dtype(value: Any, add: AddBuffer) -> dict[str, Any]:
    return {"y": dtype_name(value)}


def _pack_device(value: Any, add: AddBuffer) -> dict[str, Any]:
    return {"D": str(value)}


def _unpack_dtype(content: Any, get: GetBuffer) -> Any:
    return torch_dtype(content)


def _unpack_device(content: Any, get: GetBuffer) -> Any:
    import torch

    return torch.device(content)


def _pack_image(value: Any, add: AddBuffer) -> dict[str, Any]:
    if value.mode not in _PNG_MODES:
        raise WireError(f"an image of mode {value.mode} cannot be sent as PNG; use image.convert('RGB')")
    file = io.BytesIO()
    value.save(file, format="PNG", compress_level=1)
    return {"P": [add(memoryview(file.getvalue()))]}


def _unpack_image(content: Any, get: GetBuffer) -> Any:
    import warnings

    from PIL import Image

    (number,) = content
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        image = Image.open(io.BytesIO(get(number)), formats=["PNG"])
        image.load()
    return image


_PACK: tuple[tuple[str, str, Callable[[Any, AddBuffer], dict[str, Any]]], ...] = (
    ("numpy", "ndarray", _pack_numpy),
    ("numpy", "generic", _pack_numpy),
    ("torch", "dtype", _pack_dtype),
    ("torch", "device", _pack_device),
    ("PIL.Image", "Image", _pack_image),
)
UNPACK: dict[str, Callable[[Any, GetBuffer], Any]] = {
    "n": _unpack_array,
    "N": _unpack_scalar,
    "y": _unpack_dtype,
    "D": _unpack_device,
    "P": _unpack_image,
    "K": tokenizers.unpack,
}
