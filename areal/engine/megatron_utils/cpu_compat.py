"""Lets megatron-core run on a CPU: a context that stands in for the CUDA functions which it calls without asking.

In: nothing. Out: while it is entered, ``torch.cuda.current_device()`` is the CPU, streams are always done, CUDA's
random state is the CPU's, and ``device="cuda"`` in a call of torch means the CPU. Entered by ``device.py`` in the
thread that runs the engine (a function mode holds for its thread), and never imported where there is a GPU.

Substitutes are put in place once, by whoever enters first, and taken away by the last one who leaves; so engines in
several threads can use them. A process with a GPU never sees them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import megatron.core.tensor_parallel.mappings as mappings
import megatron.core.tensor_parallel.random as random_module
import megatron.core.transformer.moe.token_dispatcher as token_dispatcher
import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from areal.utils.errors import EngineError

__all__ = ["cpu_compat", "tensor_types_of_cuda"]

_CPU = torch.device("cpu")
_ABSENT = object()
_gather, _scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim


class _Stream:
    """A stream whose work is done when a call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return self

    def synchronize(self) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0


class _CudaMeansCpu(TorchFunctionMode):
    """Reads ``device="cuda"`` as the CPU, ``Tensor.cuda()`` as the tensor itself, and pins no memory."""

    def __init__(self) -> None:
        super().__init__()
        self.cuda_types = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.record_stream:
            return None
        if func is Tensor.type and self.cuda_types and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if kwargs:
            if _is_cuda(kwargs.get("device")):
                kwargs = {**kwargs, "device": _CPU}
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
        if func is Tensor.to:
            args = tuple(_CPU if _is_cuda(value) else value for value in args)
        return func(*args, **(kwargs or {}))


_local = threading.local()
_lock = threading.Lock()
_users = 0
_originals: list[tuple[Any, str, Any]] = []


@contextlib.contextmanager
def cpu_compat() -> Iterator[None]:
    """Context in which this thread can call megatron-core without a GPU; may be nested.

    Raises:
        EngineError: there is a GPU, which must not be hidden.
    """
    if getattr(_local, "mode", None) is not None:
        yield
        return
    if torch.cuda.is_available():
        raise EngineError("cpu_compat: this process has a GPU, whose functions must not be replaced")
    _install()
    try:
        with _CudaMeansCpu() as mode:
            _local.mode = mode
            try:
                yield
            finally:
                _local.mode = None
    finally:
        _remove()


@contextlib.contextmanager
def tensor_types_of_cuda() -> Iterator[None]:
    """Context, inside :func:`cpu_compat`, in which ``Tensor.type()`` names a CUDA type: optimizers sort by it."""
    _local.mode.cuda_types = True
    try:
        yield
    finally:
        _local.mode.cuda_types = False


def _is_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _cpu_rng_state(*args: Any, **kwargs: Any) -> Tensor:
    return torch.get_rng_state()


def _set_cpu_rng_state(state: Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(state)


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def _move_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Megatron's own function leaves a CPU tensor as it is, also where its caller wants an array."""
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


def _gather_shares(
    input_: Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False
) -> Tensor:
    """Megatron's gathering of shares; gloo gathers equal ones only."""
    if output_split_sizes is None or group.size() == 1:
        return _gather(input_, group, output_split_sizes, use_global_buffer)
    longest = max(output_split_sizes)
    whole = input_.new_empty(longest * group.size(), *input_.shape[1:])
    dist.all_gather_single(whole, _padded(input_, longest), group=group)
    shares = zip(whole.split(longest), output_split_sizes, strict=True)
    return torch.cat([share[:size] for share, size in shares])


def _scatter_shares(
    input_: Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False
) -> Tensor:
    """Megatron's sum of all ranks' shares; gloo scatters equal ones only."""
    if input_split_sizes is None or group.size() == 1:
        return _scatter(input_, group, input_split_sizes, use_global_buffer)
    longest = max(input_split_sizes)
    whole = torch.cat([_padded(share, longest) for share in input_.split(input_split_sizes)])
    own = input_.new_empty(longest, *input_.shape[1:])
    dist.reduce_scatter_single(own, whole, group=group)
    return own[: input_split_sizes[group.rank()]]


def _padded(rows: Tensor, length: int) -> Tensor:
    return torch.cat([rows, rows.new_zeros(length - rows.shape[0], *rows.shape[1:])])


def _substitutes() -> list[tuple[Any, str, Any]]:
    stream = _Stream()
    functions: dict[str, Callable[..., Any]] = {
        "current_device": lambda: _CPU,
        "synchronize": _nothing,
        "empty_cache": _nothing,
        "manual_seed": _seed,
        "get_rng_state": _cpu_rng_state,
        "set_rng_state": _set_cpu_rng_state,
        "Stream": _Stream,
        "current_stream": lambda *args: stream,
        "default_stream": lambda *args: stream,
        "stream": lambda *args: contextlib.nullcontext(),
    }
    return [
        *((torch.cuda, name, function) for name, function in functions.items()),
        (random_module, "_get_cuda_rng_state", _cpu_rng_state),
        (random_module, "_set_cuda_rng_state", _set_cpu_rng_state),
        (mappings, "_gather_along_first_dim", _gather_shares),
        (mappings, "_reduce_scatter_along_first_dim", _scatter_shares),
        (token_dispatcher, "maybe_move_tensor_to_cpu", _move_to_cpu),
    ]


def _install() -> None:
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            for owner, name, value in _substitutes():
                _originals.append((owner, name, getattr(owner, name, _ABSENT)))
                setattr(owner, name, value)


def _remove() -> None:
    global _users
    with _lock:
        _users -= 1
        if _users == 0:
            while _originals:
                owner, name, value = _originals.pop()
                if value is _ABSENT:
                    delattr(owner, name)
                else:
                    setattr(owner, name, value)
