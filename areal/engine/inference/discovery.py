"""Finds inference servers that somebody else runs: named by the caller, registered for the trial, or by a variable.

Out: ``host:port`` of each, and the token that they want. Called by remote engines, ``server_sampler`` and the builders
of runs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from areal.infra.rpc.identity import read_token
from areal.utils import environ, name_resolve, names
from areal.utils.errors import ConfigError
from areal.utils.network import format_hostport, new_token, split_hostport

REGISTERED_WAIT_S = 1.0
_POLL_S = 0.1
_REGISTERED_TTL_S = 30.0  # after which an entry goes whose process was killed
_TOKEN_FILE = "AREAL_LLM_SERVER_TOKEN_FILE"


def find_servers(
    addresses: str | Sequence[str] | None = None,
    experiment_name: str | None = None,
    trial_name: str | None = None,
    *,
    wait_s: float = REGISTERED_WAIT_S,
) -> list[str]:
    """Addresses given, else those registered under ``gen_servers`` of the trial, else ``AREAL_LLM_SERVER_ADDRS``.

    Args:
        addresses: one, several, or a comma list of several.
        experiment_name, trial_name: where to look for registered ones; nowhere without both.
        wait_s: how long to wait for the first registered one.

    Returns: each once, in the order found; empty if there are none.
    Raises:
        ConfigError: an address is not ``host:port``.
    """
    given = addresses.split(",") if isinstance(addresses, str) else list(addresses or ())
    if any(text.strip() for text in given):
        return _checked(given, "the address of an inference server")
    if experiment_name and trial_name:
        registered = _registered(names.gen_servers(experiment_name, trial_name), wait_s)
        if registered:
            return _checked(registered, "the address of a registered inference server")
    return _checked(environ.llm_server_addrs(), "AREAL_LLM_SERVER_ADDRS")


def register_server(experiment_name: str, trial_name: str, address: str) -> str:
    """Let :func:`find_servers` of the trial find ``address``; returns the key, which goes when this process ends."""
    root = names.gen_servers(experiment_name, trial_name)
    return name_resolve.add_subentry(root, address, keepalive_ttl=_REGISTERED_TTL_S)


def token_file() -> str:
    """Path of the file with the token that external servers want (``AREAL_LLM_SERVER_TOKEN_FILE``); empty: none."""
    path = environ.get_env(_TOKEN_FILE)
    return os.path.abspath(path) if path else ""


def server_token(path: str | None = None) -> str:
    """What to send to servers as a bearer token: the content of ``path``, else a new one for servers of our own.

    Args:
        path: as :func:`token_file` gives it, which is asked if this is None.

    Raises:
        ConfigError: the file cannot be read, or is empty.
    """
    path = token_file() if path is None else path
    if not path:
        return new_token()
    try:
        return read_token(path)
    except ConfigError as exc:
        raise ConfigError(f"{_TOKEN_FILE}: {exc}") from exc


def _registered(root: str, wait_s: float) -> list[str]:
    deadline = time.monotonic() + wait_s
    while not (found := name_resolve.get_subtree(root)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return found


def _checked(addresses: Sequence[str], where: str) -> list[str]:
    kept: dict[str, None] = {}
    for text in addresses:
        bare = text.strip().removeprefix("http://").rstrip("/")
        if not bare:
            continue
        try:
            kept[format_hostport(*split_hostport(bare))] = None
        except ValueError as exc:
            raise ConfigError(f"{where}: {exc}") from exc
    return list(kept)
