"""Calls a reward function from a workflow, without letting it hurt anything but its own sample.

``await AsyncRewardWrapper(fn)(prompt, completion, prompt_ids, completion_ids, **row) -> float``. Where it runs:

=========================================  ===========================================================================
``async def`` function or ``__call__``     in the event loop, under the time limit
``fn.areal_inline`` true, or               right here: for functions that take microseconds and cannot hang; no limit is
``max_workers=0``                          enforced. This is what makes hundreds of small rewards per step cheap
any function that can be pickled           in a process pool shared by all wrappers with the same ``max_workers``
others (lambdas, closures)                 in a thread each, with a warning: a hung one is abandoned, not killed
=========================================  ===========================================================================

A call that raises (after the retries), runs too long, kills its process, or returns something that is not a finite
number raises :class:`RewardError`; the rollout executor drops that sample, counts it, and goes on with its group.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any

from areal.utils import logging, perf_tracer
from areal.utils.errors import RewardError
from areal.utils.process_pool import (
    CallTimeoutError,
    PoolClosedError,
    WorkerDiedError,
    can_travel,
    default_workers,
    shared_pool,
)

logger = logging.getLogger("Reward")

DEFAULT_TIMEOUT_S = 15.0

RewardFn = Callable[..., Any]


class RewardTimeoutError(RewardError, TimeoutError):
    """The reward function ran longer than its limit."""


class RewardValueError(RewardError, ValueError):
    """The reward function returned something that is not a finite number."""


def reward_value(value: Any) -> float:
    """``value`` as a finite float. Numbers, booleans and arrays or tensors of one element are accepted.

    Raises:
        RewardValueError: None, text, NaN, infinity, or anything else.
    """
    if hasattr(value, "item") and callable(value.item):
        size = value.numel() if callable(getattr(value, "numel", None)) else getattr(value, "size", 1)
        if size == 1:
            value = value.item()
    if not isinstance(value, int | float):
        raise RewardValueError(f"the reward function returned {value!r} ({type(value).__name__}), expected a number")
    if not math.isfinite(value):
        raise RewardValueError(f"the reward function returned {value!r}, expected a finite number")
    return float(value)


class AsyncRewardWrapper:
    """Awaitable form of a reward function.

    Args:
        reward_fn: returns a number.
        timeout_seconds: limit of one call, counted from when it starts to run; None: the function's
            ``areal_timeout_s`` where it has one, else 15.
        max_workers: processes of the shared pool; None: half of the CPUs per device, at least 2; 0: run inline.
        max_retries: further attempts after a call raised or its process died. A call that ran too long, or returned no
            number, is not tried again.

    Raises:
        TypeError: ``reward_fn`` is not callable.
        ValueError: a limit is out of range.
    """

    def __init__(
        self,
        reward_fn: RewardFn,
        timeout_seconds: float | None = None,
        max_workers: int | None = None,
        max_retries: int = 3,
    ) -> None:
        if not callable(reward_fn):
            raise TypeError(f"reward_fn is a {type(reward_fn).__name__}; it must be callable")
        if timeout_seconds is None:
            timeout_seconds = getattr(reward_fn, "areal_timeout_s", DEFAULT_TIMEOUT_S)
        if timeout_seconds <= 0 or max_retries < 0 or (max_workers is not None and max_workers < 0):
            raise ValueError(
                f"timeout_seconds={timeout_seconds} must be > 0, max_retries={max_retries} and "
                f"max_workers={max_workers} >= 0"
            )
        self.reward_fn = reward_fn
        self.timeout_seconds = float(timeout_seconds)
        self.max_workers = default_workers() if max_workers is None else max_workers
        self.max_retries = max_retries
        self._name = getattr(reward_fn, "__qualname__", type(reward_fn).__name__)
        self._warned = False
        self._run = self._choose()

    async def __call__(self, *args: Any, **kwargs: Any) -> float:
        """The reward.

        Raises:
            RewardError: see the module; the cause is chained.
        """
        with perf_tracer.trace_session_phase("reward"):
            return await self._try(args, kwargs)

    async def _try(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
        for attempt in range(self.max_retries + 1):
            try:
                return reward_value(await self._run(args, kwargs))
            except RewardValueError as exc:
                self._warn_once(exc)
                raise
            except TimeoutError as exc:
                if isinstance(exc, CallTimeoutError) or self._run == self._in_loop:
                    raise RewardTimeoutError(
                        f"reward {self._name} ran longer than timeout_seconds={self.timeout_seconds:g}"
                    ) from exc
                self._give_up_if_last(attempt, exc)
            except PoolClosedError as exc:
                raise RewardError(f"reward {self._name}: {exc}") from exc
            except (Exception, SystemExit) as exc:  # noqa: BLE001 - user code; chained, and counted by the executor
                self._give_up_if_last(attempt, exc)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _choose(self) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
        function = self.reward_fn
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
            return self._in_loop
        if self.max_workers == 0 or getattr(function, "areal_inline", False):
            return self._inline
        if can_travel(function):
            return self._in_process
        logger.warning(
            f"reward {self._name} cannot be pickled (a lambda or closure?): it runs in a thread, where a hung call "
            f"cannot be "
            "killed. Make it a function of a module"
        )
        return self._in_thread

    def _give_up_if_last(self, attempt: int, error: BaseException) -> None:
        if attempt < self.max_retries:
            return
        what = str(error) if isinstance(error, WorkerDiedError) else f"{type(error).__name__}: {error}"
        raise RewardError(f"reward {self._name} failed {attempt + 1} times; last: {what}") from error

    def _warn_once(self, error: RewardValueError) -> None:
        if not self._warned:
            logger.warning(f"reward {self._name}: {error}. Such samples are dropped; further ones are only counted")
        self._warned = True

    async def _in_loop(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return await asyncio.wait_for(self.reward_fn(*args, **kwargs), self.timeout_seconds)

    async def _inline(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.reward_fn(*args, **kwargs)

    async def _in_process(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        pool = shared_pool(self.max_workers)
        return await asyncio.wrap_future(pool.submit(self.reward_fn, args, kwargs, timeout_s=self.timeout_seconds))

    async def _in_thread(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        future: Future[Any] = Future()

        def work() -> None:
            try:
                future.set_result(self.reward_fn(*args, **kwargs))
            except InvalidStateError:
                return  # abandoned
            except (Exception, SystemExit) as exc:  # noqa: BLE001 - handed to the awaiting side
                with contextlib.suppress(InvalidStateError):
                    future.set_exception(exc if isinstance(exc, Exception) else RuntimeError(f"SystemExit: {exc}"))

        threading.Thread(target=work, name="reward", daemon=True).start()
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), self.timeout_seconds)
        except TimeoutError as exc:
            if future.done() and not future.cancelled():
                raise  # the function's own TimeoutError
            raise CallTimeoutError(f"the call ran longer than {self.timeout_seconds:g} s") from exc
