"""The supervised loop, once for every learner: batches of rows in, a trained model out.

Runs in one process, in worker processes, or once per rank under ``torchrun`` (each rank then takes its share of every
batch). ``SFTTrainer``, ``DPOTrainer`` and ``RWTrainer`` say what a batch is and which learner trains on it.
"""

from __future__ import annotations

import abc
import gc
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from areal.api.io_struct import StepInfo
from areal.infra.scheduler.inline import InlineScheduler
from areal.trainer.builder import build_learner
from areal.trainer.diagnostics import start_diagnostics
from areal.trainer.follower import follow
from areal.trainer.learners import LearnerKind
from areal.trainer.run import ClosingRun, RestartBudget, build_scheduler, closing_if_it_fails, prepare_run
from areal.utils import environ

Batch = list[dict[str, Any]]


class SupervisedTrainer(ClosingRun):
    """Owns one run on a fixed dataset; a subclass names its learner.

    Args:
        config: experiment config with an ``actor`` section.
        train_dataset: rows as ``collate`` takes them.
        valid_dataset: same, evaluated when ``evaluator`` says so.
    """

    kind: ClassVar[LearnerKind]

    def __init__(self, config: Any, train_dataset: Any = None, valid_dataset: Any = None) -> None:
        self.config = config
        self._datasets = (train_dataset, valid_dataset)
        self._restarts = RestartBudget(config.recover)
        self.follower = follow(config)
        if self.follower is None:
            self._open()

    @staticmethod
    @abc.abstractmethod
    def collate(samples: list[dict[str, Any]]) -> Batch:
        """Records -> tables for the learner; never empty, as a rank without rows must join the collectives."""

    @abc.abstractmethod
    def _update(self, batch: Batch) -> None:
        """One optimizer step."""

    @abc.abstractmethod
    def _score(self, batch: Batch) -> None:
        """Evaluate one batch; statistics go to the learner's tracker."""

    def _complete(self, batch: Batch) -> Batch:
        """Add what the learner needs besides the rows, such as a reference model's log-probs."""
        return batch

    def _open(self) -> None:
        """Build the run, from the newest recover point if there is one; also after a train worker was lost."""
        config = self.config
        ranks = environ.world_size() if environ.is_single_controller() else 1  # a launcher's rank 0 controls all
        setup = prepare_run(config, *self._datasets, collate_fn=self.collate, world_size=ranks)
        self.loader, self.valid_loader = setup.loader, setup.valid_loader
        self.plan, self.tokenizer, self.hooks, self.phase = setup.plan, setup.tokenizer, setup.hooks, setup.phase
        with closing_if_it_fails(self.hooks):
            self.scheduler = InlineScheduler() if ranks > 1 else build_scheduler(config)
        with self.closing_on_error():
            start_diagnostics(self.hooks, self.scheduler)
            self.parts = build_learner(self.scheduler, config, setup.ft_spec, self.kind)
            self.engine, self.learner, self.ref = self.parts.engine, self.parts.learner, self.parts.ref
            info = self.hooks.recover({"default": self.engine}, self.loader)
        self.start_step = 0 if info is None else info.last_step_info.global_step + 1

    def train(self, stop_fn: Callable[[StepInfo], bool] | None = None) -> None:
        """Run every remaining step.

        Args:
            stop_fn: asked after each update; true ends the run there, and that step is saved like a last one.
        """
        if self.follower is not None:
            self.follower.wait()
            return
        gc.freeze()  # models and libraries stay for good: a full collection that walks them costs a small step's time
        self.run_with_restarts(lambda: self._run_steps(stop_fn), self._restarts)

    def _run_steps(self, stop_fn: Callable[[StepInfo], bool] | None) -> None:
        """Every step from ``start_step`` on."""
        batches = self._batches()
        self.phase.restart()
        if self.start_step == 0 and self.hooks.evaluator.should_evaluate_before_train():
            with self.phase("eval"):
                self._evaluate()
            self.hooks.commit_initial(self.parts.export_stats())
        for step in self.hooks.steps(self.start_step, self.plan.total_steps):
            with self.phase("load_bcast"):
                batch = next(batches)
            batch = self._complete(batch)
            self.hooks.saver.maybe_wait_for_staging()
            with self.phase("train_step"):
                self._update(batch)
                self.engine.step_lr_scheduler()
            self.engine.set_version(step.global_step + 1)
            stop = stop_fn is not None and stop_fn(step)
            self._finish_step(step, last=stop)
            if stop:
                break

    def _batches(self) -> Iterator[Batch]:
        """Batches from the loader's cursor on, epoch after epoch."""
        while True:
            yield from self.loader

    def _finish_step(self, step: StepInfo, *, last: bool) -> None:
        engines = {"default": self.engine}
        with self.phase("save"):
            self.hooks.save(engines, step, last=last)
        if self.hooks.should_evaluate(step):
            with self.phase("eval"):
                self._evaluate()
        stats = self.parts.export_stats()
        stats.update(self.phase.export())
        self.hooks.commit(step, stats)
        with self.phase("checkpoint_for_recover"):  # last, so that the point covers everything the step left behind
            self.hooks.dump_recover(engines, step, self.loader)

    def _evaluate(self) -> None:
        """One pass over the validation rows."""
        for batch in self.valid_loader or ():
            self._score(self._complete(batch))
