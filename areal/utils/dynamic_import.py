"""Turns ``"package.module.Name"`` from a config or a command line into the object it names."""

from __future__ import annotations

import importlib
from typing import Any


def import_from_string(path: str) -> Any:
    """Import the object named by a dotted path; ``pkg.mod:Name.attr`` is accepted too.

    Args:
        path: ``"package.module.Name"``. Everything before the last dot must be importable.

    Raises:
        ValueError: ``path`` has no dot.
        ImportError: the module cannot be imported (its own import errors pass through).
        AttributeError: the module has no such name.
    """
    module_name, _, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    if not module_name or not attribute:
        raise ValueError(f"import path {path!r} must look like 'package.module.Name'")
    target: Any = importlib.import_module(module_name)
    for part in attribute.split("."):
        if not hasattr(target, part):
            raise AttributeError(f"module {module_name!r} has no attribute {attribute!r} (from import path {path!r})")
        target = getattr(target, part)
    return target
