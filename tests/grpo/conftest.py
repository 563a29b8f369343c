"""One tiny policy per test run, shared by the GRPO tests."""

from __future__ import annotations

import pytest

from tests.trainer_runs import tiny_policy


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Hugging Face directory of the initial policy."""
    return tiny_policy(tmp_path_factory.mktemp("policy"))
