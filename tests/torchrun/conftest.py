"""One live 2-rank group per test run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

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
