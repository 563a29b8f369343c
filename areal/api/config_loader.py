"""From a YAML file and command-line overrides to a checked config object.

In: ``argv``. Out: an instance of the experiment's dataclass with every interpolation resolved, every value converted,
checked and inherited; or a ``ConfigError`` that names the full key. ``areal.api.cli_args`` is the public face of this
module. omegaconf (parsing and interpolation) is imported where it is used.

    argv --parse--> raw tree (as written) --resolve ${...} against written values over defaults--> plain data
         --build--> dataclasses --inherit, missing, backends--> config
"""

from __future__ import annotations

import argparse
import copy
import re
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from areal.api.config.advice import advise
from areal.api.config.convert import build, defaults_tree, join, missing_keys, to_plain
from areal.api.config.fields import MISSING, FieldError, MissingValueError, is_section
from areal.api.config.inherit import inherit
from areal.utils import logging
from areal.utils.errors import ConfigError

logger = logging.getLogger("Config")

DRY_RUN: ContextVar[bool] = ContextVar("areal_dry_run", default=False)
"""Set by ``areal train --dry-run``: nothing is written, and trainers print their plan and stop."""

FORMAT_VERSION = 1
"""Version of the written ``config.yaml``; the key ``format_version`` holds it."""

_LEGACY = ("behave_imp_weight_cap", "behave_imp_weight_mode")
_LEGACY_HELP = (
    "was replaced by rejection_sampling. mode disabled: rejection_sampling: null; token_mask with cap X: "
    "{level: token, action: mask, metric: ratio, upper: X}; token_truncate: the same with action: clamp; "
    "sequence_mask and sequence_truncate: the same with level: sequence"
)


class ConfigFileError(ConfigError, OSError):
    """The configuration file cannot be found or read."""


# ------------------------------------------------------------------------------------------------------------ parsing
def parse_argv(argv: Sequence[str]) -> tuple[dict[str, Any], Path]:
    """Read ``--config FILE`` and apply the overrides.

    Returns: the tree as written (interpolations unresolved) and the path of the file.
    Raises:
        ConfigFileError: no such file, or no valid YAML.
        ConfigError: an argument that is no override, or an override that does not fit the tree.
        SystemExit: ``--config`` is missing (argparse, exit code 2).
    """
    args = list(argv[1:] if argv and argv[0].endswith(".py") else argv)
    parser = argparse.ArgumentParser(allow_abbrev=False, description="Overrides: key=value, +key=value, ~key.")
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML file of the experiment")
    known, overrides = parser.parse_known_args(args)
    path = Path(known.config)
    tree = read_yaml(path)
    for override in overrides:
        apply_override(tree, override)
    return tree, path


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the content of a YAML file as plain data; ``1e-6`` is a number, interpolations stay text.

    A ``defaults`` list merges the named sibling files first (``_self_`` marks this file's own place).
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    if not path.is_file():
        raise ConfigFileError(f"{path}: no such file; give an existing YAML file with --config")
    try:
        loaded = OmegaConf.load(path)
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as exc:
        raise ConfigFileError(f"{path}: not a valid YAML file: {exc}") from exc
    tree = OmegaConf.to_container(loaded, resolve=False)
    if not isinstance(tree, dict):
        raise ConfigFileError(f"{path}: expected keys and values at the top level, found a {type(tree).__name__}")
    version = tree.pop("format_version", FORMAT_VERSION)
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise ConfigFileError(f"{path}: format_version={version!r}; this version reads up to {FORMAT_VERSION}")
    return _compose({str(key): value for key, value in tree.items()}, path)


def _compose(tree: dict[str, Any], path: Path) -> dict[str, Any]:
    names = tree.pop("defaults", None)
    if not isinstance(names, list):
        return tree
    if "_self_" not in names:
        names = [*names, "_self_"]
    merged: dict[str, Any] = {}
    for name in names:
        if not isinstance(name, str):
            raise ConfigFileError(f"{path}: defaults entry {name!r}: give names of YAML files beside this one")
        part = tree if name == "_self_" else read_yaml(path.with_name(name).with_suffix(".yaml"))
        merged = overlay(merged, part)
    return merged


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Apply one ``key=value``, ``+key=value``, ``++key=value`` or ``~key`` to ``tree`` in place."""
    deletes = override.startswith("~")
    key, equals, text = override.lstrip("+~").partition("=")
    key = re.sub(r"\[(\d+)\]", r".\1", key.strip())
    if not key or override.startswith("-") or not (equals or deletes) or not re.fullmatch(r"[\w.-]+", key):
        raise ConfigError(f"{override!r} is not an override; write key=value, +key=value, ++key=value or ~key")
    names = key.split(".")
    if deletes:
        _delete(tree, names, parse_value(text) if equals else None, conditional=bool(equals))
    else:
        _assign(tree, names, parse_value(text))


def parse_value(text: str) -> Any:
    """Return the value of an override: null, numbers, booleans, lists, mappings and quoted text as in YAML."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    text = text.strip()
    if not text:
        return ""
    if text.startswith(("[", "{")):
        text = re.sub(r"(?<![\"'])\$\{[^{}]*\}(?![\"'])", r'"\g<0>"', text)  # ${...} is no plain text inside [] and {}
        text = re.sub(r"([{,]\s*[\w.-]+):(?=\S)", r"\1: ", text)  # {a:1} means {a: 1}
    elif text.startswith("${"):
        return text
    try:
        return OmegaConf.to_container(OmegaConf.create(f"v: {text}"), resolve=False)["v"]  # type: ignore[index,call-overload]
    except (YAMLError, OmegaConfBaseException, TypeError, KeyError):
        return text


def _assign(tree: dict[str, Any], names: list[str], value: Any) -> None:
    node: Any = tree
    for depth, name in enumerate(names[:-1]):
        child = _get(node, name, names[: depth + 1])
        if child is None:
            child = {}
            _put(node, name, child)
        node = child
    last = names[-1]
    old = _get(node, last, names)
    _put(node, last, overlay(old, value) if isinstance(old, dict) and isinstance(value, dict) else value)


def _get(node: Any, name: str, so_far: list[str]) -> Any:
    if isinstance(node, dict):
        return node.get(name)
    if isinstance(node, list):
        if name.isdigit() and int(name) < len(node):
            return node[int(name)]
        raise ConfigError(f"{'.'.join(so_far)}: the list has {len(node)} entries (0 to {len(node) - 1})")
    raise ConfigError(f"{'.'.join(so_far)}: {'.'.join(so_far[:-1])}={node!r} is a value, not a section")


def _put(node: Any, name: str, value: Any) -> None:
    if isinstance(node, list):
        node[int(name)] = value
    else:
        node[name] = value


def _delete(tree: dict[str, Any], names: list[str], expected: Any, *, conditional: bool) -> None:
    key = ".".join(names)
    node: Any = tree
    for depth, name in enumerate(names):
        parent, node = node, _get(node, name, names[: depth + 1]) if isinstance(node, (dict, list)) else None
        if node is None and not (isinstance(parent, dict) and name in parent):
            raise ConfigError(f"~{key}: {key} is not in the file, so it cannot be deleted")
    if conditional and node != expected:
        raise ConfigError(f"~{key}={expected!r}: the file has {key}={node!r}")
    parent.pop(int(names[-1]) if isinstance(parent, list) else names[-1])


# ---------------------------------------------------------------------------------------------------- interpolation
def overlay(below: Any, above: Any) -> Any:
    """Return ``above`` laid over ``below``: sections merge; lists are replaced, or changed where keys are indices."""
    if isinstance(below, dict) and isinstance(above, Mapping):
        merged = dict(below)
        for key, value in above.items():
            merged[key] = overlay(merged.get(key), value)
        return merged
    if isinstance(below, list) and isinstance(above, Mapping) and above and all(str(key).isdigit() for key in above):
        items = list(below)
        for key, value in above.items():
            if int(key) >= len(items):
                raise ConfigError(f"index {key} is out of range; the list has {len(items)} entries")
            items[int(key)] = overlay(items[int(key)], value)
        return items
    return copy.deepcopy(above)


def resolve(tree: dict[str, Any], cls: type) -> dict[str, Any]:
    """Replace every ``${...}`` in ``tree``; it may name any declared key, whether written or not."""
    from omegaconf import OmegaConf

    defaults = defaults_tree(cls)
    _link_names(defaults)
    resolved: dict[str, Any] = _pick(tree, OmegaConf.create(overlay(defaults, tree)), "")
    return resolved


def _link_names(defaults: dict[str, Any]) -> None:
    """Let ``${saver.trial_name}`` and the like work although such names are inherited only later."""
    sources = {
        "experiment_name": "${experiment_name}",
        "trial_name": "${trial_name}",
        "fileroot": "${cluster.fileroot}",
    }
    for name, part in defaults.items():
        if isinstance(part, dict) and name != "cluster":
            for key, source in sources.items():
                if part.get(key) in (MISSING, None) and key in part:
                    part[key] = source


def _pick(written: Any, resolved: Any, path: str) -> Any:
    """Return the values of ``resolved`` at the keys of ``written``."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(written, dict) and OmegaConf.is_dict(resolved):
        return {key: _pick_item(value, resolved, key, join(path, str(key))) for key, value in written.items()}
    if isinstance(written, list) and OmegaConf.is_list(resolved):
        return [_pick_item(value, resolved, i, join(path, str(i))) for i, value in enumerate(written)]
    if OmegaConf.is_config(resolved):
        try:
            return OmegaConf.to_container(resolved, resolve=True)
        except OmegaConfBaseException as exc:
            raise ConfigError(f"{path}={written!r}: {_first_line(exc)}") from exc
    return resolved


def _pick_item(written: Any, parent: Any, key: Any, path: str) -> Any:
    from omegaconf.errors import OmegaConfBaseException

    if written is None or (isinstance(written, str) and "${" not in written):
        return written
    try:
        value = parent[key]
    except OmegaConfBaseException as exc:
        raise ConfigError(f"{path}={written!r}: {_first_line(exc)}") from exc
    return _pick(written, value, path)


def _first_line(exc: BaseException) -> str:
    return str(exc).strip().splitlines()[0]


# ----------------------------------------------------------------------------------------------------------- checking
def make_config(tree: dict[str, Any], cls: type) -> Any:
    """Turn a raw tree into a checked instance of ``cls``.

    Raises:
        MissingValueError: names every mandatory value that is not given.
        ConfigError: anything else that is wrong, with its full key.
    """
    _refuse_legacy(tree)
    try:
        config = build(cls, resolve(tree, cls))
    except FieldError as exc:
        raise _with_origin(exc, tree) from None
    if is_section(getattr(config, "cluster", None)):
        inherit(config)
    absent = list(missing_keys(config))
    if absent:
        raise MissingValueError(
            f"mandatory values are missing: {', '.join(absent)}; add them to the YAML or as key=value"
        )
    check_backends(config)
    for message in advise(config):
        logger.warning(message)
    return config


def _with_origin(error: FieldError, tree: dict[str, Any]) -> FieldError:
    """Add to ``error`` which interpolation of the file the bad value came from, if any."""
    node: Any = tree
    for depth, name in enumerate(names := error.key.split(".")):
        node = node.get(name) if isinstance(node, dict) else None
        if isinstance(node, str) and "${" in node:
            origin = f"the file has {'.'.join(names[: depth + 1])}: {node}"
            return FieldError(error.key, error.value, f"{error.allowed} ({origin})")
    return error


def _refuse_legacy(tree: Mapping[str, Any], path: str = "") -> None:
    for key, value in tree.items():
        if key in _LEGACY:
            raise ConfigError(f"{join(path, key)}={value!r} {_LEGACY_HELP}")
        if isinstance(value, Mapping):
            _refuse_legacy(value, join(path, str(key)))


def check_backends(config: Any) -> None:
    """Parse every ``*.backend`` string of the sections of ``config``."""
    from areal.api.alloc_mode import INFERENCE_BACKENDS, TRAIN_BACKENDS, ModelAllocation
    from areal.api.config.rollout import InferenceEngineConfig
    from areal.api.config.train import TrainEngineConfig

    for name, part in vars(config).items():
        if not isinstance(part, (TrainEngineConfig, InferenceEngineConfig)):
            continue
        allowed = TRAIN_BACKENDS if isinstance(part, TrainEngineConfig) else INFERENCE_BACKENDS
        try:
            allocation = ModelAllocation.from_str(part.backend, name=name)
        except ConfigError as exc:
            raise ConfigError(f"{name}.backend={part.backend!r}: {exc}") from exc
        if allocation.backend not in allowed:
            raise ConfigError(f"{name}.backend={part.backend!r} is not valid; allowed backends: {', '.join(allowed)}")


# ------------------------------------------------------------------------------------------------------------ writing
def write_config(config: Any, path: Path) -> None:
    """Write ``config`` as YAML in declaration order, secrets masked, so that it can be loaded again."""
    from omegaconf import OmegaConf

    from areal.utils import fs

    data = {"format_version": FORMAT_VERSION, **to_plain(config, mask_secrets=True)}
    path.parent.mkdir(parents=True, exist_ok=True)
    fs.atomic_write_text(path, OmegaConf.to_yaml(OmegaConf.create(data)))
