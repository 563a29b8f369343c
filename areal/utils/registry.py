"""String -> object tables: each package keeps one ``Registry`` in its ``__init__``; nobody writes ``if name in path``.

Entries may be objects or import strings; a string is imported at its first use, so a table costs nothing at import.
``lazy_exports`` gives a package the ``__getattr__`` that resolves its public names the same way.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from areal.utils.dynamic_import import import_from_string
from areal.utils.errors import ConfigError

T = TypeVar("T")


class UnknownNameError(ConfigError, KeyError):
    """A registry has no such name; the message lists the known ones and the nearest."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class Registry(Generic[T]):
    """Named objects of one kind.

    Args:
        kind: what the entries are, for messages ("dataset", "train backend").
        entries: initial table; a value that is a string is an import path.
    """

    def __init__(self, kind: str, entries: Mapping[str, T | str] | None = None) -> None:
        self.kind = kind
        self._entries: dict[str, T | str] = dict(entries or {})

    def register(self, name: str, target: T | str | None = None, *, replace: bool = False) -> Callable[[T], T]:
        """Add ``target`` under ``name``; without a target, returns a decorator that adds what it decorates.

        Raises:
            ConfigError: the name is taken and ``replace`` is false.
        """

        def add(obj: T | str) -> None:
            if name in self._entries and not replace and self._entries[name] != obj:
                raise ConfigError(f"{self.kind} {name!r} is already registered; pass replace=True to override it")
            self._entries[name] = obj

        if target is not None:
            add(target)

        def decorator(obj: T) -> T:
            add(obj)
            return obj

        return decorator

    def get(self, name: str) -> T:
        """The object called ``name``, imported if need be.

        Raises:
            UnknownNameError: no such name (a ``ValueError`` and a ``KeyError``).
        """
        if name not in self._entries:
            raise UnknownNameError(unknown_name_message(self.kind, name, self.names()))
        target = self._entries[name]
        if isinstance(target, str):
            loaded: T = import_from_string(target)
            self._entries[name] = loaded
            return loaded
        return target

    def names(self) -> list[str]:
        """Known names, sorted."""
        return sorted(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())


def unknown_name_message(kind: str, name: str, known: list[str]) -> str:
    """``unknown <kind> 'x'; did you mean 'y'? known: …`` for errors about a name out of a fixed set."""
    near = difflib.get_close_matches(str(name), known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ";"
    return f"unknown {kind} {name!r}{hint} known: {', '.join(known) or 'none'}"


def lazy_exports(module_name: str, table: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``(__getattr__, __dir__)`` of a package whose public names are imported at first use.

    Args:
        module_name: the package's ``__name__``.
        table: public name -> import path ``"package.module.Name"``.
    """

    def module_getattr(name: str) -> Any:
        if name not in table:
            raise AttributeError(f"module {module_name!r} has no attribute {name!r}")
        value = import_from_string(table[name])
        setattr(sys.modules[module_name], name, value)
        return value

    def module_dir() -> list[str]:
        return sorted({*vars(sys.modules[module_name]), *table})

    return module_getattr, module_dir
