"""Who this process belongs to: the run's id and the secret token that every request of that run carries.

The controller makes both, writes the token to a file that only its user can read, and passes the path to the workers.
"""

from __future__ import annotations

import hmac
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from areal.utils.errors import ConfigError, SchedulerError
from areal.utils.network import new_run_id, new_token


@dataclass(frozen=True)
class RunIdentity:
    """``run_id`` tells runs apart (not secret); ``token`` authorises."""

    run_id: str
    token: str = field(repr=False)

    @classmethod
    def new(cls) -> RunIdentity:
        """A fresh identity, from the operating system's randomness."""
        return cls(new_run_id(), new_token())

    def matches_token(self, token: str) -> bool:
        """Compare without telling by time how much is right."""
        return hmac.compare_digest(self.token.encode(), token.encode("utf-8", "surrogateescape"))


_identity: RunIdentity | None = None


def set_identity(identity: RunIdentity) -> None:
    """Make ``identity`` the one that clients of this process use by default."""
    global _identity
    _identity = identity


def get_identity() -> RunIdentity:
    """The identity of this process.

    Raises:
        SchedulerError: none was set.
    """
    if _identity is None:
        raise SchedulerError("this process belongs to no run: call set_identity(RunIdentity(run_id, token)) first")
    return _identity


def write_token(path: str | os.PathLike[str], token: str) -> None:
    """Write the token so that only this user can read it (mode 0600), replacing an older file."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}-{secrets.token_hex(8)}")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="ascii") as file:
        file.write(token)
    os.replace(aside, target)


def read_token(path: str | os.PathLike[str]) -> str:
    """Read a token file.

    Raises:
        ConfigError: missing, unreadable or empty.
    """
    try:
        token = Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(
            f"token file {os.fspath(path)!r} cannot be read ({exc}); only the user it was written for can read it"
        ) from exc
    if not token:
        raise ConfigError(f"token file {os.fspath(path)!r} is empty; write the token into it")
    return token
