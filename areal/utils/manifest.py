"""The manifest: what a run was made of, so that it can be told apart and repeated.

``build_manifest`` is called once by the trainer; the dict goes to ``manifest.json`` in the log directory and into every
checkpoint. ``masked_config`` is the plain-data view of a config with secrets hidden, for dumps and trackers.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal.api.config.convert import to_plain
from areal.utils import fs
from areal.utils.version import get_version_info, pkg_version

FORMAT = 1
FILE_NAME = "manifest.json"
_LIBRARIES = ("torch", "transformers", "safetensors", "datasets", "numpy", "math-verify", "vllm", "sglang")
_FINGERPRINT_ROWS = 64  # rows hashed, spread evenly over the dataset


def build_manifest(
    config: Any, *, seeds: Mapping[str, int] | None = None, datasets: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Versions, commit, config hash, dataset fingerprints and seeds as one JSON value.

    Args:
        config: the experiment config (a dataclass).
        seeds: named seeds of the run; None takes ``config.seed``.
        datasets: name -> dataset (``len`` and integer indexing), such as ``{"train": rows}``; None entries are skipped.
    """
    version = get_version_info()
    return {
        "format": FORMAT,
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "areal": {"version": version.version, "commit": version.commit, "is_dirty": version.is_dirty},
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "libraries": {name: found for name in _LIBRARIES if (found := pkg_version(name)) is not None},
        "argv": list(sys.argv),
        "config_hash": config_hash(config),
        "datasets": {k: dataset_fingerprint(d) for k, d in (datasets or {}).items() if d is not None},
        "seeds": dict(seeds) if seeds is not None else {"run": config.seed},
    }


def write_manifest(directory: fs.PathLike, manifest: Mapping[str, Any], **extra: Any) -> None:
    """Write ``manifest.json`` with ``extra`` entries (such as ``global_step=…``) into ``directory``, atomically."""
    fs.atomic_write_json(Path(directory, FILE_NAME), {**manifest, **extra})


def config_hash(config: Any) -> str:
    """16 hex digits of the config's content; secrets do not count."""
    text = json.dumps(masked_config(config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def dataset_fingerprint(dataset: Any) -> dict[str, Any]:
    """Length and a hash of up to 64 rows spread over the dataset; equal data gives equal fingerprints.

    Args:
        dataset: anything with ``len`` and integer indexing; rows may hold any values.
    """
    n_rows = len(dataset)
    stride = max(1, n_rows // _FINGERPRINT_ROWS)
    digest = hashlib.sha256(str(n_rows).encode())
    for index in range(0, n_rows, stride):
        digest.update(json.dumps(dataset[index], sort_keys=True, default=_stable_text).encode())
    return {"rows": n_rows, "sha256": digest.hexdigest()[:16]}


def masked_config(config: Any) -> Any:
    """Plain data of a config, ready for JSON and YAML; fields that hold secrets become ``***``."""
    return to_plain(config, mask_secrets=True)


def _stable_text(value: Any) -> str:
    """Text of a value JSON does not know, without memory addresses."""
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()
    if hasattr(value, "tobytes"):  # images and arrays
        return hashlib.sha256(value.tobytes()).hexdigest()
    if hasattr(value, "tolist"):
        return json.dumps(value.tolist())
    return type(value).__name__
