"""Recover points of every train engine (DCP), and the rules that all checkpoint directories follow.

In: named tensors that a backend shards. Out: complete directories; a half-written one never has the final name, and if
one rank cannot write, every rank raises and the previous directory is untouched. Called by the backends' checkpoint
code; every rank must call every function. Hugging Face directories: ``hf_checkpoint``.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from areal.engine.core.distributed import group_rank, group_size
from areal.utils.errors import CheckpointError
from areal.utils.fs import aside_path, fsync_file, publish_directory, remove_tree
from areal.utils.ranks import together

FORMAT_VERSION = 1
STATE_FILE = "engine.json"
_SHOWN = 20  # names in an error; the rest is counted


@contextmanager
def shared_directory(path: str | os.PathLike[str], group: dist.ProcessGroup | None) -> Iterator[Path]:
    """Yield a directory aside, the same for every rank, that replaces ``path`` once all ranks are done.

    Raises:
        CheckpointError: some rank could not write, on every rank. ``path`` is what it was.
    """
    is_writer = group_rank(group) == 0
    aside = aside_path(path, token="shared")
    try:
        with _written_together(path, group):
            if is_writer:
                remove_tree(aside)
                aside.mkdir(parents=True)
        with _written_together(path, group):
            yield aside
        with _written_together(path, group):
            if is_writer:
                publish_directory(aside, path)
    except BaseException:
        if is_writer:
            with suppress(OSError):  # the reason of the failure is worth more than this one
                remove_tree(aside)
        raise


def save_dcp(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    rng: Mapping[str, Tensor],
    state: Mapping[str, Any],
    group: dist.ProcessGroup | None,
) -> None:
    """Write a recover point.

    Args:
        path: directory to make or replace.
        tensors: sharded (``DTensor``) or whole; a later run may shard them otherwise.
        rng: this rank's random state, from :func:`rng_state`.
        state: JSON of the whole engine, such as its version.
        group: all ranks of the engine, over a backend that takes CPU tensors.
    """
    rank = group_rank(group)
    everything = {**tensors, **{f"rng.{rank}.{name}": value for name, value in rng.items()}}
    with shared_directory(path, group) as work:
        with _dcp_errors(group):
            dcp.save(everything, checkpoint_id=work, process_group=group, no_dist=group is None)
        if rank == 0:
            document = {"format": FORMAT_VERSION, "world_size": group_size(group), **state}
            (work / STATE_FILE).write_text(json.dumps(document, indent=1))


def load_dcp(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    expected: Mapping[str, Any],
    group: dist.ProcessGroup | None,
) -> dict[str, Any]:
    """Read a recover point into ``tensors`` in place and restore this rank's random state; returns the JSON state.

    The saved run may have had another number of ranks and other shards. Ranks that it did not have keep their random
    state.

    Args:
        path: what :func:`save_dcp` wrote.
        tensors: where to read into.
        expected: entries of the JSON state that must be equal, such as ``model_type``; those it lacks are not checked.
        group: as for :func:`save_dcp`.

    Raises:
        CheckpointError: the directory is no complete recover point of a format this version reads, is of another model,
            or lacks a tensor. ``tensors`` are unchanged then.
    """
    root = Path(path)
    rank = group_rank(group)
    with together(f"{root} could not be read", CheckpointError, group, alone=group is None):
        state = _read_state(root)
        _check_state(root, state, expected)
        present = _saved_shapes(root)
        check_names(root, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, present)
    rng = {f"rng.{rank}.{name}": value for name, value in rng_state().items()}
    rng = {name: value for name, value in rng.items() if name in present}
    with together(f"{root} could not be read", CheckpointError, group, alone=group is None), _dcp_errors(group):
        dcp.load({**tensors, **rng}, checkpoint_id=root, process_group=group, no_dist=group is None)
    if rng:
        set_rng_state({name.removeprefix(f"rng.{rank}."): value for name, value in rng.items()})
    return state


def save_optimizer_file(directory: Path, state: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Write this rank's optimizer shards beside Hugging Face weights; no collective."""
    file = directory / _optimizer_file(group)
    torch.save(dict(state), file)
    fsync_file(file)


def load_optimizer_file(
    path: str | os.PathLike[str], state: Mapping[str, Tensor], group: dist.ProcessGroup | None
) -> None:
    """Copy the optimizer file that this rank wrote beside Hugging Face weights into ``state``.

    Raises:
        CheckpointError: no such file for this rank and number of ranks, or other parameters or shards in it.
    """
    file = Path(path) / _optimizer_file(group)
    with together(f"{path}: optimizer state could not be read", CheckpointError, group, alone=group is None):
        if not file.is_file():
            raise CheckpointError(
                f"{file} does not exist; it is written by save(with_optim=True) with as many ranks. To continue with "
                "another number of ranks, use weight_format=dcp"
            )
        saved = torch.load(file, map_location="cpu", weights_only=True)
        shapes = {name: tuple(tensor.shape) for name, tensor in saved.items()}
        check_names(file, {name: tuple(tensor.shape) for name, tensor in state.items()}, shapes)
        for name, tensor in state.items():
            tensor.copy_(saved[name])


def check_names(
    where: str | os.PathLike[str], wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]
) -> None:
    """Compare names and shapes of a checkpoint with what the model needs; tensors that it does not need are fine.

    Raises:
        CheckpointError: lists the missing tensors, or those of another shape.
    """
    missing = [name for name in wanted if name not in found]
    if missing:
        raise CheckpointError(
            f"{where}: {len(missing)} of {len(wanted)} tensors are missing: {listed(missing)}. "
            "Was it saved by another model, or without the optimizer?"
        )
    other = [name for name, shape in wanted.items() if found[name] != shape]
    if other:
        shapes = [f"{name} is {list(found[name])}, the model needs {list(wanted[name])}" for name in other]
        raise CheckpointError(f"{where}: {len(other)} tensors have another shape: {listed(shapes, '; ')}")


def listed(items: list[str], separator: str = ", ") -> str:
    """The first items, and how many more there are."""
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return separator.join(items[:_SHOWN]) + more


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
def _written_together(path: str | os.PathLike[str], group: dist.ProcessGroup | None) -> Iterator[None]:
    """``together``, whose message names the free space where this rank failed."""
    what = f"{os.fspath(path)} could not be written; what was there before is unchanged"
    with together(what, CheckpointError, group, alone=group is None):
        try:
            yield
        except Exception as exc:
            if isinstance(exc, CheckpointError):
                raise
            raise CheckpointError(f"{what}{_free_space(path)}: {type(exc).__name__}: {exc}") from exc


def _free_space(path: str | os.PathLike[str]) -> str:
    try:
        free = shutil.disk_usage(Path(path).parent).free
    except OSError:
        return ""
    return f" ({free / 1e6:,.1f} MB free there)"


@contextmanager
def _dcp_errors(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Make DCP's failures, which it raises on every rank, exceptions of ours; hide a warning that tells nothing."""
    if group is None:
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    try:
        yield
    except CheckpointException as exc:
        causes = [f"rank {rank}: {type(cause[0]).__name__}: {cause[0]}" for rank, cause in exc.failures.items()]
        raise OSError("; ".join(causes)) from exc


def _saved_shapes(root: Path) -> dict[str, tuple[int, ...]]:
    try:
        entries = dcp.FileSystemReader(root).read_metadata().state_dict_metadata
    except (OSError, EOFError, ValueError) as exc:
        raise CheckpointError(f"{root} is no complete recover point: its metadata cannot be read ({exc})") from exc
    return {name: tuple(entry.size) for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}


def _check_state(root: Path, state: dict[str, Any], expected: Mapping[str, Any]) -> None:
    for key, value in expected.items():
        if key in state and state[key] != value:
            raise CheckpointError(
                f"{root} was saved with {key}={state[key]}, this engine has {key}={value}; go on with the model and "
                "the settings of the saved run"
            )


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
