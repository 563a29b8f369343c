"""What every trainer does before its first step and after its last: loaders, plan, checks, seeds, hooks, closing.

Called by the trainers' constructors; nothing here loads a model.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from areal.api.alloc_mode import ModelAllocation
from areal.api.config.support import check_supported
from areal.api.io_struct import FinetuneSpec
from areal.infra.rpc.errors import RPCConnectionError, TensorLostError
from areal.infra.run_context import RunContext
from areal.infra.scheduler import make_scheduler
from areal.infra.scheduler.attached import attach
from areal.infra.scheduler.exceptions import WorkerTimeoutError
from areal.trainer.follower import Follower
from areal.trainer.hooks import RunHooks
from areal.trainer.phases import PhaseClock
from areal.trainer.plan import RunPlan, prepare_plan
from areal.utils import environ, logging, stats_tracker
from areal.utils.dataloader import EvalLoader, RowLoader, create_dataloader, create_eval_dataloader
from areal.utils.errors import ConfigError, WorkerFailedError
from areal.utils.fs import get_log_path
from areal.utils.hf_utils import load_hf_tokenizer
from areal.utils.seeding import set_random_seed

if TYPE_CHECKING:
    from areal.api.config.timers import RecoverConfig

_LOSSES = (WorkerFailedError, WorkerTimeoutError, RPCConnectionError, TensorLostError)
_FIRST_RESTART_S, _LONGEST_RESTART_S = 1.0, 60.0


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
        world_size: ranks of the actor that prepare the run, each for itself; this rank's number comes from the
            environment. Data-parallel ranks share every batch, the others have the same rows.

    Raises:
        ConfigError: no rows, or a setting that cannot be honoured here.
        DataError: too few rows for one step.
        SystemExit: under a dry run, once the plan is printed.
    """
    if train_dataset is None:
        raise ConfigError("a trainer needs train_dataset: pass get_custom_dataset(…) or any indexable dataset")
    rank, shares = 0, 1
    if world_size > 1:
        parallel = ModelAllocation.from_str(config.actor.backend, name="actor").parallel
        rank, shares = parallel.data_rank(environ.rank()), parallel.dp_size
    loader = create_dataloader(train_dataset, rank, shares, config.train_dataset, collate_fn, seed=config.seed)
    plan = prepare_plan(config, loader, gconfig)
    check_supported(config, spmd=not environ.is_single_controller())
    valid_loader = None
    if valid_dataset is not None and config.valid_dataset is not None:
        valid_loader = create_eval_dataloader(valid_dataset, rank, shares, config.valid_dataset, collate_fn)
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
    """Failing steps of models that learn are kept with the run's logs unless the config names another place."""
    logs = get_log_path(config.cluster.fileroot, config.experiment_name, config.trial_name)
    for role, name in (("actor", "failures"), ("critic", "failures_critic")):
        section = getattr(config, role, None)
        if section is not None and section.failure_capture.directory is None:
            section.failure_capture.directory = str(logs / name)


def build_scheduler(config: Any) -> Any:
    """The scheduler of a run, by ``scheduler.type``; null means local. Under a launcher it is the launcher's workers.

    Raises:
        ConfigError: something that worker processes need (a directory, a store, a command) is not there.
    """
    if not environ.is_single_controller():
        return attach(config)
    kind = config.scheduler.type or "local"
    return make_scheduler(kind, None if kind == "inline" else RunContext.from_config(config))


@contextmanager
def closing_if_it_fails(hooks: RunHooks) -> Iterator[None]:
    """Close what a run has open if the block, which builds its scheduler, raises."""
    try:
        yield
    except BaseException:
        hooks.close()
        raise


class RestartBudget:
    """Decides whether a run that lost a train worker starts again from its newest recover point.

    Args:
        config: ``recover``; its ``retries`` bound the restarts of one controller.
    """

    def __init__(self, config: RecoverConfig) -> None:
        self._config = config
        self._used = 0

    def spend(self, error: BaseException) -> None:
        """Return, after a pause, if the run may restart.

        Raises:
            BaseException: ``error``, when it is none that a restart mends, recovery is off, or the budget is used up.
        """
        death = worker_death(error)
        if death is None or not environ.is_single_controller():  # a launcher starts the whole run again
            raise error
        if self._config.mode not in ("on", "auto"):
            error.add_note("set recover.mode=auto (with recover.freq_steps) to have runs restart from a recover point")
            raise error
        if self._used >= self._config.retries:
            error.add_note(f"the run was restarted recover.retries={self._config.retries} times before")
            raise error
        pause_s = min(_FIRST_RESTART_S * 2**self._used, _LONGEST_RESTART_S)
        self._used += 1
        logging.getLogger("Recover").warning(
            f"a train worker was lost; restart {self._used} of {self._config.retries} in {pause_s:g} s: {death}"
        )
        time.sleep(pause_s)


def worker_death(error: BaseException | None) -> BaseException | None:
    """The loss of a worker that ``error`` is, or was caused by."""
    while error is not None:
        if isinstance(error, _LOSSES):
            return error
        error = error.__cause__ or error.__context__
    return None


class ClosingRun(abc.ABC):
    """A trainer as a context manager: an error is logged and goes on, the run is closed in any case.

    Attributes:
        hooks: what the run has open; set before ``scheduler`` hosts anything.
        scheduler: hosts every engine of the run.
        parts: objects of this process that end before the workers do; None until they are built.
        follower: stands for the run on ranks that do not control it; None where this process does.
    """

    hooks: RunHooks
    scheduler: Any
    parts: Any = None
    follower: Follower | None = None

    @contextmanager
    def closing_on_error(self) -> Iterator[None]:
        """Close the run if the block, a part of its construction, raises: nobody else holds it yet."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    @abc.abstractmethod
    def _open(self) -> None:
        """Build the run, from the newest recover point if there is one."""

    def run_with_restarts(self, steps: Callable[[], None], budget: RestartBudget) -> None:
        """Run ``steps()`` to the end; a lost train worker has the run built again and go on from its recover point.

        Raises:
            Exception: what ``steps`` raised and no restart mends.
        """
        again = False
        while True:
            try:
                if again:
                    self.reopen()  # may lose a worker as well
                steps()
            except Exception as exc:  # noqa: BLE001 - spend() raises it again unless a restart mends it
                self.note_error(exc)
                budget.spend(exc)
                again = True
            else:
                return

    def reopen(self) -> None:
        """Build the run again from its newest recover point, whatever could not be closed properly."""
        try:
            self.close()
        except Exception as exc:  # noqa: BLE001 - such as a checkpoint that the lost worker was writing
            logging.getLogger("Recover").warning(f"given up with the lost worker: {type(exc).__name__}: {exc}")
        stats_tracker.export_all(reset=True)  # of the step that is undone
        self._open()

    def note_error(self, error: BaseException) -> None:
        """Let whoever looks at the run see what went wrong."""
        if self.hooks.diagnostics is not None:
            self.hooks.diagnostics.note_error(error)

    def close(self) -> None:
        """Finish pending writes and free every engine; safe to call twice."""
        if self.follower is not None:
            return
        with ExitStack() as parts:  # last in, first out, each even if one before it fails
            parts.callback(self.scheduler.close)
            if self.parts is not None:
                parts.callback(self.parts.destroy)
            parts.callback(self.hooks.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, (SystemExit, KeyboardInterrupt)):
            logger = logging.getLogger(type(self).__name__)
            logger.error(f"training stopped: {type(error).__name__}: {error}")
            self.note_error(error)
        self.close()
