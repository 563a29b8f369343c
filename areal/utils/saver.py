"""Writes Hugging Face checkpoints when due: the trainer calls ``save`` once per step and engine, after the update.

A checkpoint is ``{save root}/{name}/epoch{e}epochstep{s}globalstep{g}/``, complete from the moment it has that name:
it is written aside, fsynced and renamed. Each holds a ``manifest.json``. The class also knows where checkpoints are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from areal.api.io_struct import SaveLoadMeta
from areal.utils import fs, logging, ranks
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


class Saver:
    """Saves engines at the configured frequency.

    Args:
        config: ``freq_epochs``, ``freq_steps``, ``freq_secs`` (null = off; any of them fires), ``mode``, paths.
        ft_spec: tells where an epoch ends.
        manifest: goes into every checkpoint, see ``utils.manifest``.
    """

    def __init__(
        self, config: SaverConfig, ft_spec: FinetuneSpec, *, manifest: Mapping[str, Any] | None = None
    ) -> None:
        self.config = config
        self.ft_spec = ft_spec
        self.manifest = dict(manifest or {})
        self._tracker = StepTracker(EpochStepTimeFreqCtl(config.freq_epochs, config.freq_steps, config.freq_secs))
        if config.mode == "async":
            logger.warning("saver.mode=async: this engine saves synchronously; training waits for each checkpoint")

    @property
    def is_async(self) -> bool:
        """Whether a save may still be under way when ``save`` returns."""
        return False

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
            The checkpoint's directory, or None when nothing was due.
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
        save_directory(
            engine, meta, target, {**self.manifest, "epoch": epoch, "step": step, "global_step": global_step}
        )
        if ranks.is_first_rank():
            logger.info("saved %s of step %d to %s", name, global_step, target)
        return target

    def model_save_path(self, epoch: int, step: int, global_step: int, name: str = "default") -> str:
        """Directory of one checkpoint of this trial; its parents are created."""
        return self.get_model_save_path(*_names(self.config), epoch, step, global_step, name)

    def maybe_wait_for_staging(self) -> None:
        """Return when the weights may change again; called before every update."""

    def finalize(self) -> None:
        """Return when every checkpoint is complete; called at the end of a run."""

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
    aside = fs.aside_path(target, _ASIDE_TOKEN)
    first = ranks.is_first_rank()
    if first:
        fs.clean_leftovers(aside.parent)
        aside.mkdir(parents=True)
    ranks.barrier()  # nobody writes before the directory is there ...
    meta.path = os.fspath(aside)
    engine.save(meta)
    ranks.barrier()  # ... and it gets its name when everybody has written
    if first:
        if manifest is not None:
            write_manifest(aside, manifest)
        fs.publish_directory(aside, target)
    ranks.barrier()


def _names(config: SaverConfig) -> tuple[str, str, str]:
    return config.experiment_name, config.trial_name, config.fileroot
