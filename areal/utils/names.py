"""Keys of name_resolve, and the user part of every path: who registers under which name is written here only.

``<user>/<experiment>/<trial>`` is the root of a trial; launchers clear it before a run.
"""

from __future__ import annotations

from areal.utils import environ


def trial_root(experiment_name: str, trial_name: str) -> str:
    """Root of everything a trial registers."""
    return f"{environ.login_user()}/{experiment_name}/{trial_name}"


def gen_servers(experiment_name: str, trial_name: str) -> str:
    """Directory of inference servers; each adds a random child whose value is ``host:port``."""
    return f"{trial_root(experiment_name, trial_name)}/gen_servers"


def update_weights_from_disk(experiment_name: str, trial_name: str, version: int) -> str:
    """Timestamp (seconds) at which weights of ``version`` were complete on disk."""
    return f"{trial_root(experiment_name, trial_name)}/update_weights_from_disk/{version}"


def worker_root(experiment_name: str, trial_name: str, role: str | None = None) -> str:
    """Directory of the workers of one role, or of all roles."""
    root = f"{trial_root(experiment_name, trial_name)}/workers"
    return root if role is None else f"{root}/{role}"


def worker(experiment_name: str, trial_name: str, role: str, index: int | str) -> str:
    """Address ``host:port`` of one worker."""
    return f"{worker_root(experiment_name, trial_name, role)}/{index}"


def trial_registry(experiment_name: str, trial_name: str) -> str:
    """Marks a trial as known, outside its own subtree."""
    return f"trial_registry/{trial_root(experiment_name, trial_name)}"
