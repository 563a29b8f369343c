"""The trajectory table: its fields, dtypes and shapes, and the one check they pass.

A trajectory is a ``dict`` of the n sequences that came from one dispensed prompt, right-padded to a common width S. The
rollout executor calls :func:`check_trajectory` once, where a trajectory enters; everyone after it trusts the table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from areal.utils.errors import TrajectoryError


@dataclass(frozen=True)
class FieldSpec:
    """One column: ``dims`` is ``nS`` (per token) or ``n`` (per sequence); ``dtypes`` are torch attribute names."""

    dims: str
    dtypes: tuple[str, ...]
    meaning: str
    required: bool = False


_INTEGER = ("int64", "int32")
FIELDS: dict[str, FieldSpec] = {
    "input_ids": FieldSpec("nS", _INTEGER, "prompt and generated token ids", required=True),
    "attention_mask": FieldSpec("nS", ("bool", *_INTEGER), "1 on real tokens", required=True),
    "loss_mask": FieldSpec("nS", (*_INTEGER, "bool", "float32"), "1 on generated tokens"),
    "logprobs": FieldSpec("nS", ("float32",), "log-prob of the token under the version that drew it; 0 on prompt"),
    "versions": FieldSpec("nS", _INTEGER, "weight version that drew the token; -1 on prompt"),
    "rewards": FieldSpec("n", ("float32", "float64"), "scalar reward of the sequence"),
    "group_id": FieldSpec("n", ("int64",), "equal for all sequences of one dispensed prompt"),
    "row_id": FieldSpec("n", ("int64",), "index of the row in the dataset"),
    "truncated": FieldSpec("n", ("bool",), "the engine stopped at a length limit"),
    "begin_of_trajectory": FieldSpec("n", ("bool", *_INTEGER, "float32"), "first sequence of an agent's trajectory"),
    "mm_token_type_ids": FieldSpec("nS", _INTEGER, "kind of each token for multimodal models"),
}


@dataclass(frozen=True, order=True)
class Row:
    """One dispensed dataset row: its epoch, its place in that epoch's order, and its index in the dataset."""

    epoch: int
    position: int
    index: int = field(compare=False)


@dataclass
class TrajectoryRef:
    """Handle of one finished trajectory, as the trainer holds it.

    Attributes:
        row: the dataset row it came from.
        group_id: unique per dispensed row in a run.
        lengths: real tokens of each sequence.
        rewards: reward of each sequence.
        min_version: oldest weight version that drew one of its tokens; -1 if none was drawn.
        max_version: newest one.
        data: the trajectory itself; where it stays with a rollout worker, a mapping that fetches what is read.
    """

    row: Row
    group_id: int
    lengths: tuple[int, ...]
    rewards: tuple[float, ...]
    min_version: int
    max_version: int
    data: dict[str, Any]


def check_trajectory(
    data: dict[str, Any], *, batch_size: int | None = None, expected_keys: frozenset[str] | None = None
) -> None:
    """Check one trajectory against :data:`FIELDS`.

    Args:
        data: the trajectory.
        batch_size: number of sequences it must hold; None accepts any.
        expected_keys: keys it must at least have, for instance those of the run's first trajectory.

    Raises:
        TrajectoryError: a key is missing, or a shape or dtype is not what the table says; the message names the field.
    """
    if not data or not hasattr(data, "items"):
        raise TrajectoryError(f"a trajectory must be a non-empty dict, got {type(data).__name__}")
    missing = [k for k, spec in FIELDS.items() if spec.required and k not in data]
    missing += sorted(k for k in expected_keys or () if k not in data)
    if missing:
        raise TrajectoryError(f"trajectory lacks {', '.join(missing)}; it has {', '.join(sorted(data))}")
    ids = data["input_ids"]
    if ids.ndim != 2:
        raise TrajectoryError(f"input_ids has shape {tuple(ids.shape)}, expected [n, S]")
    n, width = ids.shape
    if batch_size is not None and n != batch_size:
        raise TrajectoryError(f"input_ids holds {n} sequences, expected {batch_size}")
    for key, spec in FIELDS.items():
        if key in data:
            _check_field(key, spec, data[key], n, width)
    _check_images(data, n)


def _check_field(key: str, spec: FieldSpec, value: Any, n: int, width: int) -> None:
    expected = (n, width) if spec.dims == "nS" else (n,)
    shape = tuple(getattr(value, "shape", ()))
    if shape != expected:
        raise TrajectoryError(f"{key} has shape {shape}, expected {expected} ({spec.meaning})")
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype not in spec.dtypes:
        raise TrajectoryError(f"{key} has dtype {dtype}, expected one of {', '.join(spec.dtypes)}")


def _check_images(data: dict[str, Any], n: int) -> None:
    if "multi_modal_input" not in data:
        return
    images = data["multi_modal_input"]
    if not isinstance(images, list) or len(images) != n:
        raise TrajectoryError(f"multi_modal_input must be a list of {n} dicts")
    if not all(isinstance(item, dict) and "pixel_values" in item for item in images):
        raise TrajectoryError("every item of multi_modal_input must be a dict with pixel_values")


def check_trajectory_format(
    data: dict[str, Any] | None,
    batch_size: int | None = None,
    expected_keys: Any = None,
    logger: Any = None,
) -> bool:
    """Same check under its 1.x name; ``None`` (a rejected episode) passes. Returns True or raises TrajectoryError."""
    if data is not None:
        keys = None if expected_keys is None else frozenset(expected_keys)
        check_trajectory(data, batch_size=batch_size, expected_keys=keys)
    return True
