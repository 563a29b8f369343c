"""A rollout worker hears of its sampler's end, whenever and on whatever thread that comes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from areal.api.config.inference import NativeConfig
from areal.engine.inference import rollout_worker
from areal.engine.inference.rollout_worker import NATIVE_SAMPLER, RolloutSetup, RolloutWorker
from areal.utils.errors import EngineError
from tests.rollout_fakes import config

DEAD = "tests.controller.test_rollout_worker.dead_sampler"


def dead_sampler(_: RolloutSetup) -> Any:
    """One whose servers ended as soon as it was connected: it will tell nobody any more."""
    return SimpleNamespace(failure=EngineError("the server ended"), on_failure=None, stop=lambda: None)


@contextmanager
def worker_of(sampler: str, model: str) -> Iterator[RolloutWorker]:
    setup = RolloutSetup(config(), NativeConfig(num_threads=1), model, model, "float32", 1, sampler=sampler)
    worker = RolloutWorker(setup)
    try:
        yield worker
    finally:
        worker.destroy()


def test_worker_whose_sampler_failed_before_it_listened_is_not_well() -> None:
    with worker_of(DEAD, "") as worker:
        assert not worker.is_well()
        with pytest.raises(EngineError, match="the server ended"):
            asyncio.run(worker.collect(0, 10.0))


def test_worker_whose_embedded_engine_fails_tells_whoever_collects(
    tiny_model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise MemoryError("no block is free")

    async def collect_while_it_fails(worker: RolloutWorker) -> None:
        collecting = asyncio.ensure_future(worker.collect(0, 30.0))
        await asyncio.sleep(0)
        with pytest.raises(MemoryError):
            await asyncio.to_thread(worker.sampler._worker.call, fail)
        assert (await collecting)[1] == []  # woken
        with pytest.raises(MemoryError, match="no block is free"):
            await worker.collect(0, 30.0)

    monkeypatch.setattr(rollout_worker, "_SETTLE_S", 0.0)
    with worker_of(NATIVE_SAMPLER, tiny_model_dir) as worker:
        assert worker.is_well()
        asyncio.run(asyncio.wait_for(collect_while_it_fails(worker), 20))
        assert not worker.is_well()
