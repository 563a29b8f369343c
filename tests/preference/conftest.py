"""One tiny model per test run, shared by the tests of preference runs."""

from __future__ import annotations

import pytest

from tests.trainer_runs import tiny_policy


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Hugging Face directory of the initial model."""
    return tiny_policy(tmp_path_factory.mktemp("model"))
