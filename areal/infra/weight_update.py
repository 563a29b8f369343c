"""The one sequence around a weight update, and the only caller of pause and resume.

    stage (copy, records compared) -> pause -> commit -> version set on executors, then engines -> resume

Generation goes on under the old version while weights are staged. On failure nothing was switched: the old version goes
on and the error says so. Publishers and receivers only move bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

from areal.api.engine_api import WeightPublisher
from areal.utils import logging
from areal.utils.errors import WeightSyncError

logger = logging.getLogger("WeightUpdate")


class Versioned(Protocol):
    """Anything that carries a weight version."""

    def set_version(self, version: int) -> None:
        """Record ``version``."""
        ...


class Pausable(Protocol):
    """A sampler that can be frozen between two decode steps."""

    def pause(self) -> None:
        """Freeze; returns when frozen."""
        ...

    def resume(self) -> None:
        """Go on."""
        ...


class WeightUpdater:
    """Brings samplers, executors and engines to a new weight version, together.

    Args:
        publisher: moves the bytes.
        samplers: frozen while weights change.
        followers: told the new version in this order: executors first, then engines.
    """

    def __init__(
        self, publisher: WeightPublisher, samplers: Sequence[Pausable], followers: Sequence[Versioned]
    ) -> None:
        self.publisher = publisher
        self.samplers = list(samplers)
        self.followers = list(followers)
        self._lock = threading.Lock()

    def update(self, version: int) -> None:
        """Publish the trainer's weights as ``version``; blocks until every sampler holds them.

        Raises:
            WeightSyncError: a receiver got something else than was sent, or failed; the old version stays in service.
        """
        with self._lock:
            paused: list[Any] = []
            try:
                self.publisher.stage(version)
                for sampler in self.samplers:
                    sampler.pause()
                    paused.append(sampler)
                self.publisher.commit(version)
            except BaseException as exc:  # an interrupt too leaves the publisher ready for whoever waits for it
                self._discard(version)
                if not isinstance(exc, Exception):
                    raise
                raise WeightSyncError(
                    f"weights v{version} were not published; the old version stays in service"
                ) from exc
            else:
                for follower in self.followers:
                    follower.set_version(version)
            finally:
                for sampler in reversed(paused):
                    sampler.resume()
        logger.debug(f"weights v{version} published")

    def _discard(self, version: int) -> None:
        """Give a version up; what fails here must not hide why."""
        try:
            self.publisher.discard()
        except Exception as exc:  # noqa: BLE001 - the update has failed already, for another reason
            logger.error(f"weights v{version} were not given up everywhere: {exc}")
