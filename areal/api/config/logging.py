"""Metrics, traces and profiles; read by ``areal.utils.{stats_logger,perf_tracer}``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from areal.api.config.fields import MISSING, ConfigSection, opt, section


@dataclass
class WandBConfig(ConfigSection):
    """Weights & Biases logging."""

    mode: Literal["online", "offline", "disabled", "shared"] = opt("disabled", "Where records go; disabled = off.")
    project: str | None = opt(None, "Project; null = experiment_name.")
    name: str | None = opt(None, "Run name; null = trial_name.")
    wandb_base_url: str = opt("", "Exported to WANDB_BASE_URL.")
    wandb_api_key: str = opt("", "Exported to WANDB_API_KEY.", secret=True)
    entity: str | None = opt(None, "Weights & Biases user or team.")
    job_type: str | None = opt(None, "Job type shown with the run.")
    group: str | None = opt(None, "Run group; null = <experiment>_<trial>.")
    notes: str | None = opt(None, "Notes shown with the run.")
    tags: list[str] | None = opt(None, "Tags shown with the run.")
    config: dict[str, Any] | None = opt(None, "Not read; the whole experiment config is uploaded.")
    id_suffix: str | None = opt("train", "Run id = <exp>_<trial>_<suffix>; 'timestamp' expands to a time.")


@dataclass
class SwanlabConfig(ConfigSection):
    """SwanLab logging."""

    project: str | None = opt(None, "Project; null = experiment_name.")
    name: str | None = opt(None, "Run name; null = trial_name + _train.")
    config: dict[str, Any] | None = opt(None, "Not read; the whole experiment config is uploaded.")
    logdir: str | None = opt(None, "Not read; the log path of the run is used.")
    mode: Literal["cloud", "local", "disabled", "offline"] = opt("disabled", "Where records go; disabled = off.")
    api_key: str | None = opt(
        None, "Null: the environment variable SWANLAB_API_KEY is read when the logger starts.", secret=True
    )


@dataclass
class TensorBoardConfig(ConfigSection):
    """TensorBoard logging."""

    path: str | None = opt(None, "Log directory; null = tensorboard/ under the log path of the run.")


@dataclass
class TrackioConfig(ConfigSection):
    """Trackio logging."""

    mode: Literal["disabled", "online", "local"] = opt("disabled", "Where records go; disabled = off.")
    project: str | None = opt(None, "Project; null = experiment_name.")
    name: str | None = opt(None, "Run name; null = trial_name.")
    space_id: str | None = opt(None, "Hugging Face space that shows the run.")


@dataclass
class StatsLoggerConfig(ConfigSection):
    """Where metrics go."""

    experiment_name: str = opt(MISSING, "Taken from the root when not given.")
    trial_name: str = opt(MISSING, "Taken from the root when not given.")
    fileroot: str = opt(MISSING, "Taken from the root when not given.")
    wandb: WandBConfig = section(WandBConfig, "Weights & Biases settings.")
    tensorboard: TensorBoardConfig = section(TensorBoardConfig, "TensorBoard settings.")
    swanlab: SwanlabConfig = section(SwanlabConfig, "SwanLab settings.")
    trackio: TrackioConfig = section(TrackioConfig, "Trackio settings.")


@dataclass
class SessionTracerConfig(ConfigSection):
    """Life-cycle records of rollout sessions."""

    enabled: bool = opt(False, "Write finished sessions as JSONL.")
    flush_threshold: int = opt(256, "Finished sessions buffered before a write; < 1 means 1.", unit="sessions", ge=1)


@dataclass
class PerfTracerConfig(ConfigSection):
    """Performance traces."""

    experiment_name: str = opt(MISSING, "Required when the section is present.")
    trial_name: str = opt(MISSING, "Taken from the root when not given.")
    fileroot: str = opt(MISSING, "Taken from the root when not given.")
    enabled: bool = opt(False, "Write trace files.")
    save_interval: int = opt(1, "Write the trace file every n steps.", unit="steps", ge=1)
    profile_steps: list[int] | None = opt(None, "Steps with torch profiler detail.")
    session_tracer: SessionTracerConfig | None = section(None, "Life-cycle records of rollout sessions; null = off.")


@dataclass
class MemoryProfilerConfig(ConfigSection):
    """Device memory snapshots."""

    profile_steps: list[int] = opt(help="Steps that are recorded.", factory=lambda: [0, 1])
    max_entries: int = opt(100000, "Size of the ring of allocation events.", unit="entries", ge=1)
