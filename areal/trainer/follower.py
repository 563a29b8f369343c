"""The trainer of a rank that does not control: under an SPMD launcher every rank runs the script, and rank 0 controls.

The engine of this rank lives in the worker that started the script and obeys rank 0. So all that is left to do here is
to wait in ``train()`` until rank 0 has closed its trainer; then the script goes on to its end.
"""

from __future__ import annotations

import time
from typing import Any

from areal.infra.scheduler.attached import launcher_identity, released_key
from areal.utils import environ, logging, name_resolve
from areal.utils.errors import ArealError, NameEntryNotFoundError

logger = logging.getLogger("Follower")

_POLL_S = 0.5


class Follower:
    """Waits for rank 0.

    Args:
        config: experiment root; says where names are kept.
    """

    def __init__(self, config: Any) -> None:
        identity, _ = launcher_identity()
        self._key = released_key(identity.run_id)
        self._warned = False
        name_resolve.reconfigure(config.cluster.name_resolve)

    def wait(self) -> None:
        """Block until rank 0 has closed its trainer; the launcher ends this process if rank 0 fails."""
        logger.info(f"rank {environ.rank()} follows rank 0")
        while not self._released():
            time.sleep(_POLL_S)

    def _released(self) -> bool:
        try:
            return bool(name_resolve.get(self._key))
        except NameEntryNotFoundError:
            return False
        except (ArealError, OSError) as exc:
            if not self._warned:  # away for a moment; if for good, the run fails and the launcher ends this process
                self._warned = True
                logger.warning(f"the store of names does not answer: {type(exc).__name__}: {exc}")
            return False


def follow(config: Any) -> Follower | None:
    """The follower of this process; None where it controls: on rank 0, and without a launcher."""
    return None if environ.is_single_controller() or environ.rank() == 0 else Follower(config)
