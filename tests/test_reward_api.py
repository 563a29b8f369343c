"""AsyncRewardWrapper: what counts as a reward, where functions run, and what a bad one costs."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time

import numpy as np
import psutil
import pytest
import torch

from areal.api.reward_api import AsyncRewardWrapper, RewardTimeoutError, RewardValueError, reward_value
from areal.utils.errors import RewardError
from areal.utils.process_pool import close_pools
from tests import reward_fakes
from tests.rollout_fakes import FunctionWorkflow, config, executor, loader, table

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True, scope="module")
def _pools():
    yield
    close_pools()


@pytest.mark.parametrize("value", [1, 1.0, True, np.float32(1), np.array([1.0]), torch.tensor(1.0), torch.ones(1)])
def test_reward_value_numbers_of_any_kind_are_accepted(value):
    result = reward_value(value)
    assert result == 1.0
    assert type(result) is float


@pytest.mark.parametrize("value", [None, "1", float("nan"), float("inf"), [1.0], torch.ones(2), np.ones(3), 1j])
def test_reward_value_anything_else_is_refused(value):
    with pytest.raises(RewardValueError):
        reward_value(value)


@pytest.mark.asyncio
async def test_pool_hang_exit_and_good_calls_follow_the_documented_outcome():
    wrapper = AsyncRewardWrapper(reward_fakes.by_order, timeout_seconds=1.0, max_workers=2, max_retries=0)
    good = AsyncRewardWrapper(reward_fakes.good, timeout_seconds=1.0, max_workers=2)
    await good("", "x")
    bad = [asyncio.ensure_future(wrapper("hang")) for _ in range(3)]
    dead = asyncio.ensure_future(wrapper("exit"))
    scores = await asyncio.gather(*[good("", "x" * i, [1], [2], answer="y") for i in range(20)])
    assert scores == [float(i) for i in range(20)]
    outcomes = await asyncio.gather(*bad, dead, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [RewardTimeoutError] * 3 + [RewardError]
    closing = time.monotonic()
    close_pools()
    assert time.monotonic() - closing < 20.0
    assert not [
        child for child in psutil.Process().children(recursive=True) if "process_worker" in str(child.cmdline())
    ]


@pytest.mark.asyncio
async def test_raising_reward_is_retried_then_chained():
    wrapper = AsyncRewardWrapper(reward_fakes.by_order, max_retries=2)
    with pytest.raises(RewardError, match="failed 3 times; last: ValueError: no reward for you") as caught:
        await wrapper("raise")
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.asyncio
async def test_values_that_are_no_numbers_raise_and_warn_once(caplog):
    wrapper = AsyncRewardWrapper(reward_fakes.by_order)
    with caplog.at_level(logging.WARNING):
        for order in ("none", "nan", "text"):
            with pytest.raises(RewardValueError):
                await wrapper(order)
    assert len({r.message for r in caplog.records if "expected a" in r.message}) == 1
    assert await wrapper("true") == 1.0
    assert await wrapper("int") == 3.0


@pytest.mark.asyncio
async def test_async_function_runs_in_the_loop_under_its_limit():
    wrapper = AsyncRewardWrapper(reward_fakes.coroutine, timeout_seconds=0.5)
    assert await wrapper("int") == 3.0
    with pytest.raises(RewardTimeoutError):
        await wrapper("hang")


@pytest.mark.asyncio
async def test_inline_by_attribute_and_by_argument():
    threads = []

    def reward():
        threads.append(threading.current_thread())
        return 1

    reward.areal_inline = True
    assert await AsyncRewardWrapper(reward)() == 1.0
    del reward.areal_inline
    assert await AsyncRewardWrapper(reward, max_workers=0)() == 1.0
    assert threads == [threading.current_thread()] * 2


@pytest.mark.asyncio
async def test_closure_runs_in_a_thread_with_a_warning_and_a_hang_is_abandoned(caplog):
    release = threading.Event()
    with caplog.at_level(logging.WARNING):
        wrapper = AsyncRewardWrapper(lambda hang: release.wait(30) if hang else 2, timeout_seconds=0.5)
    assert any("cannot be pickled" in record.message for record in caplog.records)
    assert await wrapper(False) == 2.0
    with pytest.raises(RewardTimeoutError):
        await wrapper(True)
    release.set()


@pytest.mark.asyncio
async def test_partial_of_a_module_function_runs_in_the_pool():
    wrapper = AsyncRewardWrapper(functools.partial(reward_fakes.good, "prompt"))
    assert await wrapper("abcd") == 4.0


def test_same_value_from_loop_thread_and_pool():
    def call(workers):
        return asyncio.run(AsyncRewardWrapper(reward_fakes.good, max_workers=workers)("", "right"))

    results = [call(0), call(2)]
    thread = threading.Thread(target=lambda: results.append(call(2)))
    thread.start()
    thread.join()
    assert results == [5.0] * 3


def test_bad_arguments_are_refused():
    with pytest.raises(TypeError, match="callable"):
        AsyncRewardWrapper("areal.reward.gsm8k")
    with pytest.raises(ValueError, match="timeout_seconds=0"):
        AsyncRewardWrapper(reward_fakes.good, timeout_seconds=0)


@pytest.mark.parametrize("order", ["none", "nan", "text", "raise", "exit", "hang"])
def test_one_bad_reward_of_eight_drops_only_that_sample(order):
    wrapper = AsyncRewardWrapper(reward_fakes.by_order, timeout_seconds=2.0, max_workers=2, max_retries=0)
    orders = iter([order] + ["good"] * 7)

    async def episode(engine, row):
        return table(await wrapper(next(orders)))

    with executor(config(1, 0)) as made:
        batch = made.next_batch(loader(4, 1), FunctionWorkflow(episode), group_size=8)
        stats = made.export_stats()
    assert batch[0].rewards == (1.0,) * 7
    assert stats["rollout/dropped/reward"] == 1
    assert torch.isfinite(batch[0].data["rewards"]).all()
