"""Shared fixtures: data that is found through AREAL_TEST_DATA, one thread per test process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.signals import restore_default_signals

restore_default_signals()
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def test_data() -> Path:
    """Directory with ``gsm8k/`` and ``geometry3k/``; skips with the reason where it is not there."""
    root = os.environ.get("AREAL_TEST_DATA")
    if not root or not Path(root).is_dir():
        pytest.skip("AREAL_TEST_DATA does not name a directory with the test data")
    return Path(root)


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Qwen2 with the character tokenizer, saved once per test run."""
    from tests.fakes import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "qwen2")
