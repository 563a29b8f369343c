"""Weights from a trainer's ranks to a sampler in another process, by every route: log-probs agree after each update."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from areal.engine.core.remote_weights import RemotePublisher
from areal.engine.core.weight_transfer import TransferSettings
from areal.infra.weight_update import WeightUpdater
from tests.torchrun import weight_cells as cells
from tests.torchrun.live_group import LiveGroup
from tests.weight_fakes import Rollout, Worker

PROMPT = [5, 6, 7]


class LiveRanks:
    """The live ranks as the publisher calls them."""

    def __init__(self, group: LiveGroup) -> None:
        self._group = group

    def call(self, method: str, *args: Any) -> list[Any]:
        return self._group.run(cells.call_weights, method=method, args=args, first_only=False)

    def call_one(self, rank: int, method: str, *args: Any) -> Any:
        assert rank == 0
        return self._group.run(cells.call_weights, method=method, args=args, first_only=True)[0]


@pytest.fixture
def sampler_of() -> Iterator[Any]:
    made: list[Worker] = []

    def build(path: str) -> Worker:
        made.append(Worker(path))
        return made[-1]

    yield build
    for worker in made:
        worker.sampler.stop()


@pytest.mark.parametrize("mode", ["shm", "xccl", "disk"])
@pytest.mark.parametrize("layout", ["fsdp:d2", "fsdp:t2", "archon:d2", "archon:p2"])
@pytest.mark.parametrize("model", ["tied", "untied"])
def test_update_from_two_ranks_sampler_agrees_with_the_trainer(
    two_ranks: LiveGroup,
    model_dirs: dict[str, str],
    sampler_of: Any,
    tmp_path: Path,
    mode: str,
    layout: str,
    model: str,
) -> None:
    path = model_dirs[model]
    worker = sampler_of(path)
    two_ranks.run(cells.open_trainer, path=path, backend=layout)
    try:
        settings = TransferSettings(bucket_bytes=4096, timeout_s=30.0, directory=str(tmp_path))
        rollout: Any = Rollout({"rollout/0": worker})
        publisher = RemotePublisher(LiveRanks(two_ranks), rollout, mode=mode, settings=settings)
        updater = WeightUpdater(publisher, [rollout], [])
        before = worker.sample(PROMPT)[1]
        for version in (1, 2):
            two_ranks.run(cells.optimizer_step)
            updater.update(version)
            tokens, logprobs, versions = worker.sample(PROMPT)
            theirs = two_ranks.run(cells.logprobs_of, tokens=PROMPT + tokens)[0][len(PROMPT) - 1 :]
            assert logprobs == pytest.approx(theirs, abs=1e-3)
            assert versions == [version] * len(tokens)
            assert logprobs != pytest.approx(before, abs=1e-3)
            before = logprobs
    finally:
        two_ranks.run(cells.close_trainer)
