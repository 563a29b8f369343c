"""Writes Hugging Face checkpoints when due: the trainer calls ``save`` once per step and engine, after the update.

A checkpoint is ``{save root}/{name}/epoch{e}epochstep{s}globalstep{g}/``, complete from the moment it has that name:
it is written aside, fsynced and renamed. Each holds a ``manifest.json``. With ``mode: async`` the step waits only for a
copy of the weights to host memory. The class also knows where checkpoints are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from areal.api.io_struct import SaveLoadMeta
from areal.utils import fs, logging, ranks
from areal.utils.background import BackgroundWriter
from areal.utils.errors import CheckpointError
from areal.utils.manifest import write_manifest
from areal.utils.timeutil import EpochStepTimeFreqCtl, StepTracker

if TYPE_CHECKING:
    from areal.api.config.timers import SaverConfig
    from areal.api.io_struct import FinetuneSpec

logger = logging.getLogger("Saver")

_ASIDE_TOKEN = "saving"  # the same on every rank, so that all of them write into one directory


class SavableEngine(Protocol):
    """What a saver needs of an engine."""

    def save(self, meta: SaveLoadMeta) -> None:
        """Write the weights to ``meta.path``; every rank of the engine calls."""
        ...

    def load(self, meta: SaveLoadMeta) -> None:
        """Read the weights from ``meta.path``; every rank of the engine calls."""
        ...


@runtime_checkable
class StagedEngine(SavableEngine, Protocol):
    """An engine that can write a snapshot while it trains."""

    def stage_save(self, meta: SaveLoadMeta) -> Callable[[], None]:
        """Copy to host memory what ``save`` would write; the returned function writes it. Every rank calls both."""
        ...


class Saver:
    """Saves engines at the configured frequency.

    Args:
        config: ``freq_epochs``, ``freq_steps``, ``freq_secs`` (null = off; any of them fires), ``mode``, paths.
        ft_spec: tells where an epoch ends.
        manifest: goes into every checkpoint, see ``utils.manifest``.
        auto_async: what ``mode: auto`` means for the engines of this run.
    """

    def __init__(
        self,
        config: SaverConfig,
        ft_spec: FinetuneSpec,
        *,
        manifest: Mapping[str, Any] | None = None,
        auto_async: bool = False,
    ) -> None:
        self.config = config
        self.ft_spec = ft_spec
        self.manifest = dict(manifest or {})
        self._tracker = StepTracker(EpochStepTimeFreqCtl(config.freq_epochs, config.freq_steps, config.freq_secs))
        background = config.mode == "async" or (config.mode == "auto" and auto_async)
        self._writer = BackgroundWriter() if background else None

    @property
    def is_async(self) -> bool:
        """Whether a save may still be under way when ``save`` returns."""
        return self._writer is not None

    def save(  # noqa: PLR0913 - public signature
        self,
        engine: SavableEngine,
        epoch: int,
        step: int,
        global_step: int,
        name: str = "default",
        tokenizer: Any = None,
        processor: Any = None,
        base_model_path: str | None = None,
        *,
        force: bool = False,
    ) -> str | None:
        """Save ``engine`` if this step is due. The frequency counts steps, so several engines share one decision.

        Args:
            engine: the engine; with several ranks each calls.
            epoch: from 0.
            step: within the epoch, from 0.
            global_step: of the run, from 0.
            name: ``default`` (actor) or ``critic``: its directory.
            tokenizer: saved along, if given.
            processor: saved along, if given.
            base_model_path: what the model was started from; files that training does not change are taken from it.
            force: save now, due or not (the last step of a run).

        Returns:
            The checkpoint's directory, or None when nothing was due. With ``mode: async`` it appears later.

        Raises:
            CheckpointError: this checkpoint, or an earlier one written in the background, failed; on every rank.
        """
        due = self._tracker.due(step, global_step, self.ft_spec.steps_per_epoch)
        if not (due or force):
            return None
        target = self.model_save_path(epoch, step, global_step, name)
        meta = SaveLoadMeta(
            path="",
            weight_format="hf",
            with_optim=False,
            tokenizer=tokenizer,
            processor=processor,
            base_model_path=base_model_path,
        )
        manifest = {**self.manifest, "epoch": epoch, "step": step, "global_step": global_step}
        if self._writer is not None and isinstance(engine, StagedEngine):
            with ranks.together("an earlier checkpoint failed", CheckpointError):
                self._writer.wait(name)  # one snapshot per engine: the second save waits for the first
            self._writer.submit(name, target, stage_directory(engine, meta, target, manifest))
        else:
            if self._writer is not None:
                logger.warning(
                    "saver.mode=async: %s can only save synchronously; training waits", type(engine).__name__
                )
            save_directory(engine, meta, target, manifest)
        if ranks.is_first_rank():
            logger.info("%s %s of step %d to %s", "saving" if self.is_async else "saved", name, global_step, target)
        return target

    def model_save_path(self, epoch: int, step: int, global_step: int, name: str = "default") -> str:
        """Directory of one checkpoint of this trial; its parents are created."""
        return self.get_model_save_path(*_names(self.config), epoch, step, global_step, name)

    def maybe_wait_for_staging(self) -> None:
        """Return when the weights may change again, which is when ``save`` has returned; called before every update."""

    def wait(self) -> None:
        """Return when every checkpoint begun so far is complete. Every rank calls.

        Raises:
            CheckpointError: one that was written in the background failed.
        """
        if self._writer is not None:
            with ranks.together("an earlier checkpoint failed", CheckpointError):
                self._writer.wait()

    def finalize(self) -> None:
        """Return when every checkpoint is complete; called at the end of a run. No collective of this thread.

        Raises:
            CheckpointError: one that was written in the background failed.
        """
        if self._writer is not None:
            self._writer.close()

    def state_dict(self) -> dict[str, Any]:
        """Counters of the frequency."""
        return self._tracker.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counters."""
        self._tracker.load_state_dict(state)

    # --- paths: roots are created, a checkpoint's own directory is not: its existence says that it is complete ---
    @staticmethod
    def get_save_root(experiment_name: str, trial_name: str, fileroot: str) -> str:
        """``{fileroot}/checkpoints/{user}/{experiment}/{trial}``, created."""
        return os.fspath(fs.get_save_root(fileroot, experiment_name, trial_name))

    @staticmethod
    def get_model_save_root(experiment_name: str, trial_name: str, fileroot: str, name: str = "default") -> str:
        """``{save root}/{name}``, created."""
        path = fs.get_save_root(fileroot, experiment_name, trial_name) / name
        path.mkdir(parents=True, exist_ok=True)
        return os.fspath(path)

    @staticmethod
    def get_model_save_path(  # noqa: PLR0913 - public signature
        experiment_name: str,
        trial_name: str,
        fileroot: str,
        epoch: int,
        step: int,
        globalstep: int,
        name: str = "default",
    ) -> str:
        """``{model root}/epoch{e}epochstep{s}globalstep{g}``."""
        root = Saver.get_model_save_root(experiment_name, trial_name, fileroot, name)
        return os.path.join(root, f"epoch{epoch}epochstep{step}globalstep{globalstep}")

    @staticmethod
    def get_recover_checkpoint_path(experiment_name: str, trial_name: str, fileroot: str, name: str = "default") -> str:
        """``{model root}/recover_checkpoint``, which points into the newest recover point, if there is one."""
        root = Saver.get_model_save_root(experiment_name, trial_name, fileroot, name)
        return os.path.join(root, "recover_checkpoint")


def save_directory(
    engine: SavableEngine, meta: SaveLoadMeta, target: fs.PathLike, manifest: Mapping[str, Any] | None
) -> None:
    """Let ``engine`` write a checkpoint aside and give it its name when every rank is done.

    Args:
        engine: every rank calls; the engine's own collectives run inside.
        meta: its ``path`` is ignored.
        target: final directory; an existing one is replaced. What killed writers left beside it is removed.
        manifest: written along; None writes none.
    """
    with _aside(target) as aside:
        meta.path = os.fspath(aside)
        engine.save(meta)
        with ranks.together(f"{target} could not be written", CheckpointError):
            _publish(aside, target, manifest)


def stage_directory(
    engine: StagedEngine, meta: SaveLoadMeta, target: fs.PathLike, manifest: Mapping[str, Any] | None
) -> Callable[[], None]:
    """As :func:`save_directory`, for a snapshot; the returned function writes it and may run in another thread."""
    with _aside(target) as aside:
        meta.path = os.fspath(aside)
        write = engine.stage_save(meta)

    def write_and_publish() -> None:
        try:
            write()  # returns when every rank has written, and raises on every rank if one could not
            _publish(aside, target, manifest)
        except BaseException:
            _clean(aside)
            raise

    return write_and_publish


@contextmanager
def _aside(target: fs.PathLike) -> Iterator[Path]:
    """An empty directory beside ``target``, the same for every rank; removed if the block fails."""
    aside = fs.aside_path(target, _ASIDE_TOKEN)
    with ranks.together(f"{target} could not be written", CheckpointError):
        if ranks.is_first_rank():
            fs.clean_leftovers(aside.parent)
            aside.mkdir(parents=True)
    try:
        yield aside
    except BaseException:
        _clean(aside)
        raise


def _publish(aside: Path, target: fs.PathLike, manifest: Mapping[str, Any] | None) -> None:
    """Give a directory that every rank has written its name; the first rank does."""
    if ranks.is_first_rank():
        if manifest is not None:
            write_manifest(aside, manifest)
        fs.publish_directory(aside, target)


def _clean(aside: Path) -> None:
    if ranks.is_first_rank():
        with suppress(OSError):  # the reason of the failure is worth more than this one
            fs.remove_tree(aside)


def _names(config: SaverConfig) -> tuple[str, str, str]:
    return config.experiment_name, config.trial_name, config.fileroot
