"""Functions and classes as names: ``"module:qualname"``, or, for the main script, its path or module and the name.

The receiver imports the module. The main script is loaded there under the name ``__mp_main__``, so what stands under
its ``if __name__ == "__main__"`` does not run. Called by ``pack`` and ``unpack``.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import threading
import types
from typing import Any

from areal.infra.rpc.errors import WireError
from areal.utils.process_pool import MAIN_ALIAS, main_origin

_CODE_TYPES = (type, types.FunctionType, types.BuiltinFunctionType)
_MAIN_NAMES = ("__main__", MAIN_ALIAS)
_ALIAS = MAIN_ALIAS

_lock = threading.Lock()
_loaded_main: tuple[str | None, str | None] | None = None  # origin of the script that _ALIAS stands for here


def is_code(value: object) -> bool:
    """Whether ``value`` is a function or a class, bound methods excluded."""
    if isinstance(value, types.BuiltinFunctionType):
        return isinstance(value.__self__, types.ModuleType)
    return isinstance(value, type | types.FunctionType)


def pack_code(value: Any) -> str | dict[str, str | None]:
    """Name of a function or class.

    Raises:
        WireError: it has no importable name (lambda, closure, interactive session).
    """
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if not module or "<" in name:
        raise WireError(
            f"{name or value!r} of module {module} cannot be sent to another process: a lambda or a function made "
            "inside a function has no importable name. Define it at the top level of a module"
        )
    if module not in _MAIN_NAMES:
        return f"{module}:{name}"
    path, main_module = _main_origin()
    if path is None and main_module is None:
        raise WireError(
            f"{name} is defined in an interactive session, which other processes cannot import; put it into a file"
        )
    return {"main": path, "module": main_module, "name": name}


def load_code(reference: Any) -> Any:
    """The function or class that :func:`pack_code` named.

    Raises:
        WireError: malformed, not importable here, or not a function or class.
    """
    if isinstance(reference, str):
        module, separator, name = reference.partition(":")
        if not separator or not module or not name:
            raise WireError(f"code reference {reference!r} must look like 'module:name'")
        here = _loaded_main is None and module == _main_origin()[1]  # our main script, run with -m
        found = find_attribute(sys.modules["__main__"] if here else _import(module), name)
    elif isinstance(reference, dict) and set(reference) == {"main", "module", "name"}:
        name = reference["name"]
        if not isinstance(name, str):
            raise WireError(f"code reference {reference!r} has no name")
        found = find_attribute(_load_main(reference["main"], reference["module"]), name)
    else:
        raise WireError(f"code reference {reference!r} must be a string or a main-script reference")
    if not isinstance(found, _CODE_TYPES):
        raise WireError(f"code reference {reference!r} names a {type(found).__name__}, not a function or class")
    return found


def find_attribute(module: Any, name: str) -> Any:
    """Attribute by dotted name; classes may be nested, modules are not entered."""
    found = module
    for part in name.split("."):
        try:
            found = found.__dict__[part]
        except (KeyError, AttributeError):
            raise WireError(
                f"{getattr(module, '__name__', module)} has no {name!r}; both processes must run the same code"
            ) from None
        if isinstance(found, types.ModuleType):
            raise WireError(f"{name!r} leads into another module; name that module")
        found = found.__func__ if isinstance(found, staticmethod) else found
    return found


def import_ours(module: str) -> Any:
    """Import a module of this package; no other is allowed for data classes and enums."""
    if not (module == "areal" or module.startswith("areal.")) or module.endswith("__main__"):
        raise WireError(
            f"type of module {module!r} refused: only data classes and enums of areal may be sent; use a dict"
        )
    return _import(module)


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except Exception as exc:  # noqa: BLE001 - whatever a user's module raises while it is imported
        raise WireError(
            f"module {module!r} cannot be imported in this process ({type(exc).__name__}: {exc}); install it or put "
            "its directory on PYTHONPATH"
        ) from exc


def _main_origin() -> tuple[str | None, str | None]:
    """Path and module name of the main script that functions of ``__main__`` come from."""
    if _loaded_main is not None:
        return _loaded_main
    return main_origin()


def _load_main(path: Any, module: Any) -> Any:
    """The module that stands for the sender's main script; run at most once per process."""
    global _loaded_main
    if not isinstance(path, str | None) or not isinstance(module, str | None) or (path is None) == (module is None):
        raise WireError("a main-script reference needs either a path or a module name")
    with _lock:
        if (path, module) == _main_origin():
            return sys.modules[_ALIAS if _loaded_main is not None else "__main__"]
        if _loaded_main is not None:
            raise WireError(
                f"main script {path or module!r} differs from {_loaded_main}, which this process has loaded"
            )
        if module is not None:
            loaded = _import(module)
        else:
            assert path is not None
            loaded = _run_script(path)
        sys.modules[_ALIAS] = loaded
        _loaded_main = (path, module)
        return loaded


def _run_script(path: str) -> types.ModuleType:
    if not path.endswith(".py") or not os.path.isfile(path):
        raise WireError(f"main script {path!r} is not a Python file here; put it where all workers see it")
    spec = importlib.util.spec_from_file_location(_ALIAS, path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[_ALIAS] = loaded  # data classes look their module up while the script runs
    try:
        spec.loader.exec_module(loaded)
    except BaseException as exc:
        del sys.modules[_ALIAS]
        if not isinstance(exc, Exception | SystemExit):
            raise
        raise WireError(
            f"main script {path!r} fails when a worker imports it ({type(exc).__name__}: {exc}); keep what starts the "
            "run under 'if __name__ == \"__main__\":'"
        ) from exc
    return loaded
