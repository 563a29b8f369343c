"""How a configuration field is declared and checked; every config class is built from these pieces.

In: a dataclass whose fields are made by :func:`opt` and :func:`section`. Out: instances whose types, choices and ranges
were checked on construction, or a :class:`FieldError` that names key, value and what is allowed.
Called by every module of ``areal.api.config`` and by ``areal.api.config_loader``. Standard library only.

Defaults that the user did not write
------------------------------------
Some defaults of the public 1.x surface cannot be right everywhere (``attn_impl: flash_attention_2`` on a CPU), and some
should follow another key (``ref.dtype`` follows ``actor.dtype``). Such a default is an instance of :class:`DefaultStr`,
:class:`DefaultInt` or :class:`DefaultFloat`: equal to the plain value in every respect, but ``is_default(value)`` tells
that nobody wrote it. A value from a YAML file, an override or a constructor argument is a plain ``str``, ``int`` or
``float``. An engine may therefore replace a default by the best value its device can run (logging it once), and must
refuse a written one that it cannot run.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeGuard

from areal.utils.errors import ConfigError

MISSING: Any = "???"
"""Value of a field that the user must give; the loader reports every one that is left."""


class DefaultStr(str):
    """A string default that nobody wrote; see the module docstring."""


class DefaultInt(int):
    """An integer default that nobody wrote; see the module docstring."""


class DefaultFloat(float):
    """A float default that nobody wrote; see the module docstring."""


_PLAIN: dict[type, Callable[[Any], Any]] = {DefaultStr: str, DefaultInt: int, DefaultFloat: float}


def is_default(value: object) -> bool:
    """Whether ``value`` is a marked default, that is, not written by the user."""
    return type(value) in _PLAIN


def plain(value: Any) -> Any:
    """Return ``value`` without the mark of a default."""
    convert = _PLAIN.get(type(value))
    return value if convert is None else convert(value)


class FieldError(ConfigError):
    """One field holds a value that is not allowed.

    Args:
        key: full dotted key when loaded from a file, else ``ClassName.field``.
        value: what was found.
        allowed: what is allowed, as a phrase that follows "allowed: ".
    """

    def __init__(self, key: str, value: object, allowed: str) -> None:
        super().__init__(key, value, allowed)
        self.key = key
        self.value = value
        self.allowed = allowed

    def __str__(self) -> str:
        return f"{self.key}={plain(self.value)!r} is not valid; allowed: {self.allowed}"

    def under(self, prefix: str) -> FieldError:
        """Return the same error with the class name at its front replaced by the dotted ``prefix``."""
        tail = self.key.partition(".")[2] or self.key
        return FieldError(f"{prefix}.{tail}" if prefix else tail, self.value, self.allowed)


class MissingValueError(ConfigError):
    """Mandatory values were not given; the message names every one of them."""


def opt(  # noqa: PLR0913  one keyword per property of a field
    default: Any = dataclasses.MISSING,
    help: str = "",  # noqa: A002  the metadata key has this name
    *,
    factory: Callable[[], Any] | None = None,
    unit: str | None = None,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    secret: bool = False,
    refused: Mapping[str, str] | None = None,
) -> Any:
    """Declare one field: its default, its help text and its range.

    Args:
        default: default value; leave out when ``factory`` is given.
        help: one sentence for the CLI reference; unit and range are appended to it.
        factory: makes the default of a mutable type.
        unit: unit of a number, e.g. ``"s"``.
        ge, gt, le, lt: bounds of a number.
        secret: the value is masked wherever a config is written.
        refused: values known from 1.x that are not accepted, with the reason.
    """
    bounds = {name: value for name, value in (("ge", ge), ("gt", gt), ("le", le), ("lt", lt)) if value is not None}
    text = f"{help} Unit: {unit}." if unit else help
    if bounds:
        text = f"{text} Range: {describe_bounds(bounds)}."
    metadata = {"help": text, "unit": unit, "bounds": bounds, "secret": secret, "refused": dict(refused or {})}
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def section(factory: Callable[[], Any] | None, help: str) -> Any:  # noqa: A002
    """Declare a nested section; ``factory=None`` makes it null by default."""
    return opt(None, help) if factory is None else opt(help=help, factory=factory)


_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def describe_bounds(bounds: Mapping[str, float]) -> str:
    """Return bounds in words, e.g. ``> 0 and <= 1``."""
    return " and ".join(f"{_SIGNS[name]} {limit:g}" for name, limit in bounds.items())


@functools.lru_cache(maxsize=256)
def type_hints(cls: type) -> dict[str, Any]:
    """Resolved annotations of a config class, cached."""
    return typing.get_type_hints(cls)


def members(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a union (one element for any other type)."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return typing.get_args(hint)
    return (hint,)


def is_section(value: object) -> TypeGuard[Any]:
    """Whether ``value`` is an instance of a dataclass."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


@functools.lru_cache(maxsize=2048)
def _scalar_rule(cls: type, name: str) -> tuple[tuple[type, ...], tuple[Any, ...], bool, bool]:
    """What a scalar field takes: (types, choices, may be null, is scalar at all)."""
    kinds: list[type] = []
    choices: list[Any] = []
    optional = False
    for part in members(type_hints(cls)[name]):
        if part is type(None):
            optional = True
        elif typing.get_origin(part) is Literal:
            choices.extend(typing.get_args(part))
        elif part in (int, float, str, bool):
            kinds.append(part)
        else:
            return (), (), True, False
    return tuple(kinds), tuple(choices), optional, True


def describe_type(cls: type, name: str) -> str:
    """Return in words what the scalar field ``cls.name`` takes."""
    kinds, choices, optional, _ = _scalar_rule(cls, name)
    words = [repr(choice) for choice in choices] + [kind.__name__ for kind in kinds]
    return ", ".join([*words, "null"] if optional else words)


def _fits(value: object, kinds: tuple[type, ...]) -> bool:
    if isinstance(value, bool):
        return bool in kinds
    if isinstance(value, int) and float in kinds:
        return True
    return isinstance(value, kinds)


@dataclasses.dataclass(frozen=True)
class _Rule:
    """What one scalar field takes; made once per class, since sections are constructed per request."""

    name: str
    kinds: tuple[type, ...]
    choices: tuple[Any, ...]
    bounds: Mapping[str, float]
    refused: Mapping[str, str]
    free: frozenset[type]
    """Types whose values need no further look."""


@functools.lru_cache(maxsize=256)
def _rules(cls: Any) -> tuple[_Rule, ...]:
    rules = []
    for spec in dataclasses.fields(cls):
        kinds, choices, optional, scalar = _scalar_rule(cls, spec.name)
        if scalar:
            bounds, refused = spec.metadata.get("bounds", {}), spec.metadata.get("refused", {})
            free = {type(None)} if optional else set()
            if not bounds and not refused:
                free.update(kinds)
            rules.append(_Rule(spec.name, kinds, choices, bounds, refused, frozenset(free)))
    return tuple(rules)


def check_fields(config: Any) -> None:
    """Check type, choice and range of every scalar field of one section.

    Raises:
        FieldError: names class, field, value and what is allowed.
    """
    cls: Any = type(config)
    for rule in _rules(cls):
        value = getattr(config, rule.name)
        if type(value) not in rule.free:
            _check(cls, rule, plain(value))


def _check(cls: type, rule: _Rule, value: Any) -> None:
    key = f"{cls.__name__}.{rule.name}"
    if isinstance(value, str):
        if value == MISSING:
            return
        if value in rule.refused:
            raise FieldError(key, value, f"{describe_type(cls, rule.name)} ({rule.refused[value]})")
    if not _fits(value, rule.kinds) and not (isinstance(value, (str, int, float)) and value in rule.choices):
        raise FieldError(key, value, describe_type(cls, rule.name))
    if rule.bounds and not all(_inside(value, sign, limit) for sign, limit in rule.bounds.items()):
        raise FieldError(key, value, describe_bounds(rule.bounds))


def _inside(value: float, sign: str, limit: float) -> bool:
    if sign == "ge":
        return value >= limit
    if sign == "gt":
        return value > limit
    return value <= limit if sign == "le" else value < limit


class ConfigSection:
    """Base of every config class: checks its scalar fields on construction."""

    def __post_init__(self) -> None:
        check_fields(self)

    def fail(self, name: str, allowed: str) -> FieldError:
        """Return (not raise) the error for field ``name``."""
        return FieldError(f"{type(self).__name__}.{name}", getattr(self, name), allowed)
