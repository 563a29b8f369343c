"""Periodic actions: evaluation, checkpoints, recover points; read by ``areal.utils.{evaluator,saver,recover}``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from areal.api.config.fields import MISSING, ConfigSection, opt


@dataclass
class _Timer(ConfigSection):
    """When something periodic fires; any of the three frequencies does, each counts since its own last firing."""

    experiment_name: str = opt(MISSING, "Experiment name; taken from the root when not given.")
    trial_name: str = opt(MISSING, "Trial name; taken from the root when not given.")
    fileroot: str = opt(MISSING, "Root of what is written; taken from cluster.fileroot when not given.")
    freq_epochs: int | None = opt(None, "Fire every n epochs; null = off.", unit="epochs", ge=1)
    freq_steps: int | None = opt(None, "Fire every n steps; null = off.", unit="steps", ge=1)
    freq_secs: int | None = opt(None, "Fire every n seconds; null = off.", unit="s", gt=0)


@dataclass
class EvaluatorConfig(_Timer):
    """When evaluation runs."""

    eval_before_train: bool = opt(False, "Evaluate the initial weights before the first step.")


@dataclass
class SaverConfig(_Timer):
    """When and how Hugging Face checkpoints are written."""

    mode: Literal["auto", "sync", "async"] = opt(
        "auto",
        "Async = a step waits only for a copy to host memory; engines without snapshots save as sync, with a warning; "
        "auto = async only for Archon.",
    )


@dataclass
class RecoverConfig(_Timer):
    """Recover points: when they are written and whether a run resumes."""

    mode: Literal["on", "auto", "off", "disabled"] = opt(
        "disabled",
        "On/auto = resume when possible; off/disabled = never.",
        refused={"fault": "use on", "resume": "use on"},
    )
    retries: int = opt(3, "How often a launcher restarts a failed run.", ge=0)
    no_save_optim: bool = opt(False, "Skip optimizer in recover checkpoints.")
    no_load_optim: bool = opt(False, "Skip optimizer on resume.")
