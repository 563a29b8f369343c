"""Three seeds of the chaos runs; ``make full`` plays twenty."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos import seeds
from tests.full.cell import CellContext

CHOSEN = (66, 277, 86)  # a rollout worker, a train worker, the controller


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the seeds have in common."""
    return tmp_path_factory.mktemp("chaos")


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("seed", CHOSEN)
def test_run_whose_processes_are_killed_finishes_and_trains_every_row_once(
    seed: int, shared: Path, tmp_path: Path
) -> None:
    context = CellContext(tmp_path, shared)
    seeds.run(context, seed)
    assert not context.failures, (context.facts, context.failures)
