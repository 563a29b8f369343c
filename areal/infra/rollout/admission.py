"""Has an engine admit a batch of groups as one, so that what is computed together does not depend on timing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Protocol

SETTLE_S = 0.25  # the batch is admitted when every sample has asked, or when no further one asked for this long


class AdmissionGate(Protocol):
    """An engine that can queue requests without admitting them."""

    def hold_admission(self) -> None:
        """Only queue from now on."""
        ...

    def release_admission(self) -> None:
        """Admit what is queued, in order."""
        ...


def admission_gate(engine: object) -> AdmissionGate | None:
    """``engine``, if it has both methods; an engine without them simply admits as requests come."""
    if callable(getattr(engine, "hold_admission", None)) and callable(getattr(engine, "release_admission", None)):
        return engine  # type: ignore[return-value]  # checked above
    return None


async def admit_together(
    gate: AdmissionGate, starts: Sequence[Callable[[Callable[[], None]], object]], samples: int
) -> None:
    """Start groups while the engine only queues; let it admit them once every sample has asked.

    Args:
        gate: the engine.
        starts: start one group each, given a callback to be called once per sample, at its first request or its end.
        samples: how many calls to expect.
    """
    missing = samples
    progress = asyncio.Event()

    def asked() -> None:
        nonlocal missing
        missing -= 1
        progress.set()

    gate.hold_admission()
    try:
        for start in starts:
            start(asked)
        with contextlib.suppress(TimeoutError):
            while missing > 0:
                progress.clear()
                await asyncio.wait_for(progress.wait(), SETTLE_S)
        await asyncio.sleep(0)  # the last request was announced; let it reach the queue
    finally:
        gate.release_admission()
