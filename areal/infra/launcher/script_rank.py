"""One copy of the user's script, started and watched by the worker of its rank.

Hosted as ``script/<rank>`` by a launcher. The script is a child of the worker: same machine, same devices, same log. It
ends with the worker, however that ends.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from pathlib import Path

from areal.api.remote import remote
from areal.infra.rpc.children import Children
from areal.infra.rpc.identity import get_identity, write_token
from areal.infra.scheduler.attached import RUN_ID, TOKEN_FILE

_ROLE = "script"


class ScriptRank:
    """A running script.

    Args:
        rank: its number.
        arguments: the script and its arguments.
        env: variables to add to the worker's.
        directory: where it runs, if that exists here.
    """

    def __init__(self, rank: int, arguments: list[str], env: dict[str, str], directory: str) -> None:
        identity = get_identity()
        self._rank = rank
        self._secrets = Path(tempfile.mkdtemp(prefix="areal-"))
        token = self._secrets / "token"
        write_token(token, identity.token)
        self._children = Children()
        self._children.start(
            _ROLE,
            rank,
            [sys.executable, *arguments],
            {**env, RUN_ID: identity.run_id, TOKEN_FILE: str(token), "PYTHONUNBUFFERED": "1"},
            directory=directory if Path(directory).is_dir() else None,
        )

    @remote(concurrent=True, idempotent=True)
    async def wait(self, limit_s: float) -> int | None:
        """The script's exit status (negative: the signal that ended it); None if it still runs after ``limit_s``."""
        return await asyncio.to_thread(self._children.wait, _ROLE, self._rank, limit_s)

    def destroy(self) -> None:
        """End the script and what it started."""
        self._children.stop_all()
        shutil.rmtree(self._secrets, ignore_errors=True)
