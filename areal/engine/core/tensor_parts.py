"""This rank's part of a tensor: where it lies in the whole, and the whole made of all parts.

In: parameters, which may be DTensors in any layout that FSDP, tensor and expert parallelism make. Called by checkpoint
and publishing code.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

__all__ = ["Index", "box_index", "full_tensor", "laid_out_like", "local_part", "own_index", "relative_index"]

Index = tuple[slice, ...]  # one slice per dimension, both ends given, step 1


def box_index(offset: tuple[int, ...], shape: tuple[int, ...]) -> Index:
    """Slices of a part in the whole tensor."""
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def relative_index(place: Index, origin: Index) -> Index:
    """``place`` as seen from the first element of ``origin``."""
    return tuple(slice(p.start - o.start, p.stop - o.start) for p, o in zip(place, origin, strict=True))


def own_index(tensor: Tensor) -> Index:
    """The part of a whole tensor that this rank holds."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return box_index(tuple(offset), tuple(shape))


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, without history."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def laid_out_like(parameter: Tensor, local: Tensor) -> Tensor:
    """``local``, a tensor of the same shape as this rank's part of ``parameter``, with the layout of ``parameter``."""
    if not isinstance(parameter, DTensor) or isinstance(local, DTensor):
        return local
    # Not from_local: it would copy what lives in host memory (moments of a layer-by-layer step) to the mesh's device,
    # and loading would fill the copy.
    meta = TensorMeta(parameter.shape, parameter.stride(), local.dtype)
    return DTensor(local, DTensorSpec(parameter.device_mesh, parameter.placements, meta), requires_grad=False)


def full_tensor(value: Tensor) -> Tensor:
    """The whole of a parameter (or of a tensor laid out like one); every rank that holds a part must call.

    The first dimension of the mesh is FSDP's, which cuts what the others have left; so it is undone first. The others
    cut evenly.
    """
    if not isinstance(value, DTensor):
        return value
    mesh, placements = value.device_mesh, value.placements
    part = value.to_local()
    for dim, placement in enumerate(placements):
        if not isinstance(placement, Shard | _StridedShard) or mesh.size(dim) == 1:
            continue
        shape = list(value.shape)
        for inner, ranks in zip(placements[dim + 1 :], mesh.shape[dim + 1 :], strict=True):
            if isinstance(inner, Shard | _StridedShard):
                shape[inner.dim] //= ranks
        part = _gathered(part, shape, placement.dim, mesh, dim)
    return part


def _gathered(part: Tensor, shape: list[int], cut: int, mesh: DeviceMesh, dim: int) -> Tensor:
    """A tensor of ``shape`` of which each rank of mesh dimension ``dim`` has a part, cut along dimension ``cut``."""
    ranks = mesh.size(dim)
    if shape[cut] % ranks == 0:  # DTensor's way takes twice the time of the collective
        rows = part.new_empty((ranks * part.shape[0], *part.shape[1:]))
        dist.all_gather_single(rows, part.contiguous(), group=mesh.get_group(dim))
        return rows if cut == 0 else torch.cat(rows.chunk(ranks), dim=cut)
    names = mesh.mesh_dim_names
    own = mesh if mesh.ndim == 1 or names is None else mesh[names[dim]]
    size, stride = torch.Size(shape), torch.empty(shape, device="meta").stride()
    whole = DTensor.from_local(part, own, [Shard(cut)], run_check=False, shape=size, stride=stride)
    return whole.full_tensor()
