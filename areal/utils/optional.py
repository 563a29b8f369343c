"""Importing packages that only some features need, with an error that says how to get them."""

from __future__ import annotations

import importlib
from typing import Any

from areal.utils.errors import ConfigError


def import_extra(module: str, extra: str) -> Any:
    """The module, imported.

    Args:
        module: its import name.
        extra: the extra of this package that installs it.

    Raises:
        ConfigError: it cannot be imported; the message has the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        raise ConfigError(
            f"{module} cannot be imported ({exc}): install it with  pip install 'areal[{extra}]'"
        ) from exc
