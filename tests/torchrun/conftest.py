"""One live 2-rank group per test run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes import tiny_model
from tests.torchrun.live_group import LiveGroup


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[LiveGroup]:
    group = LiveGroup(2)
    yield group
    group.close()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[LiveGroup]:
    group = LiveGroup(4)
    yield group
    group.close()


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Hugging Face directories of a model with tied embeddings and of one without; a file may have its own."""
    root = tmp_path_factory.mktemp("models")
    tiny_model("qwen2").save_pretrained(root / "tied")
    tiny_model("llama", tie_word_embeddings=False).save_pretrained(root / "untied")
    return {name: str(root / name) for name in ("tied", "untied")}
