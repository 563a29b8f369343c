"""Checkpoints of every train engine: Hugging Face directories to exchange, DCP directories to resume.

In: named tensors that a backend gathers or shards. Out: complete directories; a half-written one never has the final
name. Called by the engine facades; every rank must call every function.
"""

from __future__ import annotations

import json
import os
import random
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from areal.engine.core.distributed import barrier, group_rank, group_size
from areal.utils.errors import CheckpointError
from areal.utils.fs import aside_path, publish_directory, remove_tree

MAX_SHARD_BYTES = 5_000_000_000
FORMAT_VERSION = 1
STATE_FILE = "engine.json"
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


@contextmanager
def shared_directory(path: str | os.PathLike[str], group: dist.ProcessGroup | None) -> Iterator[Path]:
    """Yield a directory aside, the same for every rank, that replaces ``path`` once all ranks are done."""
    is_writer = group_rank(group) == 0
    aside = aside_path(path, token="shared")
    if is_writer:
        remove_tree(aside)
        aside.mkdir(parents=True)
    barrier(group)
    yield aside
    barrier(group)
    if is_writer:
        publish_directory(aside, path)
    barrier(group)


def export_hf(  # noqa: PLR0913 - one call per checkpoint
    path: str | os.PathLike[str],
    model: PreTrainedModel,
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    group: dist.ProcessGroup | None,
    *,
    extras: Iterable[Any] = (),
    optimizer_state: dict[str, Tensor] | None = None,
) -> None:
    """Write a Hugging Face directory; rank 0 writes, every rank iterates ``tensors``.

    Args:
        path: directory to make or replace.
        model: its config and generation config are saved; the config names ``dtype``.
        tensors: ``(checkpoint name, full tensor)`` of ``dtype``, each weight once (tied ones under their first name).
        dtype: dtype of the floating-point tensors.
        extras: tokenizer and processor (objects with ``save_pretrained``); None is skipped.
        optimizer_state: this rank's shards, for a file per rank beside the weights.
    """
    with shared_directory(path, group) as work:
        if group_rank(group) == 0:
            _write_safetensors(work, tensors)
            _save_config(work, model, dtype)
            for extra in extras:
                if extra is not None:
                    extra.save_pretrained(work)
        else:
            for _ in tensors:
                pass
        if optimizer_state is not None:
            torch.save(optimizer_state, work / _optimizer_file(group))


def load_optimizer_file(
    path: str | os.PathLike[str], state: dict[str, Tensor], group: dist.ProcessGroup | None
) -> None:
    """Copy the optimizer file that this rank wrote beside Hugging Face weights into ``state``.

    Raises:
        CheckpointError: no such file for this rank and number of ranks, or other parameters in it.
    """
    file = Path(path) / _optimizer_file(group)
    if not file.is_file():
        raise CheckpointError(f"{file} does not exist; it is written by save(with_optim=True) with as many ranks")
    saved = torch.load(file, map_location="cpu", weights_only=True)
    if saved.keys() != state.keys():
        raise CheckpointError(f"{file} holds other parameters: {sorted(saved.keys() ^ state.keys())[:3]} differ")
    for name, tensor in state.items():
        tensor.copy_(saved[name])


def save_dcp(
    path: str | os.PathLike[str],
    tensors: dict[str, Tensor],
    state: dict[str, Any],
    group: dist.ProcessGroup | None,
) -> None:
    """Write a recover point: sharded ``tensors``, this rank's random state, and ``state`` as JSON."""
    rank = group_rank(group)
    everything = {**tensors, **{f"rng.{rank}.{name}": value for name, value in rng_state().items()}}
    with shared_directory(path, group) as work:
        with _quiet_single_process():
            dcp.save(everything, checkpoint_id=work, process_group=group, no_dist=group is None)
        if rank == 0:
            document = {"format": FORMAT_VERSION, "world_size": group_size(group), **state}
            (work / STATE_FILE).write_text(json.dumps(document, indent=1))


def load_dcp(
    path: str | os.PathLike[str], tensors: dict[str, Tensor], group: dist.ProcessGroup | None
) -> dict[str, Any]:
    """Read a recover point into ``tensors`` in place and restore this rank's random state; returns the JSON state.

    Ranks that the saved run did not have keep their random state.

    Raises:
        CheckpointError: the directory is no complete recover point of a format this version reads, or lacks a tensor.
    """
    root = Path(path)
    state = _read_state(root)
    present = dcp.FileSystemReader(root).read_metadata().state_dict_metadata
    missing = [name for name in tensors if name not in present]
    if missing:
        raise CheckpointError(
            f"{root}: no tensor {missing[0]!r} ({len(missing)} missing); was it saved by another model?"
        )
    rank = group_rank(group)
    rng = {f"rng.{rank}.{name}": value for name, value in rng_state().items()}
    rng = {name: value for name, value in rng.items() if name in present}
    with _quiet_single_process():
        dcp.load({**tensors, **rng}, checkpoint_id=root, process_group=group, no_dist=group is None)
    if rng:
        set_rng_state({name.removeprefix(f"rng.{rank}."): value for name, value in rng.items()})
    return state


def rng_state() -> dict[str, Tensor]:
    """State of Python's, NumPy's and torch's random generators as tensors."""
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state()
    state = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "python_gauss": torch.tensor([float("nan") if gauss is None else gauss], dtype=torch.float64),
        "numpy": torch.tensor([position, has_gauss, *keys.tolist()], dtype=torch.int64),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Tensor]) -> None:
    """Restore what :func:`rng_state` returned."""
    torch.set_rng_state(state["torch"])
    version, *words = state["python"].tolist()
    gauss = state["python_gauss"].item()
    random.setstate((version, tuple(words), None if gauss != gauss else gauss))
    position, has_gauss, *keys = state["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, state["numpy_gauss"].item()))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _optimizer_file(group: dist.ProcessGroup | None) -> str:
    return f"optim_world_size_{group_size(group)}_rank_{group_rank(group)}.pt"


@contextmanager
def _quiet_single_process() -> Iterator[None]:
    """DCP warns that it assumes one process, which is what we told it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _write_safetensors(directory: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write one file, or numbered files and an index that lists exactly their tensors."""
    written: list[list[str]] = []
    shard: dict[str, Tensor] = {}
    size, total = 0, 0

    def flush() -> None:
        save_file(shard, directory / f"part-{len(written)}", metadata={"format": "pt"})
        written.append(list(shard))
        shard.clear()

    for name, tensor in tensors:
        n_bytes = tensor.numel() * tensor.element_size()
        if shard and size + n_bytes > MAX_SHARD_BYTES:
            flush()
            size = 0
        shard[name] = tensor.detach().cpu().contiguous()
        size, total = size + n_bytes, total + n_bytes
    flush()
    if len(written) == 1:
        (directory / "part-0").rename(directory / _WEIGHTS)
        return
    weight_map = {}
    for number, names in enumerate(written):
        file_name = f"model-{number + 1:05d}-of-{len(written):05d}.safetensors"
        (directory / f"part-{number}").rename(directory / file_name)
        weight_map.update(dict.fromkeys(names, file_name))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / _INDEX).write_text(json.dumps(index, indent=1))


def _save_config(directory: Path, model: PreTrainedModel, dtype: torch.dtype) -> None:
    config = model.config
    before = (config.dtype, config.architectures)
    try:
        config.dtype = dtype
        config.architectures = [type(model).__name__.removeprefix("FSDP")]
        config.save_pretrained(directory)
    finally:
        config.dtype, config.architectures = before
    if model.can_generate():
        model.generation_config.save_pretrained(directory)


def _read_state(root: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads((root / STATE_FILE).read_text())
    except (OSError, ValueError) as exc:
        raise CheckpointError(f"{root} is no complete recover point: {STATE_FILE} cannot be read ({exc})") from exc
    if state.get("format") != FORMAT_VERSION:
        raise CheckpointError(
            f"{root}: recover point of format {state.get('format')}, this version reads format {FORMAT_VERSION}"
        )
    return state
