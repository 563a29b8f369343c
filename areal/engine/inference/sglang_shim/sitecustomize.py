"""Lets SGLang import where there is no GPU: stand-ins for two packages that have no CPU build on the usual indexes.

Loaded by the interpreter itself at start, because the launcher puts this folder on the ``PYTHONPATH`` of SGLang servers
without a GPU, and on nothing else. SGLang imports names of ``torchvision`` (images) and ``sgl_kernel`` (GPU kernels)
that its text path on a CPU never calls: the stand-ins import, and raise when one of their names is called. A package
that is installed is left alone. Pinning memory, which needs an accelerator, becomes a no-op. Standard library only.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from typing import Any

_VERSIONS = {"torchvision": "0.0.0", "sgl_kernel": "0.4.1"}
_FACTORIES = ("empty", "full", "ones", "tensor", "zeros")
_find_spec = importlib.util.find_spec
_absent = {name for name in _VERSIONS if _find_spec(name) is None}


class _Absent:
    """A name of a package that is not there: has any attribute, can be a decorator's argument, cannot be called."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self._path}.{name}")

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError(f"{self._path} was called, and {self._path.partition('.')[0]} is not installed")


class _StandIn(types.ModuleType):
    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self.__name__}.{name}")


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in _absent:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        root = module.__name__.partition(".")[0]
        vars(module)["__version__"] = _VERSIONS[root]
        if module.__name__ == "sgl_kernel":  # imported early in each of SGLang's processes, after torch
            _unpin(sys.modules.get("torch"))


def _unpin(torch: Any) -> None:
    if torch is None or torch.cuda.is_available():
        return
    torch.Tensor.pin_memory = lambda tensor, *_, **__: tensor
    for name in _FACTORIES:
        setattr(torch, name, _without_pin(getattr(torch, name)))


def _without_pin(factory: Callable[..., Any]) -> Callable[..., Any]:
    def make(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


def _honest_find_spec(name: str, package: str | None = None) -> importlib.machinery.ModuleSpec | None:
    """Who asks whether torchvision is installed (transformers) hears that it is not."""
    return None if name.partition(".")[0] == "torchvision" else _find_spec(name, package)


if _absent:
    sys.meta_path.append(_Finder())
if "torchvision" in _absent:
    importlib.util.find_spec = _honest_find_spec
