"""Recover points: complete or absent, the newest is used, everything comes back; nothing is pickled."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.multiprocessing as mp

from areal.api.config.logging import StatsLoggerConfig
from areal.api.config.timers import EvaluatorConfig, RecoverConfig, SaverConfig
from areal.api.io_struct import FinetuneSpec, SaveLoadMeta, StepInfo
from areal.utils import recover
from areal.utils.evaluator import Evaluator
from areal.utils.recover import InValidRecoverInfo, RecoverHandler, RecoverInfo, check_if_recover, recover_points
from areal.utils.saver import Saver
from areal.utils.stats_logger import StatsLogger, read_stats

SPEC = FinetuneSpec(total_train_epochs=3, dataset_size=8, train_batch_size=2)  # 4 steps per epoch


class ValueEngine:
    """An engine whose weights are one number."""

    def __init__(self, value: float = 0.0) -> None:
        self.value = value
        self.fail = False
        self.metas: list[SaveLoadMeta] = []

    def save(self, meta: SaveLoadMeta) -> None:
        self.metas.append(meta)
        Path(meta.path, "shard.json").write_text(json.dumps(self.value))
        if self.fail:
            raise OSError("disk full")

    def load(self, meta: SaveLoadMeta) -> None:
        self.metas.append(meta)
        self.value = json.loads(Path(meta.path, "shard.json").read_text())


class Cursor:
    """A data loader's position."""

    def __init__(self) -> None:
        self.state = {"format": 1, "epoch": 0, "step": 0}

    def state_dict(self) -> dict:
        return self.state

    def load_state_dict(self, state: dict) -> None:
        self.state = state


class Run:
    """The parts of a trainer that take part in recovery."""

    def __init__(self, root: Path, mode: str = "on", **recover) -> None:
        names = {"experiment_name": "exp", "trial_name": "trial", "fileroot": str(root)}
        self.config = RecoverConfig(**names, mode=mode, freq_steps=1, **recover)
        self.handler = RecoverHandler(self.config, SPEC, manifest={"config_hash": "abc"})
        self.saver = Saver(SaverConfig(**names, freq_steps=2), SPEC)
        self.evaluator = Evaluator(EvaluatorConfig(**names, freq_steps=2), SPEC)
        self.logger = StatsLogger(SimpleNamespace(stats_logger=StatsLoggerConfig(**names), seed=1), SPEC, table=False)
        self.engines = {"default": ValueEngine(), "critic": ValueEngine()}
        self.cursor = Cursor()

    def step(self, global_step: int, **kwargs) -> str | None:
        info = StepInfo(global_step // 4, global_step % 4, global_step, 4)
        for number, engine in enumerate(self.engines.values()):
            engine.value = global_step + number / 10
        self.cursor.state = {"format": 1, "epoch": info.epoch, "step": info.epoch_step + 1}
        self.saver.save(self.engines["default"], info.epoch, info.epoch_step, global_step)
        self.evaluator.evaluate(lambda: None, info.epoch, info.epoch_step, global_step)
        self.logger.commit(info.epoch, info.epoch_step, global_step, {"loss": float(global_step)})
        return self.handler.dump(self.engines, info, self.saver, self.evaluator, self.logger, self.cursor, **kwargs)

    def load(self) -> RecoverInfo | None:
        return self.handler.load(self.engines, self.saver, self.evaluator, self.logger, self.cursor)


def test_dump_then_load_restores_every_part(tmp_path):
    run = Run(tmp_path)
    for g in range(3):
        run.step(g, extra={"rows": [(0, 7)], "version": g + 1})

    resumed = Run(tmp_path)
    info = resumed.load()

    assert info is not None
    assert info.last_step_info == StepInfo(0, 2, 2, 4)
    assert info.last_step_info.next().global_step == 3
    assert info.extra == {"rows": [(0, 7)], "version": 3}
    assert [engine.value for engine in resumed.engines.values()] == [2.0, 2.1]
    assert resumed.cursor.state == {"format": 1, "epoch": 0, "step": 3}
    assert resumed.logger.state_dict() == {"last_commit_step": 2}
    assert resumed.saver.save(resumed.engines["default"], 0, 3, 3) is not None  # steps 1 and 3 are due, not 2 and 4
    assert resumed.evaluator.should_evaluate(3, 3)
    meta = resumed.engines["default"].metas[0]
    assert (meta.weight_format, meta.with_optim) == ("dcp", True)


def test_dump_keeps_only_the_newest_point_and_links_to_it(tmp_path):
    run = Run(tmp_path)
    for g in range(3):
        run.step(g)

    points = recover_points(run.config)

    assert [p.name for p in points] == ["globalstep2"]
    root = points[0].parent.parent
    assert json.loads((root / "recover_info" / "step_info.json").read_text())["value"]["global_step"] == 2
    assert json.loads((root / "critic" / "recover_checkpoint" / "shard.json").read_text()) == 2.1
    assert json.loads((points[0] / "manifest.json").read_text())["config_hash"] == "abc"
    assert not list(root.rglob("*.pkl"))


@pytest.mark.parametrize("action", ["load", "dump"])
def test_point_or_link_left_by_a_kill_is_removed(action, tmp_path):
    run = Run(tmp_path)
    save_root = Path(run.step(0)).parent.parent
    (save_root / "recover" / ".globalstep1.aside-dumping").mkdir()
    (save_root / ".recover_info.aside-0123abcd").symlink_to("nowhere")

    if action == "load":
        Run(tmp_path).load()
    else:
        run.step(1)

    assert not list(save_root.rglob(".*.aside-*"))


def test_dump_that_fails_keeps_the_point_before_it(tmp_path):
    run = Run(tmp_path)
    run.step(0)
    run.engines["critic"].fail = True
    with pytest.raises(OSError, match="disk full"):
        run.step(1)

    resumed = Run(tmp_path)
    info = resumed.load()

    assert info is not None
    assert info.last_step_info.global_step == 0
    assert [p.name for p in recover_points(run.config)[0].parent.iterdir()] == ["globalstep0"]  # nothing is left aside


def test_load_cuts_stats_back_to_the_resumed_step(tmp_path):
    run = Run(tmp_path)
    for g in range(2):
        run.step(g)
    run.logger.commit(0, 2, 2, {"loss": 2.0})  # killed before step 2's recover point
    run.logger.close()

    resumed = Run(tmp_path)
    resumed.load()
    resumed.step(2)
    resumed.logger.close()

    assert [row["global_step"] for row in read_stats(resumed.logger.log_dir)] == [0, 1, 2]


@pytest.mark.parametrize("mode", ["off", "disabled"])
def test_mode_off_neither_writes_nor_reads(tmp_path, mode):
    Run(tmp_path).step(0)
    run = Run(tmp_path, mode=mode)
    assert run.step(1) is None
    assert run.load() is None
    assert not check_if_recover(run.config)


def test_load_without_a_point_warns_and_starts_fresh(tmp_path, caplog):
    run = Run(tmp_path)
    assert run.load() is None
    assert "fresh start" in caplog.text
    assert not check_if_recover(run.config)


def test_load_without_optimizer_when_asked(tmp_path):
    Run(tmp_path).step(0)
    resumed = Run(tmp_path, no_load_optim=True)
    resumed.load()
    assert resumed.engines["default"].metas[0].with_optim is False


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda info: (info / "saver_info.json").write_text("{"), "saver_info.json"),
        (lambda info: (info / "extra.json").unlink(), "extra.json"),
        (lambda info: (info / "step_info.json").write_text('{"format": 99, "value": {}}'), "format 99"),
    ],
)
def test_load_damaged_info_is_refused_not_ignored(tmp_path, damage, named):
    run = Run(tmp_path)
    damage(Path(run.step(0)) / "recover_info")
    with pytest.raises(InValidRecoverInfo, match=named):
        Run(tmp_path).load()
    assert not check_if_recover(run.config)


def test_load_missing_engine_names_it(tmp_path):
    Run(tmp_path).step(0)
    resumed = Run(tmp_path)
    resumed.engines["teacher"] = ValueEngine()
    with pytest.raises(InValidRecoverInfo, match="teacher"):
        resumed.load()


def test_recover_info_roundtrip_keeps_tuples_tensors_and_int_keys(tmp_path):
    info = RecoverInfo(
        StepInfo(1, 0, 4, 4),
        dataloader_info=[{"rng": torch.arange(3), 5: (1, 2), "raw": b"\x00\xff"}],
        extra={"n": None},
    )
    info.dump(tmp_path / "info")
    loaded = RecoverInfo.load(tmp_path / "info")

    state = loaded.dataloader_info[0]
    torch.testing.assert_close(state.pop("rng"), torch.arange(3), rtol=0, atol=0)
    assert state == {5: (1, 2), "raw": b"\x00\xff"}
    assert loaded.last_step_info == info.last_step_info


def test_recover_info_object_state_is_refused(tmp_path):
    with pytest.raises(ValueError, match="plain data"):
        RecoverInfo(StepInfo(0, 0, 0, 1), extra={"x": object()}).dump(tmp_path)


def test_recover_info_missing_directory_is_file_not_found(tmp_path):
    with pytest.raises(FileNotFoundError):
        RecoverInfo.load(tmp_path / "nothing")


def test_check_if_recover_first_run_of_a_resumed_trial_is_true(tmp_path):
    run = Run(tmp_path)
    run.step(0)
    assert check_if_recover(run.config, run_id=0)


def test_kill_while_saving_always_leaves_a_complete_point(tmp_path):
    script = textwrap.dedent(
        """
        import sys
        sys.path.insert(0, sys.argv[2])
        from pathlib import Path
        from tests.test_recover import Run
        run = Run(Path(sys.argv[1]))
        print("ready", flush=True)
        for g in range(10_000):
            run.step(g)
            print(g, flush=True)
        """
    )
    repository = str(Path(__file__).resolve().parents[1])
    last_reported = -1
    for attempt in range(2):
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path), repository], stdout=subprocess.PIPE, text=True
        )
        with process:
            assert process.stdout.readline() == "ready\n"
            for _ in range(3 + 4 * attempt):
                last_reported = int(process.stdout.readline())
            os.kill(process.pid, signal.SIGKILL)
        resumed = Run(tmp_path)
        info = resumed.load()
        assert info is not None
        assert info.last_step_info.global_step >= last_reported
        assert resumed.engines["critic"].value == info.last_step_info.global_step + 0.1
        resumed.logger.close()


def _rank_main(rank: int, store: str, root: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        run = Run(Path(root))
        run.engines = {"default": RankEngine(rank)}
        run.step(0)
        resumed = Run(Path(root))
        resumed.engines = {"default": RankEngine(rank)}
        info = resumed.load()
        assert info is not None
        assert len(info.dataloader_info) == 2
        assert resumed.engines["default"].loaded == rank
        resumed.logger.close()
        run.logger.close()
    finally:
        torch.distributed.destroy_process_group()


class RankEngine:
    """Each rank writes its own shard."""

    def __init__(self, rank: int) -> None:
        self.rank, self.value, self.loaded = rank, 0.0, -1

    def save(self, meta: SaveLoadMeta) -> None:
        Path(meta.path, f"shard{self.rank}.json").write_text(str(self.rank))

    def load(self, meta: SaveLoadMeta) -> None:
        self.loaded = int(Path(meta.path, f"shard{self.rank}.json").read_text())


def test_dump_and_load_two_ranks_share_one_directory(tmp_path):
    mp.spawn(_rank_main, args=(str(tmp_path / "store"), str(tmp_path)), nprocs=2)


def test_loader_state_of_a_new_rank_is_the_common_cursor_or_an_error(monkeypatch):
    monkeypatch.setattr(recover.ranks, "global_rank", lambda: 3)
    assert recover._state_of_rank([{"step": 4}, {"step": 4}]) == {"step": 4}
    with pytest.raises(InValidRecoverInfo, match="loader states of 2 ranks, this is rank 3"):
        recover._state_of_rank([{"step": 4}, {"step": 5}])
