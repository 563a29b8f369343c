"""Hugging Face directories: written by one rank or by all of them, read in pieces.

In: tensors under their checkpoint names, gathered one at a time. Out: safetensors files, an index if there are several,
``config.json`` with the dtype of the files, tokenizer files. Host memory holds the tensors of one file at most. Called
by the backends' checkpoint code.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open
from safetensors.torch import save_file

from areal.engine.core.checkpoint import save_optimizer_file, shared_directory
from areal.engine.core.distributed import group_rank, group_size
from areal.utils.errors import CheckpointError
from areal.utils.fs import fsync_file

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor

MAX_FILE_BYTES = 5_000_000_000
SHARDED_FROM_BYTES = 1_000_000_000  # smaller models are one file, written by rank 0
MODEL_STEM = "model"
_WEIGHTS, _INDEX = f"{MODEL_STEM}.safetensors", f"{MODEL_STEM}.safetensors.index.json"


@dataclass(frozen=True)
class HfTensor:
    """One tensor of a checkpoint that is not gathered yet.

    Attributes:
        name: its checkpoint name.
        n_bytes: size in the checkpoint.
        fetch: a collective; gives the whole tensor to the rank that is passed (others may get it or None).
    """

    name: str
    n_bytes: int
    fetch: Callable[[int], Tensor | None]


@dataclass(frozen=True)
class HfExport:
    """Everything of a Hugging Face directory but the weights; holds nothing that training changes.

    Attributes:
        config, generation_config: of the model; the config names the dtype of the files.
        extras: tokenizer and processor (objects with ``save_pretrained``).
        optimizer_state: this rank's shards, for a file per rank beside the weights; None writes none.
        stem: of the weights' file; others than a model's are written by rank 0 and never cut.
    """

    config: Any
    generation_config: Any
    extras: tuple[Any, ...] = ()
    optimizer_state: Mapping[str, Tensor] | None = None
    stem: str = MODEL_STEM


def export_hf(
    path: str | os.PathLike[str],
    export: HfExport,
    tensors: Iterable[HfTensor],
    total_bytes: int,
    group: dist.ProcessGroup | None,
) -> None:
    """Write a Hugging Face directory; every rank must call.

    Rank 0 writes small models; from ``SHARDED_FROM_BYTES`` on, every rank writes its share of the tensors.

    Args:
        path: directory to make or replace.
        export: config, tokenizer, optimizer.
        tensors: each weight once (tied ones under their first name), the same on every rank.
        total_bytes: size of all tensors, the same on every rank.
        group: all ranks of the engine.

    Raises:
        CheckpointError: a rank could not write, on every rank; what was at ``path`` is unchanged.
    """
    with shared_directory(path, group) as work:
        cut = export.stem == MODEL_STEM
        files = FilePlan(total_bytes, _n_writers(total_bytes, group) if cut else 1, export.stem)
        _write_own_files(work, tensors, files, group_rank(group))
        if group_rank(group) == 0:
            _write_small_files(work, export, files)
        if export.optimizer_state is not None:
            save_optimizer_file(work, export.optimizer_state, group)


class FilePlan:
    """Which rank writes which tensor into which file; every rank makes the same plan from the sizes alone."""

    def __init__(self, total_bytes: int, n_writers: int, stem: str = MODEL_STEM) -> None:
        self.total_bytes, self.n_writers, self.stem = total_bytes, n_writers, stem
        self.limit = MAX_FILE_BYTES if stem == MODEL_STEM else total_bytes
        self.files: list[_File] = []
        self.placed_bytes = 0

    def place(self, name: str, n_bytes: int) -> int:
        """Put the next tensor into a file; returns the file's number."""
        share = self.placed_bytes * self.n_writers // max(1, self.total_bytes)
        owner = min(share, self.n_writers - 1)
        last = self.files[-1] if self.files else None
        if last is None or last.owner != owner or last.n_bytes + n_bytes > self.limit:
            last = _File(owner)
            self.files.append(last)
        last.names.append(name)
        last.n_bytes += n_bytes
        self.placed_bytes += n_bytes
        return len(self.files) - 1

    def file_name(self, number: int) -> str:
        """Final name of a file; known when every tensor has its place."""
        n_files = len(self.files)
        return (
            f"{self.stem}.safetensors" if n_files == 1 else f"{self.stem}-{number + 1:05d}-of-{n_files:05d}.safetensors"
        )

    def index(self) -> dict[str, Any]:
        """Content of the index file."""
        names = {name: self.file_name(number) for number, file in enumerate(self.files) for name in file.names}
        return {"metadata": {"total_size": self.placed_bytes}, "weight_map": names}


@dataclass
class _File:
    owner: int
    names: list[str] = field(default_factory=list)
    n_bytes: int = 0


def _n_writers(total_bytes: int, group: dist.ProcessGroup | None) -> int:
    return group_size(group) if total_bytes >= SHARDED_FROM_BYTES else 1


def _write_own_files(directory: Path, tensors: Iterable[HfTensor], files: FilePlan, rank: int) -> None:
    """Fetch every tensor, because all ranks must, and write those of this rank."""
    failure: Exception | None = None
    held: dict[str, Tensor] = {}
    current, written = -1, []
    for item in tensors:
        number = files.place(item.name, item.n_bytes)
        owner = files.files[number].owner
        tensor = item.fetch(owner)
        if owner != rank or failure is not None:
            continue
        assert tensor is not None
        try:
            if held and number != current:
                written.append(_write_part(directory, current, held))
            current = number
            held[item.name] = tensor.detach().cpu().contiguous()
        except Exception as exc:  # noqa: BLE001 - raised below: the other ranks need this one's part of the next tensors
            failure = exc
            held.clear()
    if failure is not None:
        raise failure
    if held:
        written.append(_write_part(directory, current, held))
    for number in written:
        _part(directory, number).rename(directory / files.file_name(number))


def _write_part(directory: Path, number: int, held: dict[str, Tensor]) -> int:
    """Write and forget the tensors of one file; returns its number."""
    save_file(held, _part(directory, number), metadata={"format": "pt"})
    fsync_file(_part(directory, number))
    held.clear()
    return number


def _part(directory: Path, number: int) -> Path:
    return directory / f"part-{number}"


def _write_small_files(directory: Path, export: HfExport, files: FilePlan) -> None:
    if len(files.files) > 1:
        (directory / _INDEX).write_text(json.dumps(files.index(), indent=1))
    export.config.save_pretrained(directory)
    if export.generation_config is not None:
        export.generation_config.save_pretrained(directory)
    for extra in export.extras:
        extra.save_pretrained(directory)


class HfDirectory:
    """The tensors of a Hugging Face directory of safetensors files, read in pieces.

    Attributes:
        shapes: checkpoint name to shape.
        model_type: of ``config.json``.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises:
        CheckpointError: no config, no weights, or a file that the index names is missing or damaged.
        """
        self.path = Path(path)
        self._files: dict[str, Any] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.model_type: str | None = self._json("config.json").get("model_type")
        for file in self._weight_files():
            try:
                handle = safe_open(file, "pt")
                for name in handle.keys():  # noqa: SIM118 - not a dict
                    self.shapes[name] = tuple(handle.get_slice(name).get_shape())
                    self._files[name] = handle
            except Exception as exc:  # the library has an exception class of its own, without a public name
                raise CheckpointError(f"{file} is missing or damaged: {exc}") from exc

    @staticmethod
    def has_weights(path: str | os.PathLike[str]) -> bool:
        """Whether ``path`` is a directory with safetensors files."""
        return any((Path(path) / name).is_file() for name in (_WEIGHTS, _INDEX))

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """The part ``index`` (a slice per dimension; none: all of it) of one tensor, in the dtype of the file."""
        handle = self._files[name]
        whole = not index or index == tuple(slice(0, size) for size in self.shapes[name])
        tensor: Tensor = handle.get_tensor(name) if whole else handle.get_slice(name)[index]
        return tensor

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """``(checkpoint name, tensor)`` of all of them, read one by one."""
        for name in self.shapes:
            yield name, self.read(name)

    def _weight_files(self) -> list[Path]:
        if (self.path / _INDEX).is_file():
            return sorted({self.path / name for name in self._json(_INDEX)["weight_map"].values()})
        if (self.path / _WEIGHTS).is_file():
            return [self.path / _WEIGHTS]
        raise CheckpointError(f"{self.path} has neither {_WEIGHTS} nor {_INDEX}")

    def _json(self, name: str) -> dict[str, Any]:
        try:
            content: dict[str, Any] = json.loads((self.path / name).read_text())
        except (OSError, ValueError) as exc:
            raise CheckpointError(f"{self.path} is no complete checkpoint: {name} cannot be read ({exc})") from exc
        return content
