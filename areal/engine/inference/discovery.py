"""Finds inference servers that somebody else runs: named by the caller, registered for the trial, or by a variable.

Out: ``host:port`` of each. Called by ``remote_engine``, ``server_sampler`` and the builders of runs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from areal.utils import environ, name_resolve, names
from areal.utils.errors import ConfigError
from areal.utils.network import format_hostport, split_hostport

REGISTERED_WAIT_S = 1.0
_POLL_S = 0.1


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
    return name_resolve.add_subentry(names.gen_servers(experiment_name, trial_name), address)


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
