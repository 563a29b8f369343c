"""What every trainer does before its first step and after its last: loaders, plan, checks, seeds, hooks, closing.

Called by the trainers' constructors; nothing here loads a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from areal.api.config.support import check_supported
from areal.api.io_struct import FinetuneSpec
from areal.infra.scheduler.inline import InlineScheduler
from areal.trainer.hooks import RunHooks
from areal.trainer.phases import PhaseClock
from areal.trainer.plan import RunPlan, prepare_plan
from areal.utils import environ, logging
from areal.utils.dataloader import EvalLoader, RowLoader, create_dataloader, create_eval_dataloader
from areal.utils.errors import ConfigError
from areal.utils.fs import get_log_path
from areal.utils.hf_utils import load_hf_tokenizer
from areal.utils.seeding import set_random_seed


@dataclass
class RunSetup:
    """A run that could start, without its engines."""

    loader: RowLoader
    valid_loader: EvalLoader | None
    plan: RunPlan
    tokenizer: Any
    ft_spec: FinetuneSpec
    hooks: RunHooks
    phase: PhaseClock


def prepare_run(
    config: Any,
    train_dataset: Any,
    valid_dataset: Any,
    *,
    gconfig: Any = None,
    collate_fn: Callable[[list[dict[str, Any]]], Any] | None = None,
    world_size: int = 1,
) -> RunSetup:
    """Check everything that can be checked before a model is loaded, and set up what surrounds the steps.

    Args:
        config: experiment config.
        train_dataset: indexable rows.
        valid_dataset: rows for evaluation, or None.
        gconfig: generation settings of an RL run.
        collate_fn: makes a batch of a list of records.
        world_size: ranks that share every batch; this rank's number comes from the environment.

    Raises:
        ConfigError: no rows, or a setting that cannot be honoured here.
        DataError: too few rows for one step.
        SystemExit: under a dry run, once the plan is printed.
    """
    if train_dataset is None:
        raise ConfigError("a trainer needs train_dataset: pass get_custom_dataset(…) or any indexable dataset")
    rank = environ.rank() if world_size > 1 else 0
    loader = create_dataloader(train_dataset, rank, world_size, config.train_dataset, collate_fn, seed=config.seed)
    plan = prepare_plan(config, loader, gconfig)
    check_supported(config)
    valid_loader = None
    if valid_dataset is not None and config.valid_dataset is not None:
        valid_loader = create_eval_dataloader(valid_dataset, rank, world_size, config.valid_dataset, collate_fn)
    _capture_beside_run(config)
    set_random_seed(config.seed, f"trainer{environ.rank()}")
    tokenizer = load_hf_tokenizer(config.tokenizer_path)
    ft_spec = FinetuneSpec(
        total_train_epochs=config.total_train_epochs,
        dataset_size=len(loader) * loader.batch_size,
        train_batch_size=loader.batch_size,
        max_steps=config.total_train_steps,
    )
    hooks = RunHooks(config, ft_spec, plan, tokenizer, train_dataset)
    phase = PhaseClock(hooks.show_phase, lambda: hooks.global_step)
    return RunSetup(loader, valid_loader, plan, tokenizer, ft_spec, hooks, phase)


def _capture_beside_run(config: Any) -> None:
    """Failing steps of the actor are kept with the run's logs unless the config names another place."""
    capture = config.actor.failure_capture
    if capture.directory is None:
        logs = get_log_path(config.cluster.fileroot, config.experiment_name, config.trial_name)
        capture.directory = str(logs / "failures")


class ClosingRun:
    """A trainer as a context manager: an error is logged and goes on, the run is closed in any case.

    Attributes:
        hooks: what the run has open; set before ``scheduler`` hosts anything.
        scheduler: hosts every engine of the run.
    """

    hooks: RunHooks
    scheduler: InlineScheduler

    @contextmanager
    def closing_on_error(self) -> Iterator[None]:
        """Close the run if the block, a part of its construction, raises: nobody else holds it yet."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Finish pending writes and free every engine; safe to call twice."""
        try:
            self.hooks.close()
        finally:
            self.scheduler.delete_workers()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, (SystemExit, KeyboardInterrupt)):
            logger = logging.getLogger(type(self).__name__)
            logger.error(f"training stopped: {type(error).__name__}: {error}")
        self.close()
