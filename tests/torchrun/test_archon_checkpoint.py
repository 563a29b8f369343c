"""Archon checkpoints of several ranks: sharded, in pipeline stages, with experts of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.archon_fakes import hf_model
from tests.torchrun import archon_checkpoint_cells as cells

FAMILY = "qwen3_moe_mixed"  # four layers, one of them with experts
Run = Callable[..., list[Any]]


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Run:
    """``run(cell, layout, …)``: results by rank."""

    def call(cell: Callable[..., Any], layout: str, **kwargs: Any) -> list[Any]:
        ranks = "four_ranks" if layout in ("d2p2", "d4e2") else "two_ranks"
        return request.getfixturevalue(ranks).run(cell, layout=layout, **kwargs)

    return call


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("archon")
    hf_model(FAMILY).save_pretrained(path)
    return path


def _union(ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for tensors in ranks:
        for name, tensor in tensors.items():
            assert torch.equal(found.setdefault(name, tensor), tensor), name
    return found


def _files(path: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors = load_file(file)
        assert found.keys().isdisjoint(tensors)
        found.update(tensors)
    return found


def _assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert sorted(actual) == sorted(expected)
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


@pytest.mark.parametrize(
    ("first", "second", "many_files"),
    [
        ("d2", "p2", True),
        ("p2", "v2", True),
        ("v2", "e2", False),
        ("e2", "d2", True),
        pytest.param("d2p2", "d4e2", True, marks=pytest.mark.slow),
        pytest.param("d4e2", "d2p2", True, marks=pytest.mark.slow),
    ],
)
def test_checkpoints_of_one_layout_are_read_in_another(
    run: Run, first: str, second: str, many_files: bool, model_dir: Path, tmp_path: Path
) -> None:
    expected = load_file(model_dir / "model.safetensors")

    ranks = run(cells.saved, first, path=str(model_dir), out=str(tmp_path), many_files=many_files)

    _assert_same(_union([rank["loaded"] for rank in ranks]), expected)
    changed = _union([rank["changed"] for rank in ranks])
    assert not any(torch.equal(changed[name], tensor) for name, tensor in expected.items())
    for name in ("hf", "staged"):
        assert (len(list((tmp_path / name).glob("*.safetensors"))) > 1) == many_files
        _assert_same(_files(tmp_path / name), changed)
    for kind in ("hf", "dcp"):
        loaded = run(cells.loaded, second, path=str(model_dir), out=str(tmp_path), kind=kind)
        _assert_same(_union(loaded), changed)


def test_checkpoints_of_a_tied_model_hold_its_matrix_once(run: Run, model_dirs: dict[str, str], tmp_path: Path) -> None:
    path = model_dirs["tied"]
    out = {layout: tmp_path / layout for layout in ("p2", "d2")}
    changed = {
        layout: _union([rank["changed"] for rank in run(cells.saved, layout, path=path, out=str(directory))])
        for layout, directory in out.items()
    }

    assert "lm_head.weight" not in changed["p2"]
    for layout, other in (("p2", "d2"), ("d2", "p2")):
        _assert_same(_files(out[layout] / "hf"), changed[layout])
        for kind in ("hf", "dcp"):
            loaded = _union(run(cells.loaded, other, path=path, out=str(out[layout]), kind=kind))
            _assert_same(loaded, changed[layout])


def test_load_of_a_damaged_directory_names_the_tensor_on_every_rank(run: Run, model_dir: Path, tmp_path: Path) -> None:
    hf_model(FAMILY).config.save_pretrained(tmp_path)
    tensors = load_file(model_dir / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})

    for layout in ("d2", "p2"):
        messages = run(cells.refused, layout, path=str(tmp_path))
        assert all("model.layers.1.mlp.experts.2.up_proj.weight" in message for message in messages)
