"""StatsLogger: stats.jsonl, TensorBoard, the table, online trackers, and what a resume cuts away."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace

import pytest

from areal.api.config.logging import StatsLoggerConfig
from areal.api.io_struct import FinetuneSpec
from areal.utils.stats_logger import StatsLogger, read_stats, tabulate_stats

SPEC = FinetuneSpec(total_train_epochs=2, dataset_size=8, train_batch_size=2)


@dataclass
class Experiment:
    """The part of an experiment config that the logger reads."""

    stats_logger: StatsLoggerConfig
    seed: int = 1
    extra: dict = field(default_factory=lambda: {"admin_api_key": "hush", "lr": 1e-3})


def _config(root, **sections) -> Experiment:
    config = StatsLoggerConfig(experiment_name="exp", trial_name="trial", fileroot=str(root))
    for name, values in sections.items():
        for key, value in values.items():
            setattr(getattr(config, name), key, value)
    return Experiment(config)


def _commit(logger: StatsLogger, steps) -> None:
    for g in steps:
        logger.commit(g // 4, g % 4, g, {"loss": float(g), "reward": 0.5, "reward__count": 3})


def test_commit_writes_rows_and_tensorboard_without_counts(tmp_path):
    logger = StatsLogger(_config(tmp_path), SPEC)
    _commit(logger, range(2))
    logger.close()
    logger.close()

    rows = read_stats(logger.log_dir)

    assert [(r["global_step"], r["log_step"], r["stats"]) for r in rows] == [
        (g, g, {"loss": float(g), "reward": 0.5}) for g in range(2)
    ]
    assert rows[0]["format"] == 1
    assert list((logger.log_dir / "tensorboard").glob("events.out.tfevents.*"))


def test_tensorboard_path_of_the_config_is_used(tmp_path):
    logger = StatsLogger(_config(tmp_path, tensorboard={"path": str(tmp_path / "tb")}), SPEC)
    _commit(logger, [0])
    logger.close()

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(0, 0.0)]


def test_commit_list_of_dicts_advances_the_log_step(tmp_path):
    logger = StatsLogger(_config(tmp_path), SPEC)
    logger.commit(0, 0, 0, [{"a": 1}, {"a": 2}])
    logger.commit(0, 1, 1, {"a": 3})
    logger.close()
    assert [r["log_step"] for r in read_stats(logger.log_dir)] == [0, 1, 2]
    assert logger.state_dict() == {"last_commit_step": 2}


def test_load_state_dict_never_goes_back_on_the_x_axis(tmp_path):
    logger = StatsLogger(_config(tmp_path), SPEC)
    logger.load_state_dict({"last_commit_step": 7})
    _commit(logger, [3])
    logger.close()
    assert read_stats(logger.log_dir)[0]["log_step"] == 8


def test_resume_after_cuts_later_rows_and_a_torn_line(tmp_path):
    first = StatsLogger(_config(tmp_path), SPEC)
    _commit(first, range(4))
    first.close()
    with (first.log_dir / "stats.jsonl").open("a") as file:
        file.write('{"format": 1, "global_st')

    resumed = StatsLogger(_config(tmp_path), SPEC)
    resumed.load_state_dict({"last_commit_step": 1})
    resumed.resume_after(1)
    _commit(resumed, range(2, 4))
    resumed.close()

    assert [r["global_step"] for r in read_stats(resumed.log_dir)] == [0, 1, 2, 3]


def test_first_commit_of_a_resumed_run_cuts_by_itself(tmp_path):
    first = StatsLogger(_config(tmp_path), SPEC)
    _commit(first, range(4))
    second = StatsLogger(_config(tmp_path), SPEC)
    _commit(second, [2])
    for logger in (first, second):
        logger.close()
    assert [r["global_step"] for r in read_stats(second.log_dir)] == [0, 1, 2]


def test_fresh_start_keeps_the_earlier_runs_file(tmp_path):
    for _ in range(2):
        logger = StatsLogger(_config(tmp_path), SPEC)
        _commit(logger, range(2))
        logger.close()
    assert len(read_stats(logger.log_dir)) == 2
    assert len(read_stats(logger.log_dir / "stats.1.jsonl")) == 2


def test_non_finite_numbers_stay_valid_json(tmp_path):
    logger = StatsLogger(_config(tmp_path), SPEC)
    logger.commit(0, 0, 0, {"a": float("nan"), "b": float("inf")})
    logger.close()

    def refuse(text: str) -> None:
        raise AssertionError(text)

    line = (logger.log_dir / "stats.jsonl").read_text()
    assert json.loads(line, parse_constant=refuse)["stats"] == {"a": None, "b": "inf"}


def test_section_instead_of_config_is_refused(tmp_path):
    with pytest.raises(ValueError, match="whole experiment config"):
        StatsLogger(_config(tmp_path).stats_logger, SPEC)


def test_other_ranks_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    logger = StatsLogger(_config(tmp_path), SPEC)
    _commit(logger, range(2))
    logger.close()
    assert not list(tmp_path.rglob("*"))


def test_table_goes_to_the_log_unless_off(tmp_path, caplog):
    logger = StatsLogger(_config(tmp_path), SPEC)
    _commit(logger, [0])
    assert "5.0000e-01" in caplog.text
    assert "epoch 1/2, step 1/4, train step 1/8" in caplog.text
    caplog.clear()
    logger.table = False
    _commit(logger, [1])
    logger.close()
    assert "5.0000e-01" not in caplog.text


def test_tabulate_stats_fills_columns_from_top_to_bottom():
    text = tabulate_stats({"a": 1, "b": 2, "c": 3, "d": 4, "e": 5}, num_cols=2)
    assert [line.split() for line in text.splitlines()] == [
        ["a", "1.0000e+00", "|", "d", "4.0000e+00"],
        ["b", "2.0000e+00", "|", "e", "5.0000e+00"],
        ["c", "3.0000e+00"],
    ]


def test_get_log_path_takes_a_section_or_the_names(tmp_path):
    config = _config(tmp_path)
    by_names = StatsLogger.get_log_path(experiment_name="exp", trial_name="trial", fileroot=str(tmp_path))
    assert StatsLogger.get_log_path(config) == StatsLogger.get_log_path(config.stats_logger) == by_names
    assert StatsLogger.get_log_path("exp", "trial", str(tmp_path)) == by_names
    with pytest.raises(ValueError, match="trial_name"):
        StatsLogger.get_log_path(experiment_name="exp", fileroot=str(tmp_path))


@pytest.mark.parametrize(("name", "mode"), [("wandb", "online"), ("swanlab", "local"), ("trackio", "local")])
def test_tracker_without_its_package_is_refused_naming_the_extra(tmp_path, monkeypatch, name, mode):
    monkeypatch.setitem(sys.modules, name, None)  # the import system's mark for "cannot be imported"
    with pytest.raises(NotImplementedError, match=rf"areal\[{name}\]"):
        StatsLogger(_config(tmp_path, **{name: {"mode": mode}}), SPEC)


class FakeTracker(ModuleType):
    """Stands for wandb, swanlab or trackio: remembers what it is told."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.settings: dict = {}
        self.logged: list = []
        self.finished = 0

    def init(self, **settings) -> SimpleNamespace:
        self.settings = settings
        return SimpleNamespace(log=self.log, finish=self.finish)

    def log(self, data: dict, step: int) -> None:
        self.logged.append((step, data))

    def finish(self) -> None:
        self.finished += 1

    def login(self, key: str) -> None:
        self.settings["key"] = key


def test_wandb_gets_id_masked_config_and_steps(tmp_path, monkeypatch):
    wandb = FakeTracker("wandb")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    logger = StatsLogger(_config(tmp_path, wandb={"mode": "offline"}), SPEC)
    _commit(logger, [0])
    logger.close()

    assert wandb.settings["id"] == "exp_trial_train"
    assert wandb.settings["resume"] == "allow"
    assert (wandb.settings["project"], wandb.settings["name"]) == ("exp", "trial")
    assert wandb.settings["config"]["extra"] == {"admin_api_key": "***", "lr": 1e-3}
    assert wandb.settings["config"]["areal_version"]
    assert wandb.logged == [(0, {"loss": 0.0, "reward": 0.5})]
    assert wandb.settings["dir"] == str(logger.log_dir)  # wandb adds "wandb/" itself
    assert wandb.finished == 1


def test_tracker_that_is_refused_leaves_none_of_the_others_open(tmp_path, monkeypatch):
    wandb = FakeTracker("wandb")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(NotImplementedError, match="trackio"):
        StatsLogger(_config(tmp_path, wandb={"mode": "offline"}, trackio={"mode": "local"}), SPEC)
    assert wandb.finished == 1


def test_tracker_that_cannot_be_closed_keeps_none_of_the_others_open(tmp_path, monkeypatch):
    wandb, trackio = FakeTracker("wandb"), FakeTracker("trackio")
    wandb.finish = lambda: 1 / 0
    for module in (wandb, trackio):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    logger = StatsLogger(_config(tmp_path, wandb={"mode": "offline"}, trackio={"mode": "local"}), SPEC)
    with pytest.raises(ZeroDivisionError):
        logger.close()
    assert trackio.finished == 1


def test_swanlab_local_without_its_dashboard_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "swanlab", FakeTracker("swanlab"))
    monkeypatch.setitem(sys.modules, "swanboard", None)
    with pytest.raises(NotImplementedError, match=r"swanlab\[dashboard\]"):
        StatsLogger(_config(tmp_path, swanlab={"mode": "local"}), SPEC)


@pytest.mark.parametrize(("name", "mode"), [("wandb", "offline"), ("swanlab", "offline"), ("trackio", "local")])
def test_real_tracker_takes_two_runs_one_after_the_other(tmp_path, monkeypatch, name, mode):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when trackio is imported
    pytest.importorskip(name, reason=f"the extra {name} is not installed")
    for _ in range(2):
        logger = StatsLogger(_config(tmp_path, **{name: {"mode": mode}}), SPEC)
        logger.commit(0, 0, 0, {"loss": 1.5, "not_a_number": float("nan")})
        logger.commit(0, 1, 1, {"loss": 0.5})
        logger.close()
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 1000]
    assert any(path.suffix in (".wandb", ".swanlab", ".db") for path in written)


@pytest.mark.parametrize(("name", "mode"), [("swanlab", "offline"), ("trackio", "local")])
def test_swanlab_and_trackio_get_project_and_steps(tmp_path, monkeypatch, name, mode):
    module = FakeTracker(name)
    monkeypatch.setitem(sys.modules, name, module)
    logger = StatsLogger(_config(tmp_path, **{name: {"mode": mode}}), SPEC)
    _commit(logger, [0])
    logger.close()
    assert module.settings["project"] == "exp"
    assert module.logged[0][0] == 0
    assert module.finished == 1
