"""Saver: frequency, naming, atomicity."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from areal.api.config.timers import SaverConfig
from areal.api.io_struct import FinetuneSpec, SaveLoadMeta
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


def test_save_async_mode_warns_and_saves_synchronously(tmp_path, caplog):
    saver = _saver(tmp_path, freq_steps=1, mode="async")
    assert "saver.mode=async" in caplog.text
    assert not saver.is_async


def test_paths_missing_part_is_refused():
    with pytest.raises(ValueError, match="trial_name"):
        Saver.get_save_root("exp", "", "/tmp")
