"""Trackers behind ``StatsLogger``: each takes ``(step, {key: number})``. Their packages are imported when chosen.

wandb, swanlab and trackio are extras; asking for one that is not installed is refused with the extra's name.
"""

from __future__ import annotations

import importlib
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from areal.utils import environ
from areal.utils.errors import UnsupportedFeatureError
from areal.utils.manifest import masked_config
from areal.utils.version import get_version_info

if TYPE_CHECKING:
    from areal.api.config.logging import StatsLoggerConfig


class Tracker(Protocol):
    """One destination of numbers."""

    def log(self, step: int, data: dict[str, float]) -> None:
        """Record ``data`` at ``step``."""
        ...

    def close(self) -> None:
        """Flush and finish."""
        ...


def build_trackers(config: StatsLoggerConfig, experiment: Any, log_dir: Path) -> list[Tracker]:
    """The trackers that ``config`` (the ``stats_logger`` section of ``experiment``) asks for; TensorBoard always.

    Raises:
        UnsupportedFeatureError: a configured tracker's package is not installed.
    """
    trackers: list[Tracker] = [TensorBoardTracker(config.tensorboard.path or log_dir / "tensorboard")]
    try:
        if config.wandb.mode != "disabled":
            trackers.append(WandbTracker(config, experiment, log_dir))
        if config.swanlab.mode != "disabled":
            trackers.append(SwanlabTracker(config, experiment, log_dir))
        if config.trackio.mode != "disabled":
            trackers.append(TrackioTracker(config, experiment))
    except BaseException:  # nobody else holds those that are open
        close_all(trackers)
        raise
    return trackers


def close_all(trackers: list[Tracker]) -> None:
    """Close every tracker, also after one that fails; its error is raised at the end."""
    with ExitStack() as parts:
        for tracker in reversed(trackers):
            parts.callback(tracker.close)


class TensorBoardTracker:
    """Event files that ``tensorboard --logdir`` shows; opened at the first record, purging what a resume undid."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._writer: Any = None

    def log(self, step: int, data: dict[str, float]) -> None:
        """Record ``data`` at ``step``."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self.path), purge_step=step if step > 0 else None)
        for key, value in data.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        """Flush and close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WandbTracker:
    """Weights & Biases; the run id is ``<experiment>_<trial>_<suffix>``, so a resumed run continues its curves."""

    def __init__(self, config: StatsLoggerConfig, experiment: Any, log_dir: Path) -> None:
        wandb = _import_tracker("wandb")
        section = config.wandb
        keys = {"WANDB_BASE_URL": section.wandb_base_url, "WANDB_API_KEY": section.wandb_api_key}
        environ.set_env({key: value for key, value in keys.items() if value})
        suffix = time.strftime("%Y%m%d-%H%M%S") if section.id_suffix == "timestamp" else section.id_suffix or "train"
        self._run = wandb.init(
            mode=section.mode,
            entity=section.entity,
            project=section.project or config.experiment_name,
            name=section.name or config.trial_name,
            job_type=section.job_type,
            group=section.group or f"{config.experiment_name}_{config.trial_name}",
            notes=section.notes,
            tags=section.tags,
            config=_run_config(experiment),
            dir=str(log_dir),  # wandb makes its own directory "wandb" in it
            id=f"{config.experiment_name}_{config.trial_name}_{suffix}",
            resume="allow",
        )

    def log(self, step: int, data: dict[str, float]) -> None:
        """Record ``data`` at ``step``."""
        self._run.log(data, step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class SwanlabTracker:
    """SwanLab."""

    def __init__(self, config: StatsLoggerConfig, experiment: Any, log_dir: Path) -> None:
        self._swanlab = _import_tracker("swanlab")
        section = config.swanlab
        if section.mode == "local":
            _import_tracker("swanboard", "swanlab", "swanlab[dashboard]")
        api_key = section.api_key or environ.get_env("SWANLAB_API_KEY")
        if api_key and section.mode == "cloud":
            self._swanlab.login(api_key)
        directory = log_dir / "swanlog"
        directory.mkdir(exist_ok=True)
        self._swanlab.init(
            project=section.project or config.experiment_name,
            experiment_name=section.name or f"{config.trial_name}_train",
            config=_run_config(experiment),
            logdir=str(directory),
            mode=section.mode,
        )

    def log(self, step: int, data: dict[str, float]) -> None:
        """Record ``data`` at ``step``."""
        self._swanlab.log(data, step=step)

    def close(self) -> None:
        """Finish the run."""
        self._swanlab.finish()


class TrackioTracker:
    """Trackio: a local dashboard, or a Hugging Face space when online."""

    def __init__(self, config: StatsLoggerConfig, experiment: Any) -> None:
        self._trackio = _import_tracker("trackio")
        section = config.trackio
        self._trackio.init(
            project=section.project or config.experiment_name,
            name=section.name or config.trial_name,
            config=_run_config(experiment),
            space_id=section.space_id if section.mode == "online" else None,
            resume="allow",
        )

    def log(self, step: int, data: dict[str, float]) -> None:
        """Record ``data`` at ``step``."""
        self._trackio.log(data, step=step)

    def close(self) -> None:
        """Finish the run."""
        self._trackio.finish()


def _import_tracker(name: str, owner: str = "", requirement: str = "") -> Any:
    """The package ``name`` of the tracker ``owner`` (default: itself), which ``requirement`` installs."""
    owner, requirement = owner or name, requirement or f"areal[{name}]"
    try:
        return importlib.import_module(name)
    except ImportError as exc:
        raise UnsupportedFeatureError(
            f"stats_logger.{owner}.mode is not 'disabled', but the package {name!r} cannot be imported ({exc}); "
            f"install it with pip install '{requirement}', or set stats_logger.{owner}.mode=disabled"
        ) from exc


def _run_config(experiment: Any) -> dict[str, Any]:
    version = get_version_info()
    return {**masked_config(experiment), "areal_version": version.full_version, "areal_commit": version.commit}
