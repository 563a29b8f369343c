"""Splitting CPU threads between sampler and trainer."""

from __future__ import annotations

import pytest
import torch

from areal.utils.threads import release_thread_pool, split_threads


@pytest.mark.parametrize(("available", "expected"), [(1, (1, 1)), (2, (1, 2)), (4, (2, 3)), (16, (8, 9))])
def test_split_threads_any_count_teams_fit_the_cores(available: int, expected: tuple[int, int]) -> None:
    sampler, trainer = split_threads(available)
    assert (sampler, trainer) == expected
    members = (sampler - 1) + (trainer - 1) + 1  # pool members, and the process's first thread
    assert members <= available


def test_release_thread_pool_after_parallel_work_next_result_is_the_same() -> None:
    a = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    before = a @ a
    release_thread_pool()
    torch.testing.assert_close(a @ a, before, rtol=0, atol=0)
