"""The one place that reads or writes ``os.environ``: typed access to the variables that act like configuration.

Called by every layer; standard library only. Values are read when asked for, never cached at import.
"""

from __future__ import annotations

import getpass
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from areal.utils.errors import ConfigError

_TRUE = ("true", "1", "yes", "on")


def get_env(name: str, default: str | None = None) -> str | None:
    """Value of ``name``, or ``default`` when it is unset."""
    return os.environ.get(name, default)


def get_bool_env_var(name: str, default: str = "false") -> bool:
    """True when ``name`` (or ``default`` if unset) is one of true, 1, yes, on in any case."""
    return os.environ.get(name, default).strip().lower() in _TRUE


def get_int_env(name: str, default: int) -> int:
    """Integer value of ``name``; an empty or unset variable gives ``default``.

    Raises:
        ConfigError: the variable holds something that is not an integer.
    """
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    try:
        return int(text)
    except ValueError as exc:
        raise ConfigError(f"environment variable {name}={text!r} must be an integer; correct or unset it") from exc


def set_env(values: Mapping[str, str], *, overwrite: bool = True) -> None:
    """Write ``values`` into the process environment; keeps existing ones when ``overwrite`` is false."""
    for key, value in values.items():
        if overwrite:
            os.environ[key] = value
        else:
            os.environ.setdefault(key, value)


@contextmanager
def temporary_env(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set (or unset, with ``None``) variables inside a ``with`` block and restore them afterwards."""
    before = {key: os.environ.get(key) for key in values}
    try:
        _apply(values)
        yield
    finally:
        _apply(before)


def environ_copy() -> dict[str, str]:
    """Copy of the whole environment, for building the environment of a child process."""
    return dict(os.environ)


def rank() -> int:
    """Global rank of this process under torchrun or an SPMD launcher; 0 outside."""
    return get_int_env("RANK", 0)


def local_rank() -> int:
    """Rank of this process on its machine; 0 outside torchrun."""
    return get_int_env("LOCAL_RANK", 0)


def world_size() -> int:
    """Number of processes of this job; 1 outside torchrun."""
    return get_int_env("WORLD_SIZE", 1)


def is_single_controller() -> bool:
    """True unless an SPMD launcher set ``AREAL_SPMD_MODE``."""
    return not get_bool_env_var("AREAL_SPMD_MODE")


def is_in_ci() -> bool:
    """True when ``AREAL_IS_IN_CI`` says that missing components must fail instead of skip."""
    return get_bool_env_var("AREAL_IS_IN_CI")


def llm_server_addrs() -> list[str]:
    """Inference servers announced by a launcher in ``AREAL_LLM_SERVER_ADDRS`` (comma list); may be empty."""
    return [addr.strip() for addr in os.environ.get("AREAL_LLM_SERVER_ADDRS", "").split(",") if addr.strip()]


def login_user() -> str:
    """Name of the login user, used in paths and keys; ``uid<n>`` where the account has no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return f"uid{os.getuid()}"


def cache_dir() -> str:
    """Root of kernel and compile caches: ``AREAL_CACHE_DIR`` or ``<tmp>/areal-<user>``."""
    return os.environ.get("AREAL_CACHE_DIR") or os.path.join(tempfile.gettempdir(), f"areal-{login_user()}")


def colour_choice() -> bool | None:
    """False with ``NO_COLOR``, True with ``FORCE_COLOR``, None when the terminal decides."""
    if os.environ.get("NO_COLOR"):
        return False
    return True if os.environ.get("FORCE_COLOR") else None


def _apply(values: Mapping[str, str | None]) -> None:
    for key, value in values.items():
        if value is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = value
