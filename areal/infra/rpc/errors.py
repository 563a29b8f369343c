"""Errors of the RPC layer, and how an exception travels: as its type's name, arguments, text and traceback.

An exception raised in a worker is raised as the same type by the client when that type is one of ours or of Python's
builtins; otherwise as :class:`EngineCallError`. The remote traceback is added as a note.
"""

from __future__ import annotations

import builtins
import importlib
import traceback
from typing import Any

from areal.utils.errors import ArealError, InfrastructureError, NetworkError, SchedulerError

_PLAIN = (str, int, float, bool, type(None), bytes)
_NEVER_RAISED = (StopIteration, StopAsyncIteration)  # they would end the generator or loop of whoever waits


class WireError(ArealError, ValueError):
    """A message is malformed or over a limit, or a value cannot travel; the message says which and what to do."""


class RPCConnectionError(SchedulerError, NetworkError):
    """A worker could not be reached, or the connection broke before it answered."""


class RPCTimeoutError(SchedulerError, TimeoutError):
    """A worker did not answer, or did not begin, within the time limit of the call."""


class EngineCallError(SchedulerError):
    """A call failed on its worker with an exception whose type is not known here."""


class RequestRefusedError(EngineCallError):
    """A worker refused a request without doing anything; ``status`` is the HTTP status (400 to 413)."""

    status = 400


class TensorLostError(InfrastructureError):
    """A remote tensor is not there any more: freed, or its owner has ended."""


def pack_exception(error: BaseException) -> dict[str, Any]:
    """Plain description of an exception with its traceback."""
    plain = all(isinstance(argument, _PLAIN) for argument in error.args)
    return {
        "module": type(error).__module__,
        "type": type(error).__qualname__,
        "args": list(error.args) if plain else [str(error)],
        "text": str(error),
        "traceback": "".join(traceback.format_exception(error)),
    }


def unpack_exception(packed: dict[str, Any], where: str) -> Exception:
    """The exception to raise for a description made by :func:`pack_exception`.

    Args:
        where: worker and method, for the note and for errors of unknown type.
    """
    error = _rebuild(packed) or EngineCallError(
        f"{where}: {packed.get('module')}.{packed.get('type')}: {packed.get('text')}"
    )
    error.add_note(f"raised by {where}:\n{packed.get('traceback', '')}")
    return error


def _rebuild(packed: dict[str, Any]) -> Exception | None:
    kind = _known_type(str(packed.get("module")), str(packed.get("type")))
    if kind is None:
        return None
    for arguments in (packed.get("args"), [packed.get("text")]):
        if isinstance(arguments, list):
            try:
                return kind(*arguments)
            except Exception:  # noqa: BLE001 - a constructor of its own; the next form, or the general error, says it
                continue
    return None


def _known_type(module: str, name: str) -> type[Exception] | None:
    """An exception class of ours or of Python's; no other module is imported."""
    found: Any = None
    if module == "builtins":
        found = getattr(builtins, name, None)
    elif module == "areal" or module.startswith("areal."):
        try:
            found = importlib.import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError, ValueError):
            return None
    if not isinstance(found, type) or not issubclass(found, Exception) or issubclass(found, _NEVER_RAISED):
        return None
    return found if found.__module__ == module else None
