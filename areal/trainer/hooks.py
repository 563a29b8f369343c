"""What a run does around its steps: checkpoints, recover points, evaluation timing, statistics, pictures.

Shared by every trainer; each calls ``recover`` once, then ``save``, ``commit`` and ``dump_recover`` per step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal.api.io_struct import StepInfo
from areal.trainer.ppo.mismatch import judge_stats
from areal.trainer.samples import SampleWriter
from areal.utils import environ, logging, perf_tracer
from areal.utils.console import LiveConsole
from areal.utils.errors import ArealError
from areal.utils.evaluator import Evaluator
from areal.utils.manifest import build_manifest, write_manifest
from areal.utils.plotting import plot_curve
from areal.utils.recover import RecoverHandler, RecoverInfo
from areal.utils.saver import Saver
from areal.utils.stats_logger import StatsLogger

if TYPE_CHECKING:
    from areal.api.engine_api import TrainEngine
    from areal.api.io_struct import FinetuneSpec
    from areal.api.trajectory import TrajectoryRef
    from areal.trainer.diagnostics import RunDiagnostics
    from areal.trainer.plan import RunPlan

logger = logging.getLogger("RunHooks")
# Numbers on the live console -> statistics they come from, the first that was recorded.
SHOWN = {
    "reward": ("ppo_actor/task_reward/avg",),
    "loss": ("sft/loss/avg", "dpo/loss/avg", "rw/loss/avg"),
    "accuracy": ("dpo/reward_accuracy/avg", "rw/correct_ratio/avg"),
    "eval": ("eval-rollout/reward", "sft-eval/loss/avg", "dpo-eval/loss/avg", "rw-eval/loss/avg"),
    "staleness": ("rollout/staleness/avg",),
    "mismatch": ("ppo_actor/mismatch/abs_diff_mean",),
    "tokens_per_s": ("throughput/tokens_per_s",),
    "sequences_per_s": ("throughput/sequences_per_s",),
}


class RunHooks:
    """Files and displays of one run.

    Args:
        config: the experiment config.
        ft_spec: length of the run.
        plan: sizes of the run.
        tokenizer: saved with every checkpoint.
        dataset: fingerprinted in the manifest.

    Attributes:
        global_step: the step that runs now.
        phase: what it is doing, since ``phase_since`` (seconds since 1970).
        tokens_per_s: of the last committed step.
        diagnostics: status server of the run, once it has started; closed with the run.
    """

    def __init__(self, config: Any, ft_spec: FinetuneSpec, plan: RunPlan, tokenizer: Any, dataset: Any) -> None:
        self.config = config
        self.plan = plan
        self.tokenizer = tokenizer
        self.rank = environ.rank()
        manifest = build_manifest(config, datasets={"train": dataset})
        archon = config.actor.backend.startswith("archon")  # as in 1.x
        self.saver = Saver(config.saver, ft_spec, manifest=manifest, auto_async=archon)
        self.evaluator = Evaluator(config.evaluator, ft_spec)
        self.recover_handler = RecoverHandler(config.recover, ft_spec, manifest=manifest)
        self.console: LiveConsole | None = None
        self.global_step: int | None = None
        self.phase, self.phase_since = "start", time.time()
        self.tokens_per_s: float | None = None
        self.diagnostics: RunDiagnostics | None = None
        self.stats_logger = StatsLogger(config, ft_spec, table=False)
        self.log_dir = Path(StatsLogger.get_log_path(config))
        if self.rank == 0:
            write_manifest(self.log_dir, manifest)
            logging.setup_file_logging(str(self.log_dir))
        if config.perf_tracer is not None:
            try:
                perf_tracer.configure(config.perf_tracer, rank=self.rank, role="master")
            except ArealError:  # another run of this process still traces; ours is not to be left half open
                self.stats_logger.close()
                raise
        self._samples = SampleWriter(self.log_dir, tokenizer)
        self._initial: dict[str, float] = {}
        self._closed = False

    def steps(self, start: int, total: int) -> Iterator[StepInfo]:
        """The remaining steps of the run, shown on the console as they pass.

        Args:
            start: first global step, 0-based.
            total: global steps of the whole run.
        """
        title = f"{self.config.experiment_name}/{self.config.trial_name}"
        with LiveConsole(total, start_step=start, title=title, live=None if self.rank == 0 else False) as console:
            self.console = console if self.rank == 0 else None
            for global_step in range(start, total):
                self.global_step = global_step
                epoch, epoch_step = divmod(global_step, self.plan.steps_per_epoch)
                yield StepInfo(epoch, epoch_step, global_step, self.plan.steps_per_epoch)

    def show_phase(self, name: str) -> None:
        """Say on the console, and to whoever asks, what the run is doing now."""
        self.phase, self.phase_since = name, time.time()
        if self.console is not None:
            self.console.phase(name)

    def recover(self, engines: Mapping[str, TrainEngine], loader: Any) -> RecoverInfo | None:
        """Load the newest complete recover point into everything that has state; None for a fresh start."""
        return self.recover_handler.load(engines, self.saver, self.evaluator, self.stats_logger, loader)

    def save(self, engines: Mapping[str, TrainEngine], step: StepInfo, *, last: bool = False) -> None:
        """Hugging Face checkpoints, when ``saver`` says so; a run that saves at all also saves its last step.

        ``last``: the run ends with this step, earlier than planned.
        """
        frequencies = (self.config.saver.freq_epochs, self.config.saver.freq_steps, self.config.saver.freq_secs)
        last = last or step.global_step == self.plan.total_steps - 1
        force = last and any(frequency is not None for frequency in frequencies)
        for name, engine in engines.items():
            self.saver.save(
                engine,
                step.epoch,
                step.epoch_step,
                step.global_step,
                name=name,
                tokenizer=self.tokenizer,
                base_model_path=self.config.actor.path,
                force=force,
            )

    def dump_recover(
        self,
        engines: Mapping[str, TrainEngine],
        step: StepInfo,
        loader: Any,
        extra: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        """A recover point, when ``recover`` says so; ``extra`` adds the caller's plain state."""
        if not self.recover_handler.active:
            return
        self.recover_handler.dump(
            engines,
            step,
            self.saver,
            self.evaluator,
            self.stats_logger,
            loader,
            tokenizer=self.tokenizer,
            extra=extra() if extra is not None else None,
        )

    def should_evaluate(self, step: StepInfo) -> bool:
        """Whether ``evaluator`` fires after this step; asked once per step."""
        return self.evaluator.should_evaluate(step.epoch_step, step.global_step)

    def commit(self, step: StepInfo, stats: dict[str, float], refs: Sequence[TrajectoryRef] = ()) -> None:
        """Record the statistics of a step everywhere and show the main ones."""
        stats.update(self._initial)
        self._initial = {}
        wall = stats.get("ledger/wall", 0.0)
        if refs and wall > 0:
            sequences = sum(len(ref.lengths) for ref in refs)
            stats["throughput/sequences_per_s"] = sequences / wall
            stats["throughput/tokens_per_s"] = self.tokens_per_s = sum(sum(ref.lengths) for ref in refs) / wall
        if self.rank == 0:
            self._samples.write(step.global_step, refs)
            self._repeat_warning(stats)
        self.stats_logger.commit(step.epoch, step.epoch_step, step.global_step, stats)
        if self.console is not None:
            self.console.update(step.global_step, shown_metrics(stats))
        perf_tracer.save(step=step.global_step)
        if self.diagnostics is not None:
            self.diagnostics.refresh()

    def _repeat_warning(self, stats: Mapping[str, float]) -> None:
        """Say here what the policy's worker process wrote into its own log only."""
        if self.config.scheduler.type != "inline" and any(key.startswith("ppo_actor/mismatch/") for key in stats):
            problem = judge_stats(stats, self.config.actor)
            if problem is not None:
                logger.warning(problem)

    def commit_initial(self, stats: dict[str, float]) -> None:
        """Keep the evaluation that ran before the first step: logged now, recorded in step 0 as ``before_train/…``."""
        found = {key: value for key, value in stats.items() if "eval" in key and not key.endswith("__count")}
        logger.info("before training: " + ", ".join(f"{key}={value:.4g}" for key, value in sorted(found.items())))
        self._initial = {f"before_train/{key}": value for key, value in found.items()}

    def close(self) -> None:
        """Finish writes and draw the reward curve of an RL run; safe to call twice. Each part is closed even if one
        before it fails.
        """
        if self._closed:
            return
        self._closed = True
        with ExitStack() as parts:  # last in, first out
            if self.diagnostics is not None:
                parts.callback(self.diagnostics.close)
            parts.callback(self._draw_curve)
            if self.config.perf_tracer is not None:
                parts.callback(perf_tracer.reset)  # writes what is left
            parts.callback(self.stats_logger.close)
            parts.callback(self.saver.finalize)
            if self.console is not None:
                parts.callback(self.console.stop)  # whoever reads what follows has the terminal back

    def _draw_curve(self) -> None:
        stats_file = self.log_dir / "stats.jsonl"
        if self.rank != 0 or not hasattr(self.config, "gconfig") or not stats_file.is_file():
            return
        try:
            title = f"{self.config.experiment_name}/{self.config.trial_name}"
            plot_curve(stats_file, self.log_dir / "reward_curve.png", key=SHOWN["reward"][0], title=title)
        except (ArealError, OSError) as exc:  # a picture must not turn a finished run into a failed one
            logger.warning(f"no reward curve drawn: {exc}")


def shown_metrics(stats: Mapping[str, float]) -> dict[str, float]:
    """The console's numbers out of a step's statistics."""
    found = {name: next((stats[key] for key in keys if key in stats), None) for name, keys in SHOWN.items()}
    return {name: value for name, value in found.items() if value is not None}
