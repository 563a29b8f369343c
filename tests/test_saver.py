"""Saver: frequency, naming, atomicity."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from areal.api.config.timers import SaverConfig
from areal.api.io_struct import FinetuneSpec, SaveLoadMeta
from areal.utils.errors import CheckpointError
from areal.utils.saver import Saver

SPEC = FinetuneSpec(total_train_epochs=3, dataset_size=8, train_batch_size=2)  # 4 steps per epoch


class FileEngine:
    """Writes one file; fails when told to."""

    def __init__(self) -> None:
        self.fail = False
        self.metas: list[SaveLoadMeta] = []

    def save(self, meta: SaveLoadMeta) -> None:
        self.metas.append(meta)
        Path(meta.path, "model.safetensors").write_text("half")
        if self.fail:
            raise OSError("disk full")
        Path(meta.path, "model.safetensors").write_text("whole")

    def load(self, meta: SaveLoadMeta) -> None:
        raise AssertionError("a saver does not load")


def _saver(tmp_path: Path, **frequency) -> Saver:
    config = SaverConfig(experiment_name="exp", trial_name="trial", fileroot=str(tmp_path), **frequency)
    return Saver(config, SPEC, manifest={"config_hash": "abc"})


@pytest.mark.parametrize("freq_steps", [2, 3])
def test_save_two_engines_share_one_decision_per_step(tmp_path, freq_steps):
    saver, engine = _saver(tmp_path, freq_steps=freq_steps), FileEngine()
    saved = {"default": [], "critic": []}

    for g in range(6):
        for name, steps in saved.items():
            if saver.save(engine, g // 4, g % 4, g, name=name):
                steps.append(g)

    expected = [g for g in range(6) if (g + 1) % freq_steps == 0]
    assert saved == {"default": expected, "critic": expected}


def test_save_due_step_writes_named_checkpoint_with_manifest(tmp_path):
    saver, engine = _saver(tmp_path, freq_epochs=1), FileEngine()

    paths = [saver.save(engine, 0, s, s, tokenizer="tok", base_model_path="base") for s in range(4)]

    assert paths[:3] == [None] * 3
    checkpoint = Path(paths[3])
    assert checkpoint.name == "epoch0epochstep3globalstep3"
    assert checkpoint.parent == Path(Saver.get_model_save_root("exp", "trial", str(tmp_path)))
    assert (checkpoint / "model.safetensors").read_text() == "whole"
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    assert (manifest["config_hash"], manifest["global_step"]) == ("abc", 3)
    assert (engine.metas[0].weight_format, engine.metas[0].with_optim) == ("hf", False)
    assert (engine.metas[0].tokenizer, engine.metas[0].base_model_path) == ("tok", "base")


def test_save_interrupted_leaves_no_checkpoint_and_the_next_try_works(tmp_path):
    saver, engine = _saver(tmp_path, freq_steps=1), FileEngine()
    engine.fail = True
    with pytest.raises(OSError, match="disk full"):
        saver.save(engine, 0, 0, 0)
    assert not Path(saver.model_save_path(0, 0, 0)).exists()

    engine.fail = False
    assert saver.save(engine, 0, 0, 0, force=True)
    assert [p.name for p in Path(saver.model_save_path(0, 0, 0)).parent.iterdir()] == ["epoch0epochstep0globalstep0"]


def test_save_removes_what_killed_writers_left_beside_it(tmp_path):
    saver, engine = _saver(tmp_path, freq_steps=1), FileEngine()
    root = Path(saver.save(engine, 0, 0, 0)).parent
    names = [".epoch0epochstep1globalstep1.aside-saving", "..epoch0epochstep1globalstep1.aside-saving.aside-0123abcd"]
    for name in names:
        (root / name).mkdir()
    (root / ".recover_checkpoint.aside-0123abcd").symlink_to("nowhere")

    saver.save(engine, 0, 2, 2)

    assert sorted(path.name for path in root.iterdir()) == [
        "epoch0epochstep0globalstep0",
        "epoch0epochstep2globalstep2",
    ]


def test_save_force_ignores_the_frequency(tmp_path):
    assert _saver(tmp_path).save(FileEngine(), 0, 0, 0, force=True)


def test_state_dict_roundtrip_keeps_the_rhythm(tmp_path):
    first = _saver(tmp_path, freq_steps=3)
    for g in range(2):
        first.save(FileEngine(), 0, g, g)
    second = _saver(tmp_path, freq_steps=3)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.save(FileEngine(), 0, 2, 2)


class StagingEngine(FileEngine):
    """Writes its snapshot when ``release`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = "v0"
        self.release = threading.Event()

    def stage_save(self, meta: SaveLoadMeta) -> Callable[[], None]:
        snapshot = self.weights

        def write() -> None:
            assert self.release.wait(10)
            if self.fail:
                raise OSError("disk full")
            Path(meta.path, "model.safetensors").write_text(snapshot)

        return write


def test_save_async_returns_before_the_checkpoint_is_there(tmp_path):
    saver, engine = _saver(tmp_path, freq_steps=1, mode="async"), StagingEngine()

    path = Path(saver.save(engine, 0, 0, 0))
    engine.weights = "v1"
    assert saver.is_async
    assert not path.exists()
    engine.release.set()
    saver.finalize()

    assert (path / "model.safetensors").read_text() == "v0"
    assert json.loads((path / "manifest.json").read_text())["global_step"] == 0
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert not [t for t in threading.enumerate() if t.name.startswith("checkpoint-writer")]


def test_save_async_second_waits_for_the_first_of_the_same_engine(tmp_path):
    saver, actor, critic = _saver(tmp_path, freq_steps=1, mode="async"), StagingEngine(), StagingEngine()
    first = saver.save(actor, 0, 0, 0)
    saver.save(critic, 0, 0, 0, name="critic")  # has a snapshot of its own: nothing to wait for

    second = []
    thread = threading.Thread(target=lambda: second.append(saver.save(actor, 0, 1, 1)))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    actor.release.set()
    critic.release.set()
    thread.join(10)
    assert Path(first).is_dir()  # complete when the second snapshot was taken
    saver.finalize()
    assert Path(second[0]).is_dir()


@pytest.mark.parametrize("surfaces_at", ["save", "close"])
def test_save_async_failure_surfaces_at_the_next_call_and_leaves_nothing(tmp_path, surfaces_at):
    saver, engine = _saver(tmp_path, freq_steps=1, mode="async"), StagingEngine()
    engine.fail = True
    engine.release.set()
    path = Path(saver.save(engine, 0, 0, 0))

    with pytest.raises(CheckpointError, match=f"{path.name}, written in the background, failed: disk full"):
        saver.finalize() if surfaces_at == "close" else saver.save(engine, 0, 1, 1)

    assert list(path.parent.iterdir()) == []
    engine.fail = False
    saver.save(engine, 0, 1, 1)  # the failure is reported once
    saver.finalize()


def test_save_async_engine_without_snapshots_saves_synchronously(tmp_path, caplog):
    saver = _saver(tmp_path, freq_steps=1, mode="async")
    path = saver.save(FileEngine(), 0, 0, 0)
    assert Path(path).is_dir()
    assert "FileEngine can only save synchronously" in caplog.text


def test_paths_missing_part_is_refused():
    with pytest.raises(ValueError, match="trial_name"):
        Saver.get_save_root("exp", "", "/tmp")


@pytest.mark.parametrize(
    ("mode", "auto_async", "expected"), [("auto", True, True), ("auto", False, False), ("sync", True, False)]
)
def test_saver_mode_auto_is_asynchronous_where_the_run_says_so(
    tmp_path: Path, mode: str, auto_async: bool, expected: bool
) -> None:
    config = _saver(tmp_path, freq_steps=1, mode=mode).config

    assert Saver(config, SPEC, auto_async=auto_async).is_async is expected
