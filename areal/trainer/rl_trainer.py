"""The RL loop: what one step of asynchronous PPO/GRPO is, in order.

Users write ``with PPOTrainer(config, train_dataset=…, valid_dataset=…) as trainer: trainer.train(workflow=…)``. While a
step is trained, the rollout engine goes on generating the next ones, up to ``rollout.max_head_offpolicyness`` versions
ahead. Version after step k is k + 1.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

from areal.api.io_struct import StepInfo
from areal.infra.rpc.errors import TensorLostError
from areal.trainer.builder import build_rl
from areal.trainer.diagnostics import start_diagnostics
from areal.trainer.follower import follow
from areal.trainer.ppo.teacher import check_vocabulary
from areal.trainer.ppo.validation import ValidationAnswers
from areal.trainer.run import ClosingRun, RestartBudget, build_scheduler, closing_if_it_fails, prepare_run
from areal.trainer.turns import Turns
from areal.trainer.weight_probe import build_weight_probe
from areal.utils import logging, stats_tracker
from areal.utils.errors import ConfigError
from areal.utils.threads import release_thread_pool

if TYPE_CHECKING:
    from areal.api.cli_args import PPOConfig
    from areal.api.engine_api import AcceptFn
    from areal.api.trajectory import TrajectoryRef
    from areal.api.workflow_api import WorkflowLike

logger = logging.getLogger("PPOTrainer")


class PPOTrainer(ClosingRun):
    """Owns one RL run: its engines, its loop and what the run leaves on disk.

    Args:
        config: a ``PPOConfig`` or ``GRPOConfig``.
        train_dataset: rows to generate from; each is given to the workflow and the reward as a dict.
        valid_dataset: rows for evaluation, or None.

    Raises:
        ConfigError: a setting contradicts another, or asks for a feature that cannot run here; before any model loads.
        DataError: the dataset is smaller than a batch, and ``drop_last`` is set.
    """

    def __init__(self, config: PPOConfig, train_dataset: Any = None, valid_dataset: Any = None) -> None:
        self.config = config
        self._datasets = (train_dataset, valid_dataset)
        self._restarts = RestartBudget(config.recover)
        self.validation = ValidationAnswers(config.actor.reward_norm)
        self.follower = follow(config)
        if self.follower is None:
            self._open()

    def _open(self) -> None:
        """Build the run, from the newest recover point if there is one; also after a train worker was lost."""
        config = self.config
        setup = prepare_run(config, *self._datasets, gconfig=config.gconfig)
        self.loader, self.valid_loader = setup.loader, setup.valid_loader
        self.plan, self.tokenizer, self.hooks, self.phase = setup.plan, setup.tokenizer, setup.hooks, setup.phase
        with closing_if_it_fails(self.hooks):
            check_vocabulary(config, self.tokenizer)
            self.scheduler = build_scheduler(config)
        with self.closing_on_error():
            diagnostics = start_diagnostics(self.hooks, self.scheduler)
            self.parts = build_rl(self.scheduler, config, setup.ft_spec, self.tokenizer)
            self.actor, self.critic = self.parts.actor, self.parts.critic
            self.ref, self.teacher = self.parts.ref, self.parts.teacher
            self.weights = self.parts.weights
            engines = {name: role.engine for name, role in self.parts.roles().items()}
            self.turns = Turns(config, engines, self.phase)
            self.rollout, self.eval_rollout = self.parts.rollout.train, self.parts.rollout.eval
            for rollout in (self.rollout, self.eval_rollout):
                diagnostics.watch(rollout.executor)
            self.rollout.executor.use_ledger(self.phase.ledger)
            self.rollout.executor.set_total_rows(self.plan.total_rows(self.loader))
            self.probe = build_weight_probe(config, self.parts, self.tokenizer)
            self.start_step = self._recover()
            self.turns.send_all()

    def _recover(self) -> int:
        """Resume from the newest complete recover point, if there is one and ``recover.mode`` asks for it."""
        info = self.hooks.recover(self.parts.engines(), self.loader)
        if info is None:
            return 0
        self.rollout.executor.load_state_dict(info.extra["rollout"])
        step = info.last_step_info.global_step + 1
        self._publish(step)
        return step

    def train(  # noqa: PLR0913 - public 1.x signature
        self,
        workflow: WorkflowLike = None,
        eval_workflow: WorkflowLike = None,
        workflow_kwargs: dict[str, Any] | None = None,
        eval_workflow_kwargs: dict[str, Any] | None = None,
        dynamic_filter_fn: AcceptFn | str | None = None,
        total_epochs: int | None = None,
    ) -> None:
        """Run every remaining step.

        Args:
            workflow: object, class or import string; see :mod:`areal.api.workflow_api`.
            eval_workflow: same for evaluation; None skips evaluation.
            workflow_kwargs: constructor arguments where ``workflow`` is a class or a string.
            eval_workflow_kwargs: same for ``eval_workflow``.
            dynamic_filter_fn: keeps a trajectory group when true; a dropped row is replaced by a further one.
            total_epochs: overrides ``total_train_epochs``, never beyond ``total_train_steps``.
        """
        if workflow is None:
            raise ConfigError("PPOTrainer.train needs a workflow: an object, a class or an import string")
        if self.follower is not None:
            self.follower.wait()
            return
        total = self.plan.total_steps
        if total_epochs is not None:
            total = min(total, total_epochs * self.plan.steps_per_epoch)
        evaluation = (eval_workflow, eval_workflow_kwargs)
        recipe = (workflow, workflow_kwargs, dynamic_filter_fn)
        gc.freeze()  # models and libraries stay for good: a full collection that walks them costs a small step's time
        self.run_with_restarts(lambda: self._run_steps(total, recipe, evaluation), self._restarts)

    def _run_steps(self, total: int, recipe: tuple[Any, ...], evaluation: tuple[Any, Any]) -> None:
        """Every step from ``start_step`` on."""
        self.phase.restart()
        if self.start_step == 0 and self.hooks.evaluator.should_evaluate_before_train():
            with self.phase("eval"):
                self._evaluate(*evaluation)
            self.hooks.commit_initial({**stats_tracker.export_all(), **self.parts.export_stats()})
            self.rollout.resume()
        for step in self.hooks.steps(self.start_step, total):
            refs = self._train_step(step, *recipe)
            self._finish_step(step, refs, evaluation)

    def _train_step(
        self,
        step: StepInfo,
        workflow: WorkflowLike,
        workflow_kwargs: dict[str, Any] | None,
        dynamic_filter_fn: AcceptFn | str | None,
    ) -> list[TrajectoryRef]:
        """From rollout to published weights."""
        config = self.config
        with self.phase("rollout"):
            if config.rollout.synchronous:
                release_thread_pool()  # this thread only waits now
            refs, batch = self._next_batch(workflow, workflow_kwargs, dynamic_filter_fn)
        self.hooks.saver.maybe_wait_for_staging()
        if batch is not None:
            self._learn(batch)
        else:  # dynamic batch size, and the filter refused (nearly) every row
            logger.warning(
                f"step {step.global_step}: {len(refs)} groups were accepted, too few to train on, so the weights stay "
                "as they are"
            )
        for engine in self.parts.engines().values():
            engine.step_lr_scheduler()
        if config.rollout.synchronous:
            self.rollout.pause()  # a synchronous step's statistics hold its own episodes only; see _finish_step
        with self.phase("update_weights"):
            self._publish(step.global_step + 1)
            self.rollout.executor.step_done()
        return refs

    def _publish(self, version: int) -> None:
        """Bring every sampler to the trainer's weights, and now and then see that they generate with them."""
        self.weights.update(version)
        if self.probe is not None:
            self.probe.after_update(version)

    def _next_batch(
        self, workflow: WorkflowLike, workflow_kwargs: dict[str, Any] | None, accept: AcceptFn | str | None
    ) -> tuple[list[TrajectoryRef], Any]:
        """The groups of the next step, and the batch they make; None instead of a batch where they are too few."""
        while True:
            refs = self.rollout.executor.next_batch(
                self.loader,
                workflow,
                workflow_kwargs,
                should_accept_fn=accept,
                group_size=self.config.gconfig.n_samples,
                dynamic_bs=self.config.dynamic_bs,
            )
            if len(refs) < max(role.least_rows for role in self.parts.roles().values()):
                return refs, None
            try:
                return refs, self.parts.claim(refs)
            except TensorLostError as exc:
                lost = self.parts.reopen_step(refs)
                logger.warning(f"{lost} rows of this step are generated again, their worker is gone: {exc}")

    def _learn(self, batch: Any) -> None:
        """Score a step's groups, update the policy and the critic on them."""
        if self.critic is not None:
            self.turns.bring("critic")
            with self.phase("critic_values"):
                batch = self.critic.annotate(batch, "values")
        for name, scorer in (("ref", self.ref), ("teacher", self.teacher)):
            if scorer is None:
                continue
            self.turns.bring(name)
            with self.phase(f"{name}_logp"):
                batch = scorer.annotate(batch, f"{name}_logp")
            self.turns.send(name)
        self.turns.bring("actor")
        if self.actor.should_compute_prox_logp():
            with self.phase("recompute_logp"):
                batch = self.actor.annotate(batch, "prox_logp")
        with self.phase("compute_advantage"):
            batch = self.actor.compute_advantages(batch)
            if self.critic is not None:
                batch = self.parts.share_targets(batch)
        with self.phase("train_step"):
            self.actor.ppo_update(batch)
        if self.critic is not None:
            with self.phase("critic_train_step"):
                self.critic.ppo_update(batch)
            self.turns.send("critic")

    def _finish_step(self, step: StepInfo, refs: list[TrajectoryRef], evaluation: tuple[Any, Any]) -> None:
        """Save, recover point, evaluation, statistics."""
        engines = self.parts.engines()
        with self.phase("save"):
            self.hooks.save(engines, step)
        if self.hooks.should_evaluate(step):
            with self.phase("eval"):
                self._evaluate(*evaluation)
        stats = stats_tracker.export_all()
        stats.update(self.parts.export_stats())
        self.rollout.resume()
        stats.update(self.phase.export())
        self.hooks.commit(step, stats, refs)
        with self.phase("checkpoint_for_recover"):  # last, so that the point covers everything the step left behind
            self.hooks.dump_recover(
                engines, step, self.loader, extra=lambda: {"rollout": self.rollout.executor.state_dict()}
            )
        self.turns.send("actor")

    def _evaluate(self, workflow: WorkflowLike, workflow_kwargs: dict[str, Any] | None) -> None:
        """Run every validation row once under ``eval_gconfig``; statistics go to ``eval-rollout``, how well a critic
        predicts their rewards to ``ppo_critic-eval``. Leaves training episodes paused: the caller resumes them.
        """
        if workflow is None or self.valid_loader is None:
            return
        self.rollout.pause()
        n_samples = self.config.eval_gconfig.n_samples if self.config.eval_gconfig else 1
        rows = [record for records in self.valid_loader for record in records]
        tables = self.eval_rollout.rollout_batch(rows, workflow, workflow_kwargs, group_size=n_samples)
        if self.critic is None or not (tables := self.validation.choose(tables, self.critic.least_rows)):
            return
        self.turns.bring("critic")
        try:
            self.critic.evaluate(tables, self.config.actor)
        except TensorLostError as exc:
            logger.warning(f"the critic is not evaluated this time, a worker with validation answers is gone: {exc}")
        self.turns.send("critic")
