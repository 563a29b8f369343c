"""The row loader: which dataset rows make up which step. Its whole state is one cursor (epoch, step).

A dataset (anything with ``len`` and integer indexing) goes in; an order of row indices comes out for the rollout
executor, or batches of records for supervised training. The order of an epoch is a permutation of (seed, epoch) alone,
so a resumed run, or one on another machine, sees the same rows.

Steps per epoch, for N rows and a global batch of B:

=========  ============  =====================================================================
drop_last  steps         rows
=========  ============  =====================================================================
true       ``N // B``    the last ``N % B`` rows of that epoch's order are left out;
                         N < B is a :class:`DataError`, because no step could ever be made
false      ``ceil(N/B)`` every row once; the last step holds the remaining ``N % B`` rows
=========  ============  =====================================================================

With several ranks each global batch is dealt out in turn (rank r takes rows r, r + world, …), so rank sizes differ by
at most one, and only in a short last step; nothing is ever padded or repeated.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol

from areal.utils import logging
from areal.utils.errors import ConfigError, DataError
from areal.utils.seeding import derive_named_seed

if TYPE_CHECKING:
    from areal.api.cli_args import _DatasetConfig

logger = logging.getLogger("Dataloader")

STATE_FORMAT = 1
Collate = Callable[[list[dict[str, Any]]], Any]


class IndexedDataset(Protocol):
    """What a dataset must offer: ``len(dataset)`` and ``dataset[i] -> dict``."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class RowLoader:
    """Deals out the rows of a dataset, epoch by epoch.

    Args:
        dataset: rows to deal out.
        batch_size: global rows per step; a multiple of ``world_size``.
        shuffle: permute each epoch; otherwise dataset order.
        drop_last: leave out the rows that do not fill a step.
        seed: of the permutations.
        rank: this rank's number; ``batch_size`` (the attribute), ``order`` and ``step_size`` are this rank's.
        world_size: number of data-parallel ranks.
        collate_fn: turns a list of records into a batch; None returns the list.
        num_workers: threads that read records ahead when iterating; 0 reads in the caller.

    Raises:
        DataError: the dataset has no length or rows, or too few rows for one step.
        ConfigError: (a ValueError) ``batch_size`` is not a positive multiple of ``world_size``.
    """

    def __init__(  # noqa: PLR0913 - one keyword per setting of the dataset section
        self,
        dataset: IndexedDataset,
        batch_size: int,
        *,
        shuffle: bool = True,
        drop_last: bool = True,
        seed: int = 1,
        rank: int = 0,
        world_size: int = 1,
        collate_fn: Collate | None = None,
        num_workers: int = 0,
    ) -> None:
        if batch_size < 1 or world_size < 1 or batch_size % world_size:
            raise ConfigError(
                f"batch_size={batch_size} must be a positive multiple of the data-parallel size {world_size}"
            )
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank={rank} must be in [0, {world_size})")
        self._size = _dataset_size(dataset)
        if drop_last and self._size < batch_size:
            raise DataError(
                f"the dataset has {self._size} rows, fewer than batch_size={batch_size}: with drop_last=true "
                "no step can be made. Lower batch_size, add rows, or set drop_last=false"
            )
        self.dataset = dataset
        self.global_batch_size = batch_size
        self.batch_size = batch_size // world_size
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self._collate = collate_fn
        self._num_workers = num_workers
        self._epoch = 0
        self._step = 0
        self._orders: dict[int, list[int]] = {}

    def __len__(self) -> int:
        """Steps per epoch."""
        if self.drop_last:
            return self._size // self.global_batch_size
        return -(-self._size // self.global_batch_size)

    @property
    def epoch(self) -> int:
        """Epoch of the cursor."""
        return self._epoch

    @property
    def step(self) -> int:
        """Steps of the cursor's epoch that were already dealt out."""
        return self._step

    def order(self, epoch: int) -> list[int]:
        """Dataset indices that this rank uses in ``epoch``, in the order it uses them."""
        if epoch not in self._orders:
            rows = list(range(self._size))
            if self.shuffle:
                random.Random(derive_named_seed(self.seed, "order", epoch)).shuffle(rows)
            if self.drop_last:
                del rows[len(self) * self.global_batch_size :]
            if self.world_size > 1:
                width = self.global_batch_size
                starts = range(0, len(rows), width)
                rows = [row for s in starts for row in rows[s : s + width][self.rank :: self.world_size]]
            while len(self._orders) >= 2:
                self._orders.pop(next(iter(self._orders)))
            self._orders[epoch] = rows
        return self._orders[epoch]

    def step_size(self, global_step: int) -> int:
        """Rows of this rank in step ``global_step``, counted from 0 over all epochs; only a short last step differs."""
        start = (global_step % len(self)) * self.global_batch_size
        rows = min(self.global_batch_size, self._size - start)
        return len(range(self.rank, rows, self.world_size))

    def record(self, index: int) -> dict[str, Any]:
        """Row ``index`` of the dataset.

        Raises:
            DataError: the row is not a mapping.
        """
        row = self.dataset[index]
        if not isinstance(row, Mapping):
            raise DataError(f"row {index} of the dataset is a {type(row).__name__}; rows must be dicts")
        return row if isinstance(row, dict) else dict(row)

    def set_epoch(self, epoch: int) -> None:
        """Move the cursor to the start of ``epoch``; a cursor inside that epoch stays, which is how a run resumes."""
        if epoch != self._epoch:
            self._epoch, self._step = epoch, 0

    def seek(self, global_step: int) -> None:
        """Move the cursor to step ``global_step``, counted from 0 over all epochs."""
        self._epoch, self._step = divmod(global_step, len(self))

    def __iter__(self) -> Iterator[Any]:
        """Batches from the cursor to the end of its epoch; the cursor counts a batch before it is handed out."""
        epoch, first = self._epoch, self._step
        steps = range(first, len(self))
        for step, batch in zip(steps, self._read(epoch, steps), strict=True):
            last = step + 1 == len(self)
            self._epoch, self._step = (epoch + 1, 0) if last else (epoch, step + 1)
            yield batch

    def _rows_of(self, epoch: int, step: int) -> list[int]:
        start = step * self.batch_size
        return self.order(epoch)[start : start + self.step_size(step)]

    def _batch(self, rows: list[int]) -> Any:
        records = [self.record(i) for i in rows]
        return records if self._collate is None else self._collate(records)

    def _read(self, epoch: int, steps: Iterable[int]) -> Iterator[Any]:
        if self._num_workers == 0:
            for step in steps:
                yield self._batch(self._rows_of(epoch, step))
            return
        pool = ThreadPoolExecutor(self._num_workers, thread_name_prefix="row-loader")
        pending: deque[Future[Any]] = deque()
        try:
            for step in steps:
                pending.append(pool.submit(self._batch, self._rows_of(epoch, step)))
                if len(pending) > self._num_workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def state_dict(self) -> dict[str, Any]:
        """The cursor, and what it depends on. Plain numbers and strings, fit for JSON."""
        return {
            "format": STATE_FORMAT,
            "epoch": self._epoch,
            "step": self._step,
            "dataset_size": self._size,
            "batch_size": self.global_batch_size,
            "seed": self.seed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was taken.

        Raises:
            DataError: an unknown format, a cursor out of range, or a state of another dataset size, batch size or seed.
        """
        if state.get("format") != STATE_FORMAT:
            raise DataError(f"loader state has format {state.get('format')!r}; this version reads {STATE_FORMAT}")
        for key, mine in (("dataset_size", self._size), ("batch_size", self.global_batch_size), ("seed", self.seed)):
            if state.get(key, mine) != mine:
                raise DataError(
                    f"the recover point was made with {key}={state[key]}, this run has {mine}: its order of "
                    "rows cannot be continued. Restore the old value, or start without recovery"
                )
        epoch, step = int(state["epoch"]), int(state["step"])
        if epoch < 0 or not 0 <= step < max(len(self), 1):
            raise DataError(f"loader state epoch={epoch}, step={step} is out of range for {len(self)} steps per epoch")
        self._epoch, self._step = epoch, step


class EvalLoader(RowLoader):
    """A row loader for evaluation: every iteration is one whole pass, each row once, in dataset order, never padded."""

    def __iter__(self) -> Iterator[Any]:
        return self._read(0, range(len(self)))


def create_dataloader(  # noqa: PLR0913 - the 1.x signature plus the seed
    dataset: IndexedDataset,
    rank: int,
    world_size: int,
    dataset_config: _DatasetConfig,
    collate_fn: Collate | None = None,
    *,
    seed: int = 1,
) -> RowLoader:
    """The loader of a dataset section; refuses impossible settings before any model is loaded.

    Raises:
        DataError: see :class:`RowLoader`.
        ConfigError: (a ValueError) ``batch_size`` does not divide by ``world_size``.
    """
    return RowLoader(
        dataset,
        dataset_config.batch_size,
        shuffle=dataset_config.shuffle,
        drop_last=dataset_config.drop_last,
        seed=seed,
        rank=rank,
        world_size=world_size,
        collate_fn=collate_fn,
        num_workers=dataset_config.num_workers,
    )


def create_eval_dataloader(
    dataset: IndexedDataset,
    rank: int,
    world_size: int,
    dataset_config: _DatasetConfig,
    collate_fn: Collate | None = None,
) -> EvalLoader:
    """The loader of an evaluation set: each row exactly once whatever its size; ``shuffle`` and ``drop_last`` are off.

    A global batch that does not divide by ``world_size`` is rounded up to a multiple: it is only a reading size here.
    """
    if dataset_config.shuffle or dataset_config.drop_last:
        logger.warning("valid_dataset: shuffle and drop_last are ignored, evaluation scores every row once")
    batch_size = -(-max(dataset_config.batch_size, 1) // world_size) * world_size
    return EvalLoader(
        dataset,
        batch_size,
        shuffle=False,
        drop_last=False,
        rank=rank,
        world_size=world_size,
        collate_fn=collate_fn,
        num_workers=dataset_config.num_workers,
    )


def _dataset_size(dataset: Any) -> int:
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise DataError(
            f"a dataset needs len() and integer indexing; {type(dataset).__name__} has not. Turn a stream "
            "into a list, or into datasets.Dataset, first"
        )
    size = len(dataset)
    if size == 0:
        raise DataError("the dataset has no rows; if max_length is set, every row may be longer than it")
    return int(size)
