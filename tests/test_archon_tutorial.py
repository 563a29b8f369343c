"""The Archon page is true: its files, written down as a user would, run and keep what the page says of them.

The files of the page are fenced as ``py``, because they import each other; blocks of ``python`` each run alone
(``test_project_docs.py``).
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml

from areal.api.config.archon import ArchonEngineConfig
from areal.experimental.models.archon import model_spec
from areal.utils.errors import UnsupportedFeatureError

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "en" / "tutorial" / "archon.md").read_text(encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of the page in a directory of their own, as the working directory; what they register is forgotten."""
    monkeypatch.setattr(model_spec, "_specs", dict(model_spec._specs))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    files: list[tuple[str, str]] = re.findall(r"^```py\n# (\w+\.py)\n(.*?)^```", PAGE, re.M | re.S)
    assert len(files) == PAGE.count("```py\n"), "a block of the page does not begin with the name of its file"
    for name, text in files:
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def _run(name: str) -> dict[str, Any]:
    """What a script of the page leaves behind."""
    namespace: dict[str, Any] = {"__name__": name}
    exec(compile(Path(f"{name}.py").read_text(encoding="utf-8"), f"{name}.py", "exec"), namespace)
    return namespace


@pytest.fixture
def family(folder: Path) -> Iterator[ModuleType]:
    """The page's model file, imported."""
    yield importlib.import_module("exaone4")
    del sys.modules["exaone4"]


@pytest.mark.usefixtures("family")
def test_tutorial_model_agrees_with_transformers_as_the_page_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    exact = torch.testing.assert_close

    def count(actual: torch.Tensor, expected: torch.Tensor, *, rtol: float, atol: float) -> None:
        assert max(rtol, atol) <= 1e-5, "the page promises 1e-5"
        assert expected.abs().max() > 1e-4, "nothing to compare"
        exact(actual, expected, rtol=rtol, atol=atol)
        compared.append(actual)

    monkeypatch.setattr(torch.testing, "assert_close", count)

    left = _run("check_exaone4")

    assert len(compared) == 1 + len(left["reference"].state_dict())  # the logits, and the gradient of every parameter


def test_tutorial_model_without_its_block_does_not_agree(family: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of the page finds norms in the wrong places."""
    monkeypatch.delattr(family.PostNormBlock, "forward")

    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        _run("check_exaone4")


def test_tutorial_model_with_sliding_windows_is_refused_as_the_page_claims(family: ModuleType) -> None:
    from transformers import Exaone4Config

    config = Exaone4Config(num_hidden_layers=4, sliding_window=8)

    with pytest.raises(UnsupportedFeatureError, match="exaone4: sliding_window=8"):
        family.EXAONE4.model_args_class.from_hf_config(config)


@pytest.mark.usefixtures("family")
def test_tutorial_script_trains_the_family(monkeypatch: pytest.MonkeyPatch) -> None:
    _run("check_exaone4")  # writes the model's directory
    monkeypatch.setattr(sys, "argv", ["train_exaone4.py"])

    losses = _run("train_exaone4")["losses"]

    assert len(losses) == 5
    assert all(later < 0.9 * earlier for earlier, later in zip(losses, losses[1:], strict=False))


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.usefixtures("family")
def test_tutorial_script_prints_the_same_losses_in_every_layout_that_the_page_names(folder: Path) -> None:
    _run("check_exaone4")
    layouts = sorted(set(re.findall(r"`(?:torchrun [^`]*)?archon:([tpc]2)`", PAGE)))

    printed = {layout: _printed(folder, layout) for layout in ["d1", *layouts]}

    assert layouts == ["c2", "p2", "t2"]
    assert len(printed["d1"].split()) == 5
    assert set(printed.values()) == {printed["d1"]}


def _printed(folder: Path, layout: str) -> str:
    """Standard output of the training script in one layout, started as the page says."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *(torchrun if layout != "d1" else []), "train_exaone4.py", f"archon:{layout}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def test_settings_table_lists_every_setting_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` +\| (\S+) +\|", PAGE, re.M))
    defaults = {}
    for field in dataclasses.fields(ArchonEngineConfig):
        value = getattr(ArchonEngineConfig(), field.name)
        defaults[field.name] = value.mode if field.name == "fp8_config" else value

    assert {name: yaml.safe_load(text) for name, text in rows.items() if name in defaults} == defaults


def test_layout_examples_have_the_processes_that_the_page_says() -> None:
    from areal.api.alloc_mode import ModelAllocation

    rows = re.findall(r"^\| `(archon:\S+)` +\| (\d+) ", PAGE, re.M)

    assert len(rows) == 3
    for backend, processes in rows:
        assert ModelAllocation.from_str(backend.replace("\\|", "|")).parallel.world_size == int(processes), backend


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_model_types_that_the_page_names_are_registered(model_type: str) -> None:
    [line] = re.findall(r"^Model types: (.*?)\. ", PAGE, re.M)

    assert f"`{model_type}`" in line
    assert model_spec.is_supported_model(model_type)
    assert line.count("`") == 2 * len(model_spec.get_supported_model_types())


def test_micro_batch_section_names_files_and_definitions_that_exist() -> None:
    section = PAGE.split("## One micro-batch, in three files")[1].split("\n## ")[0]
    files = re.findall(r"`(areal/[\w/]+\.py)`", section)
    engine = "areal/experimental/engine/archon_engine.py"  # the section names one method of it
    sources = "".join((ROOT / file).read_text(encoding="utf-8") for file in [*files, engine])

    assert len(files) == 3
    for name in re.findall(r"`(?:[A-Z_]\w*\.)?(\w+)`", section):
        if name not in ("p", "cu_seqlens", "tok_embeddings", "output"):  # a layout, an argument, modules
            assert re.search(rf"\b(?:def|class) {name}\b|\bfrom .* import .*\b{name}\b", sources), name
