"""Collects training statistics during a step and reduces them once, when the step is over.

Roles, engines, workflows and trainers record masked tensors (``denominator`` + ``stat``) and numbers (``scalar``,
``record_timing``) under nested scopes; the trainer calls ``export_all`` once per step and hands the flat ``dict`` of
floats to the stats logger. Recording stores references only: no copy, no reduction, no device synchronisation. Export
concatenates, reduces on the device, uses at most three collectives for all keys together, and copies to the host once.

Key naming: ``<tracker name>/<scope>/.../<key>``; timings are always ``timeperf/<key>``.
"""

from __future__ import annotations

import functools
import inspect
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from areal.utils import logging
from areal.utils.errors import DataError
from areal.utils.stats_reduction import COUNT_SUFFIX, ReduceType, Series, reduce_series

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

F = TypeVar("F", bound=Callable[..., Any])
_TIMING_SCOPE = "timeperf"

logger = logging.getLogger("StatsTracker")


class StatRecordError(DataError, AssertionError):
    """A recorded tensor has the wrong type, dtype, size or shape."""


class DistributedStatsTracker:
    """Statistics of one component; safe to use from several threads and coroutines.

    The scope stack belongs to the calling thread or coroutine: a scope entered in one never names another's records.

    Args:
        name: first scope level of every key; empty for none.
    """

    def __init__(self, name: str = "") -> None:
        self.name = name
        self._lock = threading.Lock()
        self._series: dict[str, Series] = {}
        self._denominators: dict[str, list[torch.Tensor]] = {}
        self._n_recorded: dict[str, int] = {}  # records of a stat key since its denominator was reset
        root = (name.strip("/"),) if name.strip("/") else ()
        self._scopes: ContextVar[tuple[str, ...]] = ContextVar(f"stats_scope_{id(self)}", default=root)

    # --- recording -------------------------------------------------------------------------------------------------
    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Prefix the keys recorded inside with ``name/``; scopes nest."""
        token = self._scopes.set((*self._scopes.get(), name.strip("/")))
        try:
            yield
        finally:
            self._scopes.reset(token)

    @contextmanager
    def disable_scope(self) -> Iterator[None]:
        """Record under bare keys inside, whatever scopes are open."""
        token = self._scopes.set(())
        try:
            yield
        finally:
            self._scopes.reset(token)

    def scope_func_wrapper(self, name: str) -> Callable[[F], F]:
        """Decorator: the function (or coroutine function) runs inside ``scope(name)``."""

        def decorate(fn: F) -> F:
            if inspect.iscoroutinefunction(fn):

                @functools.wraps(fn)
                async def awrapper(*args: Any, **kwargs: Any) -> Any:
                    with self.scope(name):
                        return await fn(*args, **kwargs)

                return awrapper  # type: ignore[return-value]

            @functools.wraps(fn)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                with self.scope(name):
                    return fn(*args, **kwargs)

            return wrapper  # type: ignore[return-value]

        return decorate

    def denominator(self, **masks: torch.Tensor) -> None:
        """Record masks that later ``stat`` calls average over; each also exports as its number of true values.

        Raises:
            ValueError: a mask is not a non-empty bool tensor.
        """
        for key, mask in masks.items():
            if not _is_filled(mask, torch.bool):
                raise DataError(f"denominator {key!r} must be a non-empty bool tensor, got {_describe(mask)}")
        with self._lock:
            for key, mask in masks.items():
                full = self._full_key(key)
                series = self._open_series(full, ReduceType.SUM)
                series.values.append(mask.detach())
                self._denominators.setdefault(full, []).append(mask.detach())

    def stat(self, denominator: str, reduce_type: ReduceType | None = None, **values: torch.Tensor) -> None:
        """Record float32 tensors of the shape of ``denominator``, which must exist in the same scope.

        The i-th record of a key belongs to the i-th record of its denominator.

        Args:
            denominator: key of the mask, recorded before in this scope.
            reduce_type: anything but SCALAR; None means AVG_MIN_MAX.
            values: key -> tensor ``[...]`` float32; kept by reference until the export, so do not write into it.

        Raises:
            ValueError: no such denominator, SCALAR, or another reduce type than before under this key.
            AssertionError: a value is not a non-empty float32 tensor of the denominator's shape.
        """
        reduce_type = reduce_type or ReduceType.AVG_MIN_MAX
        if reduce_type is ReduceType.SCALAR:
            raise DataError("stat() does not take ReduceType.SCALAR; record plain numbers with scalar()")
        with self._lock:
            full_denominator = self._full_key(denominator)
            masks = self._denominators.get(full_denominator)
            if masks is None:
                raise DataError(
                    f"denominator {full_denominator!r} is not recorded in this scope; call denominator() first"
                )
            for key, value in values.items():
                full = self._full_key(key)
                index = self._n_recorded.get(full, 0)
                if index >= len(masks):
                    raise DataError(f"stat {full!r} is recorded more often than its denominator {full_denominator!r}")
                _check_value(full, value, masks[index])
                series = self._open_series(full, reduce_type)
                series.values.append(value.detach())
                series.masks.append(masks[index])
                self._n_recorded[full] = index + 1

    def scalar(self, **values: float | torch.Tensor) -> None:
        """Record numbers (or one-element tensors, read at export); the mean over the calls is exported."""
        with self._lock:
            for key, value in values.items():
                self._add_scalar(self._full_key(key), value)

    @contextmanager
    def record_timing(self, key: str) -> Iterator[None]:
        """Record the seconds spent inside under ``timeperf/<key>``, whatever the scope, also when it raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            with self._lock:
                self._add_scalar(f"{_TIMING_SCOPE}/{key}", elapsed)

    # --- export ----------------------------------------------------------------------------------------------------
    def export(
        self, key: str | None = None, reduce_group: ProcessGroup | None = None, reset: bool = True
    ) -> dict[str, float]:
        """Reduce what was recorded to ``{key: number}``.

        Args:
            key: only this key (in the current scope); None exports all.
            reduce_group: reduce over these ranks too; every rank of it must call. Ranks may hold different keys.
            reset: forget what was exported.
        """
        with self._lock:
            wanted = None if key is None else self._full_key(key)
            taken = {k: s for k, s in self._series.items() if wanted is None or k == wanted}
            if reset:
                self._forget(wanted)
        return reduce_series(taken, reduce_group)

    def take(self, *, reset: bool) -> dict[str, Series]:
        """All series, unreduced; ``export_all`` reduces those of every tracker together."""
        with self._lock:
            taken = dict(self._series)
            if reset:
                self._forget(None)
        return taken

    # --- helpers (lock held) -----------------------------------------------------------------------------------------
    def _full_key(self, key: str) -> str:
        return "/".join((*self._scopes.get(), key))

    def _open_series(self, full: str, reduce_type: ReduceType) -> Series:
        series = self._series.get(full)
        if series is None:
            series = self._series[full] = Series(reduce_type)
        elif series.reduce_type is not reduce_type:
            raise DataError(f"{full!r} was recorded as {series.reduce_type.name}, now as {reduce_type.name}")
        return series

    def _add_scalar(self, full: str, value: float | torch.Tensor) -> None:
        self._open_series(full, ReduceType.SCALAR).values.append(
            value.detach() if isinstance(value, torch.Tensor) else float(value)
        )

    def _forget(self, full: str | None) -> None:
        if full is None:
            self._series, self._denominators, self._n_recorded = {}, {}, {}
            return
        self._series.pop(full, None)
        self._denominators.pop(full, None)


def _check_value(key: str, value: Any, mask: torch.Tensor) -> None:
    if not _is_filled(value, torch.float32):
        raise StatRecordError(f"stat {key!r} must be a non-empty float32 tensor, got {_describe(value)}")
    if value.shape != mask.shape:
        raise StatRecordError(f"stat {key!r} has shape {tuple(value.shape)}, its denominator {tuple(mask.shape)}")


def _is_filled(value: Any, dtype: torch.dtype) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == dtype and value.numel() > 0


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} tensor of shape {tuple(value.shape)}"
    return type(value).__name__


# --- module surface --------------------------------------------------------------------------------------------------
DEFAULT_TRACKER = DistributedStatsTracker()
_trackers: dict[str, DistributedStatsTracker] = {"": DEFAULT_TRACKER}
_trackers_lock = threading.Lock()

stat = DEFAULT_TRACKER.stat
denominator = DEFAULT_TRACKER.denominator
scalar = DEFAULT_TRACKER.scalar
scope = DEFAULT_TRACKER.scope
disable_scope = DEFAULT_TRACKER.disable_scope
scope_func_wrapper = DEFAULT_TRACKER.scope_func_wrapper
record_timing = DEFAULT_TRACKER.record_timing
export = DEFAULT_TRACKER.export


def get(name: str = "") -> DistributedStatsTracker:
    """The tracker called ``name``, made at the first call; ``""`` is the default one behind the module functions."""
    with _trackers_lock:
        if name not in _trackers:
            _trackers[name] = DistributedStatsTracker(name)
        return _trackers[name]


def export_all(reduce_group: ProcessGroup | None = None, reset: bool = True) -> dict[str, float]:
    """Export every tracker together; see ``DistributedStatsTracker.export``.

    A key recorded through two trackers is reduced over both, with one warning.
    """
    with _trackers_lock:
        trackers = list(_trackers.values())
    merged: dict[str, Series] = {}
    for tracker in trackers:
        for key, series in tracker.take(reset=reset).items():
            if key not in merged:
                merged[key] = Series(series.reduce_type, list(series.values), list(series.masks))
                continue
            logger.warning("statistic %r is recorded by more than one tracker; the records are put together", key)
            if merged[key].reduce_type is not series.reduce_type:
                raise DataError(f"{key!r} is recorded with two reduce types by different trackers")
            merged[key].values.extend(series.values)
            merged[key].masks.extend(series.masks)
    return reduce_series(merged, reduce_group)


def merge_exports(exports: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Put exports of several processes together: scalars are averaged by their ``__count``.

    Other keys keep the value of the first export that has them (they were already reduced over their group).
    """
    totals: dict[str, float] = {}
    counts: dict[str, float] = {}
    rest: dict[str, float] = {}
    for one in exports:
        for key, value in one.items():
            if key.endswith(COUNT_SUFFIX):
                continue
            count = one.get(key + COUNT_SUFFIX)
            if count is None:
                rest.setdefault(key, value)
            else:
                totals[key] = totals.get(key, 0.0) + value * count
                counts[key] = counts.get(key, 0.0) + count
    for key, total in totals.items():
        rest[key] = total / max(counts[key], 1)
        rest[key + COUNT_SUFFIX] = int(counts[key])
    return rest
