"""Plain data (parsed YAML) to config objects and back.

In: nested dicts and lists of plain values plus a dataclass type. Out: an instance, every value converted to its
declared type; errors name the full dotted key, the value and what is allowed. Called by ``areal.api.config_loader``.
Standard library only.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import enum
import pathlib
import re
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from areal.api.config.fields import (
    MISSING,
    FieldError,
    MissingValueError,
    check_fields,
    is_section,
    members,
    plain,
    type_hints,
)
from areal.utils.errors import ConfigError

MASK = "***"
"""What a secret reads in a written config; read back, it counts as not given."""

_SECRET_KEY = re.compile(r"(^|_)(api_?key|key|token|secret|password|credentials?)$", re.IGNORECASE)


class UnknownKeyError(ConfigError):
    """A key that no config class declares; the message names the nearest one that exists."""


# ---------------------------------------------------------------------------------------------------- data -> object
def build(cls: type, data: Mapping[str, Any], path: str = "", base: Any = None) -> Any:
    """Make an instance of the dataclass ``cls`` from parsed data.

    Args:
        data: values the user wrote, by field name.
        path: dotted key of this section, for messages.
        base: instance whose values stand for the fields that ``data`` does not name; None = the class's defaults.
    Raises:
        ConfigError: unknown key, wrong type, choice or range.
    """
    specs = {spec.name: spec for spec in dataclasses.fields(cls) if spec.init}
    for key in data:
        if key not in specs:
            raise unknown_key(cls, path, str(key))
    hints = type_hints(cls)
    values: dict[str, Any] = {}
    for name, spec in specs.items():
        default = getattr(base, name) if base is not None else _default(spec)
        if name in data and not (spec.metadata.get("secret") and data[name] == MASK):
            _refuse(spec, data[name], join(path, name))
            values[name] = convert(hints[name], data[name], join(path, name), default)
        elif default is not dataclasses.MISSING:
            values[name] = default
        elif hints[name] is str:
            values[name] = MISSING
        else:
            raise MissingValueError(f"{join(path, name)} has no default and must be given")
    return _construct(cls, values, path)


def _refuse(spec: dataclasses.Field[Any], value: Any, path: str) -> None:
    reasons = spec.metadata.get("refused", {})
    if isinstance(value, str) and value in reasons:
        raise FieldError(path, value, f"another value: {reasons[value]}")


def _construct(cls: type, values: dict[str, Any], path: str) -> Any:
    try:
        config = cls(**values)
        check_fields(config)
    except FieldError as exc:
        raise exc.under(path) from None
    except ConfigError:
        raise
    except (ValueError, TypeError, AssertionError) as exc:  # raised by a __post_init__ that the user wrote
        raise ConfigError(f"{path or cls.__name__}: {exc}") from exc
    return config


def _default(spec: dataclasses.Field[Any]) -> Any:
    if spec.default is not dataclasses.MISSING:
        return spec.default
    if spec.default_factory is not dataclasses.MISSING:
        return spec.default_factory()
    return dataclasses.MISSING


def convert(hint: Any, value: Any, path: str, default: Any = None) -> Any:
    """Convert ``value`` to ``hint``; ``default`` is merged into when both it and ``value`` are sections."""
    if isinstance(value, str) and value == MISSING:
        return value
    options = members(hint)
    if value is None and (type(None) in options or Any in options):
        return None
    first_error: ConfigError | None = None
    for option in sorted((o for o in options if o is not type(None)), key=lambda o: not _is_exact(o, value)):
        try:
            return _convert_one(option, value, path, default)
        except ConfigError as exc:
            first_error = first_error or exc
    raise first_error or FieldError(path, value, "null")


def _is_exact(hint: Any, value: Any) -> bool:
    return isinstance(hint, type) and type(value) is hint


def _convert_one(hint: Any, value: Any, path: str, default: Any) -> Any:  # noqa: PLR0911  one line per kind of type
    origin = typing.get_origin(hint)
    if hint is Any:
        return value
    if origin is Literal:
        return _choice(hint, value, path)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if isinstance(value, hint):
            return value
        if not isinstance(value, Mapping):
            raise FieldError(path, value, f"a section of {hint.__name__} (keys and values)")
        return build(hint, value, path, base=default if isinstance(default, hint) else None)
    if origin in (list, tuple, set) or hint in (list, tuple, set):
        return _sequence(hint, value, path)
    if origin in (dict, Mapping) or hint is dict:
        if not isinstance(value, Mapping):
            raise FieldError(path, value, "a mapping")
        item = (typing.get_args(hint) or (Any, Any))[1]
        return {str(key): convert(item, entry, join(path, str(key))) for key, entry in value.items()}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _enum(hint, value, path)
    if hint in _SCALARS:
        return _SCALARS[hint](value, path)
    return value


def _choice(hint: Any, value: Any, path: str) -> Any:
    choices = typing.get_args(hint)
    if isinstance(value, bool) and {"on", "off"} <= set(choices):  # YAML reads the words on and off as booleans
        value = "on" if value else "off"
    for choice in choices:
        if value == choice and isinstance(value, bool) == isinstance(choice, bool):
            return choice
    near = difflib.get_close_matches(str(value), [str(choice) for choice in choices], n=1)
    hint_text = f" (did you mean {near[0]!r}?)" if near else ""
    raise FieldError(path, value, ", ".join(repr(choice) for choice in choices) + hint_text)


def _enum(hint: type[enum.Enum], value: Any, path: str) -> enum.Enum:
    for member in hint:
        if value in (member, member.name, member.value):
            return member
    raise FieldError(path, value, ", ".join(member.name for member in hint))


def _sequence(hint: Any, value: Any, path: str) -> Any:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise FieldError(path, value, "a list")
    kind = typing.get_origin(hint) or hint
    args = [arg for arg in typing.get_args(hint) if arg is not Ellipsis] or [Any]
    items = list(value)
    if kind is tuple and Ellipsis not in typing.get_args(hint) and typing.get_args(hint):
        if len(items) != len(args):
            raise FieldError(path, value, f"a list of {len(args)} values")
        return tuple(
            convert(arg, item, join(path, str(i))) for i, (arg, item) in enumerate(zip(args, items, strict=True))
        )
    return kind(convert(args[0], item, join(path, str(i))) for i, item in enumerate(items))


def _to_bool(value: Any, path: str) -> bool:
    words = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
    if isinstance(value, (bool, int)) and value in (0, 1):
        return bool(value)
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    raise FieldError(path, value, "true or false")


def _to_int(value: Any, path: str) -> int:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, (int, str)) and not isinstance(value, bool):
        try:
            return int(value)
        except ValueError:
            pass
    raise FieldError(path, value, "an integer")


def _to_float(value: Any, path: str) -> float:
    try:
        if isinstance(value, (int, float, str)) and not isinstance(value, bool):
            return float(value)
    except (ValueError, OverflowError):
        pass
    raise FieldError(path, value, "a number")


def _to_str(value: Any, path: str) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (str, int, float, pathlib.PurePath)):
        return str(value)
    raise FieldError(path, value, "a string")


_SCALARS: dict[Any, Any] = {
    bool: _to_bool,
    int: _to_int,
    float: _to_float,
    str: _to_str,
    pathlib.Path: lambda value, path: pathlib.Path(_to_str(value, path)),
}


# ------------------------------------------------------------------------------------------------------ unknown keys
_SYNONYMS = {
    "learning_rate": "lr",
    "grad_clip": "gradient_clipping",
    "warmup_ratio": "warmup_steps_proportion",
    "model_path": "path",
    "model": "path",
    "micro_batch_size": "max_tokens_per_mb",
    "num_generations": "n_samples",
    "max_tokens_per_sample": "max_new_tokens",
}
"""Names that other tools use for our keys."""


def join(path: str, name: str) -> str:
    """Append ``name`` to a dotted key."""
    return f"{path}.{name}" if path else name


def section_type(hint: Any) -> type | None:
    """The dataclass among the alternatives of ``hint``, if there is one."""
    for option in members(hint):
        if dataclasses.is_dataclass(option) and isinstance(option, type):
            return option
    return None


def all_keys(cls: type, path: str = "") -> Iterator[str]:
    """Yield every dotted key below ``cls``, sections included."""
    for spec in dataclasses.fields(cls):
        key = join(path, spec.name)
        yield key
        nested = section_type(type_hints(cls)[spec.name])
        if nested is not None:
            yield from all_keys(nested, key)


def unknown_key(cls: type, path: str, key: str) -> UnknownKeyError:
    """Return the error for ``key`` in the section ``cls`` at ``path``, with the nearest valid full key."""
    full = join(path, key)
    return UnknownKeyError(f"unknown key {full}; did you mean {join(path, _nearest(cls, key))}?")


def _nearest(cls: type, key: str) -> str:
    """Return the key below ``cls`` that ``key`` was most likely meant to be: of this section if any is close."""
    here = [spec.name for spec in dataclasses.fields(cls)]
    below: dict[str, str] = {}
    for candidate in all_keys(cls):
        below.setdefault(candidate.rpartition(".")[2], candidate)
    synonyms = {word: below[name] for word, name in _SYNONYMS.items() if name in below}
    for names, cutoff in ((here, 0.6), ([*synonyms, *below], 0.6), (here, 0.0)):
        near = difflib.get_close_matches(key, names, n=1, cutoff=cutoff)
        if near:
            return near[0] if names is here else synonyms.get(near[0], below.get(near[0], near[0]))
    return here[0]


# ---------------------------------------------------------------------------------------------------- object -> data
def to_plain(config: Any, *, mask_secrets: bool = False) -> Any:
    """Return ``config`` as nested dicts and lists of plain values, in declaration order.

    Args:
        mask_secrets: replace keys, tokens and passwords by ``***``.
    """
    if is_section(config):
        return {
            spec.name: _masked(spec.name, value, bool(spec.metadata.get("secret"))) if mask_secrets else value
            for spec in dataclasses.fields(config)
            for value in [to_plain(getattr(config, spec.name), mask_secrets=mask_secrets)]
        }
    if isinstance(config, Mapping):
        return {
            key: _masked(str(key), value, False) if mask_secrets else value
            for key, entry in config.items()
            for value in [to_plain(entry, mask_secrets=mask_secrets)]
        }
    if isinstance(config, (list, tuple, set)):
        return [to_plain(item, mask_secrets=mask_secrets) for item in config]
    if isinstance(config, enum.Enum):
        return config.name
    if isinstance(config, pathlib.PurePath):
        return str(config)
    return plain(config)


def _masked(name: str, value: Any, declared: bool) -> Any:
    secret = isinstance(value, str) and value != "" and (declared or _SECRET_KEY.search(name))
    return MASK if secret else value


def without_marks(config: Any) -> Any:
    """Return a copy of ``config`` in which no default is marked as such; libraries may not know the marked types."""
    if is_section(config):
        clone = copy.copy(config)
        for spec in dataclasses.fields(config):
            setattr(clone, spec.name, without_marks(getattr(config, spec.name)))
        return clone
    if isinstance(config, (list, tuple)):
        return type(config)(without_marks(item) for item in config)
    if isinstance(config, dict):
        return {key: without_marks(item) for key, item in config.items()}
    return plain(config)


def defaults_tree(cls: type) -> dict[str, Any]:
    """Return the defaults of ``cls`` as plain data, without constructing ``cls`` (its checks need real values)."""
    tree: dict[str, Any] = {}
    for spec in dataclasses.fields(cls):
        value = _default(spec)
        tree[spec.name] = MISSING if value is dataclasses.MISSING else to_plain(value)
    return tree


def missing_keys(config: Any, path: str = "") -> Iterator[str]:
    """Yield the dotted key of every mandatory value that was not given."""
    if is_section(config):
        for spec in dataclasses.fields(config):
            yield from missing_keys(getattr(config, spec.name), join(path, spec.name))
    elif isinstance(config, list):
        for index, item in enumerate(config):
            yield from missing_keys(item, join(path, str(index)))
    elif isinstance(config, Mapping):
        for key, item in config.items():
            yield from missing_keys(item, join(path, str(key)))
    elif isinstance(config, str) and config == MISSING:
        yield path
