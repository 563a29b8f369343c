"""What checkpoints and publishing must know of a model: its tensors and their names outside.

A backend describes its models once, as a ``ModelLayout``; ``engine_checkpoints``, ``hf_load`` and
:func:`named_full_tensors` then work for all of them. Two kinds of names appear: *own* names, under which the model has
its parameters (and recover points keep them), and *checkpoint* names, under which Hugging Face directories hold the
same weights, perhaps in several parts or several in one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from areal.engine.core.tensor_parts import Index, full_tensor, relative_index

__all__ = [
    "ModelLayout",
    "NamedParameters",
    "TensorSource",
    "named_full_tensors",
    "named_tensors",
    "persistent_buffers",
    "read_part",
]


class NamedParameters(Protocol):
    """A module, or what stands for several of them."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Trainable and frozen parameters, tied ones once, in model order."""
        ...


class TensorSource(Protocol):
    """Whole tensors under a model's own names, read in pieces."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the tensors that can be read, by own name."""
        ...

    @property
    def unexpected(self) -> list[str]:
        """Checkpoint names of tensors that the model has no place for."""
        ...

    def pieces(self, name: str, index: Index) -> Iterator[tuple[Index, Tensor]]:
        """The part ``index`` of a tensor, as parts of it and their places in the whole, in the dtype of the files."""
        ...


class ModelLayout(NamedParameters, Protocol):
    """One model, or the part of it that a pipeline rank holds; other ranks then have other names."""

    @property
    def model_type(self) -> str:
        """That of the Hugging Face config."""
        ...

    @property
    def optional(self) -> Collection[str]:
        """Own names of tensors that a checkpoint may lack; the model's own values stay then."""
        ...

    @property
    def copies(self) -> Mapping[str, str]:
        """Own names of parameters that repeat another one, whose name they map to: a tied head in its own stage."""
        ...

    def persistent_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """``(own name, buffer)`` of the buffers that belong into a checkpoint."""
        ...

    def materialize(self, device: torch.device) -> None:
        """Give what is on the meta device memory on ``device``; parameters may have any content then."""
        ...

    def split(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """``(checkpoint name, tensor)`` of one whole tensor, which they may alias. Tensors on the meta device do, too.

        Args:
            name: own name, of any part of the model.
        """
        ...

    def source(self, path: str | os.PathLike[str]) -> TensorSource:
        """The weights at ``path``.

        Raises:
            CheckpointError: it holds none, is damaged, or is of another architecture.
        """
        ...

    def configs(self) -> tuple[Any, Any]:
        """Hugging Face config and generation config (or None) for an export, as copies."""
        ...


def named_tensors(layout: ModelLayout) -> Iterator[tuple[str, Tensor]]:
    """``(own name, tensor)`` of everything that a checkpoint of the weights holds: this rank's part of it."""
    yield from layout.named_parameters()
    yield from layout.persistent_buffers()


def named_full_tensors(
    layout: ModelLayout, dtype: torch.dtype, gather: Callable[[Tensor], Tensor] = full_tensor
) -> Iterator[tuple[str, Tensor]]:
    """``(checkpoint name, full tensor of dtype)`` in model order; tied weights once, under their first name.

    Every rank must iterate: each step gathers one tensor over the ranks that hold it. Pipeline ranks give the tensors
    of their own stages. The tensors may alias the model's; copy what must outlive a step.

    Args:
        layout: the model.
        dtype: of parameters; buffers keep theirs.
        gather: makes the whole of a parameter.
    """
    # Detached tensors instead of no_grad: a generator must not hold a global mode while it is suspended.
    for name, parameter in layout.named_parameters():
        yield from layout.split(name, gather(parameter.detach()).to(dtype))
    for name, buffer in layout.persistent_buffers():
        yield from layout.split(name, buffer.detach())


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """``(name, buffer)`` of a module's buffers that belong into a checkpoint."""
    for prefix, child in module.named_modules():
        for name, buffer in child._buffers.items():
            if buffer is not None and name not in child._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def read_part(source: TensorSource, name: str, index: Index) -> Tensor:
    """The part ``index`` of one tensor in one piece, in the dtype of the files."""
    whole: Tensor | None = None
    for place, part in source.pieces(name, index):
        if place == index:
            return part
        if whole is None:
            whole = part.new_empty([size.stop - size.start for size in index])
        whole[relative_index(place, index)] = part
    assert whole is not None, f"{name} has no part {index}"
    return whole
