"""Writes ``docs/en/cli_reference.md`` from the configuration dataclasses.

Run ``python docs/generate_cli_docs.py`` after changing a config class; ``--check`` only compares, as a test does.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import sys
import typing
from pathlib import Path
from typing import Any, Literal

from areal.api import cli_args
from areal.api.config.fields import MISSING, is_section, members, plain, type_hints

TARGET = Path(__file__).parent / "en" / "cli_reference.md"

GROUPS = {
    "Experiments": ("BaseExperimentConfig", "PPOConfig", "GRPOConfig", "SFTConfig", "RWConfig", "DPOConfig"),
    "Rollout and generation": ("InferenceEngineConfig", "GenerationHyperparameters", "AgentConfig"),
    "Inference engines": ("NativeConfig", "vLLMConfig", "SGLangConfig"),
    "Training": ("TrainEngineConfig", "MicroBatchSpec", "OptimizerConfig", "FailureCaptureConfig"),
    "Algorithms": (
        "PPOActorConfig",
        "PPOCriticConfig",
        "TeacherConfig",
        "NormConfig",
        "RejectionSamplingConfig",
        "MismatchConfig",
        "DPOEngineConfig",
    ),
    "Training backends": (
        "FSDPEngineConfig",
        "FSDPWrapPolicy",
        "ArchonEngineConfig",
        "ArchonFP8Config",
        "MegatronEngineConfig",
        "DistributedDataParallelConfig",
        "FP8EngineConfig",
    ),
    "Datasets": ("TrainDatasetConfig", "ValidDatasetConfig"),
    "Saving, evaluation, recovery": ("SaverConfig", "EvaluatorConfig", "RecoverConfig"),
    "Metrics and traces": (
        "StatsLoggerConfig",
        "WandBConfig",
        "SwanlabConfig",
        "TensorBoardConfig",
        "TrackioConfig",
        "PerfTracerConfig",
        "SessionTracerConfig",
        "MemoryProfilerConfig",
    ),
    "Cluster and scheduling": (
        "ClusterSpecConfig",
        "NameResolveConfig",
        "SchedulerConfig",
        "SchedulingSpec",
        "SchedulingStrategy",
    ),
}

INTRO = """# CLI reference

<!-- Written by docs/generate_cli_docs.py; do not edit. -->

A run is described by one YAML file and overrides on the command line:

```bash
python examples/math/gsm8k_rl.py --config examples/math/gsm8k_grpo_cpu.yaml actor.optimizer.lr=1e-6 total_train_steps=20
```

- `a.b=1`, `+a.b=1` and `++a.b=1` set any key below, whether the file has it or not; `~a.b` takes a key out of the file.
- Lists: `a=[1,2]`; one entry: `actor.scheduling_spec.0.gpu=1`. Nothing: `a=null`. Another key's value: `${a.b}`.
- An unknown key, a wrong type, a choice or number out of range is an error that names the key and what is allowed.
- `experiment_name`, `trial_name` and `fileroot` of sections are taken from the root when they are left out.
- A default marked *follows* may be replaced, as its text says, as long as you do not write the field yourself.
"""


def main(argv: list[str]) -> int:
    """Write the page, or with ``--check`` return 1 if it is out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare")
    check = parser.parse_args(argv).check
    text = render()
    if check:
        current = TARGET.read_text(encoding="utf-8") if TARGET.exists() else ""
        if current != text:
            print(f"{TARGET} is out of date; run python docs/generate_cli_docs.py")
        return int(current != text)
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text(text, encoding="utf-8")
    print(TARGET)
    return 0


def render() -> str:
    """Return the whole page."""
    parts = [INTRO]
    for title, names in GROUPS.items():
        parts.append(f"\n## {title}\n")
        for name in names:
            parts.append(_class_section(getattr(cli_args, name)))
    return "".join(parts)


def _class_section(cls: type) -> str:
    parent = next((base for base in cls.__bases__ if dataclasses.is_dataclass(base)), None)
    inherited = {spec.name: spec for spec in dataclasses.fields(parent)} if parent else {}
    text = f"\n### {cls.__name__}\n\n{inspect.getdoc(cls)}\n"
    shown = parent is not None and not parent.__name__.startswith("_")
    if shown and parent is not None:
        text += f"\nHas every field of [{parent.__name__}](#{parent.__name__.lower()})"
        text += " and:\n" if len(inherited) < len(dataclasses.fields(cls)) else ".\n"
    rows = [
        _row(cls, spec)
        for spec in dataclasses.fields(cls)
        if not (shown and spec.name in inherited and inherited[spec.name] is spec)
    ]
    if rows:
        text += "\n| field | type | default | meaning |\n| --- | --- | --- | --- |\n" + "\n".join(rows) + "\n"
    return text


def _row(cls: type, spec: dataclasses.Field[Any]) -> str:
    cells = [f"`{spec.name}`", _type(type_hints(cls)[spec.name]), _default(spec), spec.metadata["help"]]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _type(hint: Any) -> str:
    words = []
    for part in members(hint):
        if part is type(None):
            words.append("null")
        elif typing.get_origin(part) is Literal:
            words.extend(f"`{choice}`" for choice in typing.get_args(part))
        elif dataclasses.is_dataclass(part):
            words.append(f"[{part.__name__}](#{part.__name__.lower()})")
        elif typing.get_args(part):
            inner = ", ".join(_type(arg) for arg in typing.get_args(part))
            words.append(f"{part.__origin__.__name__} of {inner}")
        else:
            words.append(getattr(part, "__name__", str(part)))
    return " or ".join(words)


def _default(spec: dataclasses.Field[Any]) -> str:
    value = spec.default
    if spec.default_factory is not dataclasses.MISSING:
        value = spec.default_factory()
    if isinstance(value, str) and value == MISSING:
        return "required"
    if value is None:
        return "null"
    if is_section(value):
        return _section_default(value)
    if isinstance(value, list) and value and is_section(value[0]):
        return "[" + ", ".join(_section_default(item) for item in value) + "]"
    follows = "" if plain(value) is value else " *(follows)*"
    text = (
        str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else f"{plain(value)}"
    )
    return f"`{text}`{follows}"


def _section_default(value: Any) -> str:
    """Name a section by what differs from its own defaults."""
    changed = []
    for spec in dataclasses.fields(value):
        default = spec.default_factory() if spec.default_factory is not dataclasses.MISSING else spec.default
        if getattr(value, spec.name) != default:
            changed.append(f"{spec.name}: {getattr(value, spec.name)}")
    return f"`{{{', '.join(changed)}}}`" if changed else "its defaults"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
