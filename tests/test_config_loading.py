"""Loading: sections of the user's own, and settings that deserve a warning."""

from __future__ import annotations

import enum
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from areal.api.cli_args import ConfigError, DPOConfig, GRPOConfig, RWConfig, SFTConfig, load_config
from tests.test_cli_args import SMALL_YAML

EXAMPLES = sorted((Path(__file__).resolve().parents[1] / "examples").rglob("*.yaml"))


@pytest.fixture
def small(tmp_path: Path) -> list[str]:
    path = tmp_path / "config.yaml"
    path.write_text(SMALL_YAML.replace("ROOT", str(tmp_path / "root")))
    return ["--config", str(path)]


def _load(argv: list[str], *overrides: str, cls: type[Any] = GRPOConfig) -> Any:
    return load_config([*argv, *overrides], cls)[0]


# ---------------------------------------------------------------------------------------------------------- subclass
class Style(enum.Enum):
    """Choice of a user's own section."""

    SHORT = "short"
    LONG = "long"


@dataclass
class ToolConfig:
    """A section of the user's own, a plain dataclass."""

    name: str
    limits: tuple[int, float] = (1, 2.0)
    style: Style = Style.SHORT
    where: Path | None = None

    def __post_init__(self) -> None:
        if self.name == "bad":
            raise ValueError("bad name")


@dataclass
class MyConfig(GRPOConfig):
    """Root with sections of the user's own."""

    workflow: str = "a.b.C"
    tool: ToolConfig = field(default_factory=lambda: ToolConfig(name="calc"))
    tools: dict[str, ToolConfig] = field(default_factory=dict)
    max_turns: int | str = 3


def test_load_user_subclass_merges_its_sections_the_same_way(small: list[str]) -> None:
    config = _load(
        small, "tool.style=long", "tool.limits=[4,5]", "tools.x.name=y", "tool.where=/a", "max_turns=two", cls=MyConfig
    )

    assert isinstance(config, MyConfig)
    assert config.tool == ToolConfig(name="calc", limits=(4, 5.0), style=Style.LONG, where=Path("/a"))
    assert config.tools["x"].name == "y"
    assert (config.max_turns, config.workflow) == ("two", "a.b.C")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("tool.naem=x", r"tool\.naem; did you mean tool\.name"),
        ("tool.name=bad", "tool: bad name"),
        ("tool.style=x", "SHORT, LONG"),
        ("tool.limits=[1]", "a list of 2 values"),
        ("tools.x.limits=[1,2]", r"missing: tools\.x\.name"),
    ],
)
def test_load_user_subclass_errors_name_the_full_key(small: list[str], override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _load(small, override, cls=MyConfig)


# ------------------------------------------------------------------------------------------------------------ advice
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("total_train_n_seqs=5", "total_train_n_seqs=5 has no effect"),
        ("actor.optimizer.hysteresis=3", "actor.optimizer.hysteresis=3 has no effect"),
        ("stats_logger.wandb.config={a:1}", "stats_logger.wandb.config"),
        ("stats_logger.swanlab.logdir=x", "stats_logger.swanlab.logdir='x' has no effect"),
        ("scheduler.endpoint=http://x", "scheduler.endpoint"),
        ("train_dataset.pin_memory=true", "train_dataset.pin_memory=True has no effect"),
        ("actor.scheduling_spec.0.task_type=engine", "actor.scheduling_spec.0.task_type='engine' has no effect"),
        ("ref={}", None),
        ("actor={kl_ctl:0} ref={}", "no reference model is built"),
        ("gconfig.top_p=0.9", "truncated distribution"),
        ("gconfig.top_p=0.9", "no statistic shows it"),
        ("gconfig.top_p=0.9 rollout.backend='vllm:d1'", "renormalised over the tokens that are kept"),
        ("gconfig.min_new_tokens=2 rollout.backend='vllm:d1'", "leave out the stop tokens"),
        ("gconfig.min_new_tokens=2", None),
        ("gconfig.frequency_penalty=0.5", "does not know"),
        ("gconfig.temperature=0", "gconfig.temperature=0: all samples of a prompt are equal"),
        ("gconfig.temperature=0.7", None),
        ("actor.recompute_logprob=true rollout.max_head_offpolicyness=1", "nothing corrects for their age"),
        ("rollout.max_head_offpolicyness=2", "holds stale tokens back"),
        ("rollout.max_head_offpolicyness=1", None),
        ("actor.loss_fn=sapo actor.recompute_logprob=true rollout.max_head_offpolicyness=1", "recompute_logprob=false"),
        ("actor.loss_fn=sapo rollout.max_head_offpolicyness=2", None),
        ("actor.loss_fn=cispo rollout.max_head_offpolicyness=2", None),
        ("actor={use_decoupled_loss:true,rejection_sampling:{}} rollout.max_head_offpolicyness=2", None),
        ("gconfig.top_k=50", "truncated distribution"),
        ("gconfig.greedy=true", "all samples of a prompt are equal"),
        ("actor.temperature=0.5", "actor.temperature=0.5 differs from gconfig.temperature=1"),
        ("actor.reward_norm={mean_level:group,group_size:3}", "actor.reward_norm.group_size=3 has no effect"),
        ("actor.rejection_sampling={upper:2}", "without actor.use_decoupled_loss"),
        ("actor.use_decoupled_loss=true", "stale tokens are not filtered"),
    ],
)
def test_load_questionable_value_warns_once(
    small: list[str], caplog: pytest.LogCaptureFixture, override: str, message: str | None
) -> None:
    from areal.utils import logging as areal_logging

    logger = areal_logging.getLogger("Config")
    handler = caplog.handler
    base = logger if isinstance(logger, logging.Logger) else logger.logger
    base.addHandler(handler)
    try:
        _load(small, *override.split(" "))
    finally:
        base.removeHandler(handler)

    if message is None:
        assert not caplog.records
        return
    records = {id(record): record for record in caplog.records}.values()
    assert sum(message in record.getMessage() for record in records) == 1


# ---------------------------------------------------------------------------------------------------------- examples
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_load_shipped_yaml_is_valid(path: Path) -> None:
    kinds = {"sft": SFTConfig, "dpo": DPOConfig, "rw": RWConfig}
    cls = next((kinds[word] for word in path.stem.split("_") if word in kinds), GRPOConfig)

    config = _load(["--config", str(path)], cls=cls)

    assert config.actor.path
