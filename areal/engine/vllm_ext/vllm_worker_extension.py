"""Weight updates inside vLLM's workers, called over ``POST /collective_rpc`` by ``areal.engine.vllm_remote``.

In: where a version's weights are (shared memory of the trainer, a Hugging Face directory, or a collective group), as
plain JSON. Out, per worker: the record (name, shape, dtype, checksum) of every tensor it holds, or an ``error``. An
update has two steps: ``areal_stage_*`` brings *all* tensors here and checks them against the model while the old
weights serve on; ``areal_commit`` hands them to vLLM's reload, which must not fail half-way: it would leave a model
that is neither version.

Mixed into vLLM's worker class by ``--worker-extension-cls vllm_worker_extension.VLLMWorkerExtension``. It runs in
vLLM's environment, so it imports torch and the standard library, and this folder alone is on the ``PYTHONPATH``.
Tensors wait in host memory, mapped where they can be (one copy on the host), received ones in one copy per worker.
"""

from __future__ import annotations

import contextlib
import functools
import json
import mmap
import os
import re
import socket
import struct
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor

c10d: Any = torch.distributed  # its classes have no types
NamedTensor = tuple[str, Tensor]
Spec = tuple[str, list[int], str]
"""Name, shape and dtype (torch attribute name)."""

LOST, LOOK_S = "lost", 0.5
ALONE_BYTES = 32 << 20
"""Tensors below this size share broadcasts of at most this size."""
ALIGN_BYTES = 64
WORD_BYTES = 8
_SAFETENSORS_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
_EXIT_DELAY_S = 1.0
_GIVEN_UP = "the weight group was given up by a rank"
_COMPUTED = ("inv_freq", "cos_cached", "sin_cached", "masked_bias", "position_ids")
"""Buffers that old checkpoints hold; models compute them, so no trainer sends them and no reload needs them."""


def _answers(method: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Failures become an ``error`` in the reply: an exception of one worker would leave the others' replies unread."""

    @functools.wraps(method)
    def call(self: VLLMWorkerExtension, **arguments: Any) -> dict[str, Any]:
        try:
            return method(self, **arguments)
        except Exception as exc:  # noqa: BLE001 (one worker's failure is an answer like the others')
            traceback.print_exc()
            return {"error": f"worker {getattr(self, 'rank', '?')}, {method.__name__}: {type(exc).__name__}: {exc}"}

    return call


class VLLMWorkerExtension:
    """Mixed into a worker: ``rank``, ``device``, ``model_config``, ``model_runner`` and ``reload_weights`` are its own.

    It has no constructor, for the worker's would not call it; its state begins with the first call.
    """

    rank: int
    device: torch.device
    model_config: Any
    model_runner: Any
    reload_weights: Callable[..., None]

    @_answers
    def areal_join(self, *, group: dict[str, Any]) -> dict[str, Any]:
        """Join as rank ``group["rank"]`` plus this worker's own; returns when rank 0 has joined too.

        A group of the same stage is left: it is that of an update that failed.
        """
        groups = _state(self).groups
        for name in [name for name, old in groups.items() if old.stage == group["stage"]]:
            leave_group(groups, name)
        rank = group["rank"] + self.rank
        groups[group["name"]] = build_group(group, rank)
        return {"rank": rank}

    @_answers
    def areal_leave(self, *, name: str) -> dict[str, Any]:
        """Leave group ``name``; an unknown one is no error."""
        return {"left": leave_group(_state(self).groups, name)}

    @_answers
    def areal_stage_shm(
        self, *, version: int, pid: int, fd: int, size_bytes: int, params: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """Map the memory file ``fd`` of process ``pid`` on this host."""
        return _stage(self, version, lambda: shared_tensors(pid, fd, size_bytes, params))

    @_answers
    def areal_stage_disk(self, *, version: int, path: str) -> dict[str, Any]:
        """Map the safetensors files of a Hugging Face directory; it may be deleted, but not changed, afterwards."""
        return _stage(self, version, lambda: directory_tensors(path))

    @_answers
    def areal_stage_xccl(self, *, version: int, group: str, buckets: list[list[Spec]]) -> dict[str, Any]:
        """Receive every bucket from rank 0 of ``group``."""
        groups = _state(self).groups
        if group not in groups:
            raise RuntimeError(f"group {group} was not joined; joined: {sorted(groups)}")
        device = torch.device("cpu") if groups[group].backend == "gloo" else self.device
        try:
            with groups[group].watched():
                tensors = list(received_tensors(groups[group], buckets, device))
        except Exception as exc:
            groups[group].tell_others()
            traceback.clear_frames(exc.__traceback__)  # what they hold would keep connections open
            leave_group(groups, group)
            raise
        return _stage(self, version, lambda: tensors)

    @_answers
    def areal_commit(self, *, version: int) -> dict[str, Any]:
        """Put the staged weights in service; generation must be paused."""
        state = _state(self)
        if state.version != version or state.staged is None:
            raise RuntimeError(f"v{version} is not staged; staged: {state.version}")
        tensors, state.staged, state.version = state.staged, None, None
        try:
            self.reload_weights(weights_iterator=iter(tensors))
            repack_tied(self.model_runner.get_model())
        except BaseException as exc:
            # Layers may be of no version now. The reply gets out, then this server ends and is started again.
            threading.Timer(_EXIT_DELAY_S, os._exit, (1,)).start()
            raise RuntimeError(f"the reload of v{version} failed half-way, so this server ends: {exc}") from exc
        return {"version": version}

    @_answers
    def areal_discard(self) -> dict[str, Any]:
        """Forget what was staged."""
        state = _state(self)
        state.staged = state.version = None
        return {}


class _State:
    """What an extended worker holds between calls."""

    def __init__(self) -> None:
        self.groups: dict[str, Group] = {}
        self.staged: list[NamedTensor] | None = None
        self.version: int | None = None
        self.expected: dict[str, list[int]] | None = None


def _state(worker: Any) -> _State:
    state: _State | None = worker.__dict__.get("_areal_state")
    if state is None:
        state = worker._areal_state = _State()
    return state


def _stage(worker: Any, version: int, read: Callable[[], Iterable[NamedTensor]]) -> dict[str, Any]:
    state = _state(worker)
    state.staged = state.version = None
    tensors = list(read())
    if state.expected is None:
        state.expected = {name: shape for name, shape, _ in directory_specs(worker.model_config.model)}
    check_complete(tensors, state.expected, worker.model_runner.get_model(), worker.model_config.hf_config)
    records = [[name, list(t.shape), str(t.dtype).removeprefix("torch."), checksum(t)] for name, t in tensors]
    state.staged, state.version = tensors, version
    return {"records": records}


def checksum(tensor: Tensor) -> int:
    """As ``areal.engine.core.weight_sync.checksum``: the bytes as integers of 8 (zeros fill the last), summed."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if data.data_ptr() % WORD_BYTES or data.storage_offset() % WORD_BYTES:
        data = data.clone()
    whole = data.numel() // WORD_BYTES * WORD_BYTES
    total = int(data[:whole].view(torch.int64).sum())
    if whole < data.numel():
        total += int.from_bytes(bytes(data[whole:].tolist()).ljust(WORD_BYTES, b"\0"), "little")
    return (total + 2**63) % 2**64 - 2**63  # signed, modulo 2**64


def check_complete(tensors: list[NamedTensor], expected: dict[str, list[int]], model: Any, config: Any) -> None:
    """Compare with the checkpoint that this server was started from: vLLM's reload cannot refuse a wrong tensor.

    A checkpoint's tensor may be absent only where this model has no such module (speculative heads, another pipeline
    stage, a tied head), or where it is a buffer that the model computes. Without a checkpoint to compare with
    (``expected`` empty) everything passes.
    """
    if not expected:
        return
    given = {name: list(tensor.shape) for name, tensor in tensors}
    if len(given) != len(tensors):
        raise ValueError("a parameter was given twice")
    text_config = getattr(config, "get_text_config", lambda: config)()
    tied = bool(getattr(text_config, "tie_word_embeddings", False))
    for name, shape in given.items():
        if name not in expected:
            if tied and name.endswith("lm_head.weight"):
                continue
            raise ValueError(f"parameter {name} is not in the model's checkpoint; known are {sorted(expected)[:4]} ...")
        if shape != expected[name]:
            raise ValueError(f"parameter {name} has shape {shape}; the model's is {expected[name]}")
    names = [name for name, _ in model.named_parameters()]
    present, leaves = {_module_of(name) for name in names}, {name.rpartition(".")[2] for name in names}
    computed = set(_COMPUTED) - leaves
    for name in expected:
        if name not in given and _module_of(name) in present and name.rpartition(".")[2] not in computed:
            raise ValueError(f"parameter {name} of shape {expected[name]} is missing")


def _module_of(name: str) -> str:
    """A decoder layer's name, or that of the module which owns a parameter."""
    layer = re.match(r".*?\.layers\.\d+(?=\.)", name)
    return layer.group() if layer else name.rpartition(".")[0]


def shared_tensors(pid: int, fd: int, size_bytes: int, params: list[dict[str, Any]]) -> Iterator[NamedTensor]:
    """Views of a mapped memory file of another process."""
    opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY)
    try:
        if os.fstat(opened).st_size != size_bytes:
            raise RuntimeError(f"descriptor {fd} of process {pid} is not the weights: {os.fstat(opened).st_size} bytes")
        flat = _map(opened, size_bytes)
    finally:
        os.close(opened)
    for param in params:
        yield param["name"], _view(flat, param["offset"], param["shape"], param["dtype"])


def directory_tensors(path: str) -> Iterator[NamedTensor]:
    """Every tensor of a directory of safetensors files, as views of the mapped files."""
    files = _safetensors_files(Path(path))
    if not files:
        raise FileNotFoundError(f"{path} holds no safetensors file")
    for file in files:
        with file.open("rb") as opened:
            start, entries = _read_header(file)
            flat = _map(opened.fileno(), file.stat().st_size)
        for name, entry in entries.items():
            begin, end = entry["data_offsets"]
            if start + end > flat.numel():
                raise ValueError(f"{file} is truncated: {name} should end at byte {start + end} of {flat.numel()}")
            yield name, _view(flat, start + begin, entry["shape"], _dtype_of(entry))


def directory_specs(path: str) -> list[Spec]:
    """Names, shapes and dtypes of a directory's tensors; empty where it is no directory of safetensors files."""
    return [
        (name, list(entry["shape"]), _dtype_of(entry))
        for file in _safetensors_files(Path(path))
        for name, entry in _read_header(file)[1].items()
    ]


def _safetensors_files(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        return [path / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    whole = path / "model.safetensors"
    return [whole] if whole.is_file() else sorted(path.glob("*.safetensors"))


def _read_header(file: Path) -> tuple[int, dict[str, Any]]:
    """Where the data of a safetensors file starts, and its entries by name."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8)) if size >= 8 else (size,)
        if length > size - 8:
            raise ValueError(f"{file} of {size} bytes is not a whole safetensors file")
        entries = json.loads(opened.read(length))
    entries.pop("__metadata__", None)
    return 8 + length, entries


def _dtype_of(entry: dict[str, Any]) -> str:
    return _SAFETENSORS_DTYPES[entry["dtype"]]


def _map(fd: int, size: int) -> Tensor:
    mapped = mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return torch.frombuffer(mapped, dtype=torch.uint8)


def _view(flat: Tensor, offset: int, shape: list[int], dtype_name: str) -> Tensor:
    dtype: torch.dtype = getattr(torch, dtype_name)
    part = flat[offset : offset + _size_bytes(shape, dtype)]
    if part.data_ptr() % dtype.itemsize:  # the header of a safetensors file may end anywhere
        part = part.clone()
    return part.view(dtype).view(shape)


def _size_bytes(shape: Iterable[int], dtype: torch.dtype) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count * dtype.itemsize


class Group:
    """A place in a weight group; as ``Membership`` of ``core.weight_groups``, whose ranks look at the same key."""

    def __init__(self, process_group: Any, backend: str, store: Any, stage: int = 0) -> None:
        self.process_group, self.backend, self._store, self.stage = process_group, backend, store, stage

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Around a receive: NCCL waits without looking, so a thread looks, and aborts a group that was given up. Under
        gloo :meth:`finish` looks itself.
        """
        if self.backend != "nccl":
            yield
            return
        over, lost = threading.Event(), threading.Event()
        watcher = threading.Thread(target=self._watch, args=(over, lost), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()
        if lost.is_set():  # an aborted broadcast ends like one that succeeded
            raise RuntimeError(_GIVEN_UP)

    def _watch(self, over: threading.Event, lost: threading.Event) -> None:
        while not over.wait(LOOK_S):
            if _is_lost(self._store):
                lost.set()
                self.process_group.abort()
                return

    def finish(self, work: Any) -> None:
        """Wait for a broadcast, or until a rank has given the group up: gloo alone may not tell."""
        if self.backend == "nccl":
            work.wait()
            return
        while True:
            try:
                work.wait(timedelta(seconds=LOOK_S))
                return
            except RuntimeError:
                if work.is_completed():
                    raise
            if _is_lost(self._store):
                raise RuntimeError(_GIVEN_UP)

    def tell_others(self) -> None:
        """Let ranks that wait know that this one gives up."""
        with contextlib.suppress(RuntimeError):  # the store may have ended with rank 0
            self._store.set(LOST, "1")


def _is_lost(store: Any) -> bool:
    try:
        return bool(store.check([LOST]))
    except RuntimeError:  # rank 0, which keeps the store, is gone
        return True


def build_group(group: dict[str, Any], rank: int) -> Group:
    """A group beside the worker's default one, built directly; the trainer's side is ``core.weight_groups``."""
    timeout = timedelta(seconds=group["timeout_s"])
    host, port, world_size = group["host"], group["port"], group["world_size"]
    server = c10d.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
    store = c10d.PrefixStore(group["name"], server)
    store.set(f"here/{rank}", "1")
    store.wait(["go"], timeout)  # rank 0 gives the word when all are here, or when it gives the group up
    if store.get("go") != b"1":
        raise RuntimeError(f"rank 0 gave up group {group['name']} before every rank was there")
    if group["backend"] == "nccl":
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return Group(c10d.ProcessGroupNCCL(store, rank, world_size, options), "nccl", store, group["stage"])
    gloo = c10d.ProcessGroupGloo._Options()
    gloo._timeout = timeout
    gloo._devices = [c10d.ProcessGroupGloo.create_device(hostname=_address_towards(host, port))]
    return Group(c10d.ProcessGroupGloo(store, rank, world_size, gloo), "gloo", store, group["stage"])


def leave_group(groups: dict[str, Group], name: str) -> bool:
    """Forget group ``name``; its connections close with its last reference. False if there was none."""
    holder = [groups.pop(name, None)]
    if holder[0] is None:
        return False
    if holder[0].backend == "nccl":
        holder[0].process_group.abort()
    threading.Thread(target=holder.clear, daemon=True).start()  # gloo first waits for what it has under way
    return True


def _address_towards(host: str, port: int) -> str:
    """This host's own address on the way to ``host``."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def received_tensors(group: Group, buckets: list[list[Spec]], device: torch.device) -> Iterator[NamedTensor]:
    """Tensors as rank 0 broadcasts them, in host memory; what travels together is as ``core.weight_wire`` says."""
    for bucket in buckets:
        coming = []
        for specs in broadcasts(bucket):
            sizes = [_size_bytes(shape, getattr(torch, dtype)) for _, shape, dtype in specs]
            starts = [0, *accumulate(-(-size // ALIGN_BYTES) * ALIGN_BYTES for size in sizes)]
            count = sizes[0] if sizes[0] >= ALONE_BYTES else starts[-1]
            memory = torch.empty(count, dtype=torch.uint8, device=device)
            coming.append((specs, starts, memory, _broadcast(group.process_group, memory)))
        for specs, starts, memory, work in coming:
            group.finish(work)
            flat = memory.cpu()
            for (name, shape, dtype), start in zip(specs, starts, strict=False):
                yield name, _view(flat, start, shape, dtype)


def broadcasts(bucket: list[Spec]) -> Iterator[list[Spec]]:
    """The tensors of a bucket that travel together, in the order in which the last one of each broadcast is met."""
    shared: list[Spec] = []
    filled = 0
    for spec in bucket:
        size = _size_bytes(spec[1], getattr(torch, spec[2]))
        if size >= ALONE_BYTES:
            yield [spec]
            continue
        if filled + size > ALONE_BYTES:
            yield shared
            shared, filled = [], 0
        shared.append(spec)
        filled += -(-size // ALIGN_BYTES) * ALIGN_BYTES
    if shared:
        yield shared


def _bytes(count: int, device: torch.device) -> Tensor:
    return torch.empty(count, dtype=torch.uint8, device=device)


def _broadcast(group: Any, tensor: Tensor) -> Any:
    options = c10d.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    return group.broadcast([tensor], options)


def repack_tied(model: Any) -> None:
    """On CPUs a tied head multiplies with a packed copy of the embedding, which a reload does not renew: pack again."""
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if hasattr(module, "cpu_linear") and weight is not None and weight.ndim == 2 and weight.numel():
            module.quant_method.process_weights_after_loading(module)
