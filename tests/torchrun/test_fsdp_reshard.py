"""Checkpoints across layouts: saved by one, loaded by any other, and what happens when a rank cannot write."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.fakes import tiny_model
from tests.torchrun import reshard_cells as cells

WORLDS = {"d1": 1, "d2": 2, "t2": 2, "c2": 2, "d4": 4, "d2t2": 4, "d2c2": 4, "c2t2": 4}
FAST = (("d1", "d2"), ("d2", "t2"), ("t2", "d1"))
Run = Callable[..., list[Any]]


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Run:
    """``run(cell, layout, …)``: results by rank, from as many live ranks as the layout needs."""

    def call(cell: Callable[..., Any], layout: str, **kwargs: Any) -> list[Any]:
        size = WORLDS[layout]
        if size == 1:
            return [cell(backend=f"fsdp:{layout}", **kwargs)]
        group = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[size])
        return group.run(cell, backend=f"fsdp:{layout}", **kwargs)

    return call


def _assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


def _pairs() -> list[Any]:
    marks = dict.fromkeys(FAST, ())
    return [
        pytest.param(*pair, id="-".join(pair), marks=marks.get(pair, pytest.mark.slow))
        for pair in itertools.product(WORLDS, repeat=2)
    ]


@pytest.mark.parametrize(("first", "second"), _pairs())
def test_dcp_saved_in_one_layout_continues_identically_in_another(
    run: Run, model_dirs: dict[str, str], first: str, second: str, tmp_path: Path
) -> None:
    name = "untied" if second in ("d2", "t2", "c2t2") else "tied"
    out = str(tmp_path / "recover")
    expected = run(cells.uninterrupted, second, path=model_dirs[name])[0]

    before = run(cells.uninterrupted, first, path=model_dirs[name], out=out)[0]
    after = run(cells.resumed, second, path=model_dirs[name], out=out)

    for rank in after:
        _assert_equal(rank["loaded"], before["saved"])  # float32 masters, bit by bit
        assert rank["loaded_version"] == cells.STEPS_BEFORE
        assert (rank["version"], rank["lr_steps"]) == (expected["version"], expected["lr_steps"])
        for ours, theirs in zip(rank["results"], expected["results"], strict=True):
            assert ours["lr"] == theirs["lr"]
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
        for key, value in rank["weights"].items():
            torch.testing.assert_close(value, expected["weights"][key], rtol=1e-5, atol=1e-5)
    if first == second:
        _assert_equal(after[0]["weights"], before["weights"])
        assert after[0]["results"] == before["results"]


@pytest.mark.parametrize("optimizer", ["sgd", "adam_bf16"])
def test_dcp_other_optimizers_reshard(run: Run, model_dirs: dict[str, str], optimizer: str, tmp_path: Path) -> None:
    settings = {"optimizer": {**cells.COSINE, "type": optimizer}}
    if optimizer == "adam_bf16":
        settings["dtype"] = "bfloat16"
    out = str(tmp_path / "recover")
    before = run(cells.uninterrupted, "d2", path=model_dirs["tied"], out=out, **settings)[0]
    after = run(cells.resumed, "d1", path=model_dirs["tied"], out=out, **settings)[0]

    _assert_equal(after["loaded"], before["saved"])
    assert [r["lr"] for r in after["results"]] == [r["lr"] for r in before["results"]]
    tolerance = 1e-5 if optimizer == "sgd" else 2e-2
    for key, value in after["weights"].items():
        torch.testing.assert_close(value, before["weights"][key], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("layout", ["d2", "t2", pytest.param("d2t2", marks=pytest.mark.slow)])
def test_dcp_staged_is_written_while_training_goes_on(
    run: Run, model_dirs: dict[str, str], layout: str, tmp_path: Path
) -> None:
    out = str(tmp_path / "recover")
    weights = run(cells.staged_recover_point, layout, path=model_dirs["tied"], out=out)[0]
    _assert_equal(cells.resumed(model_dirs["tied"], "fsdp:d1", out)["loaded"], weights)


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize(
    ("layout", "name", "sharded"),
    [
        ("d2", "tied", False),
        ("d2", "untied", True),
        ("t2", "tied", True),
        pytest.param("d2t2", "untied", True, marks=pytest.mark.slow),
        pytest.param("d2c2", "tied", True, marks=pytest.mark.slow),
    ],
)
def test_hf_export_of_any_layout_loads_in_transformers_and_in_one_process(
    run: Run, model_dirs: dict[str, str], layout: str, name: str, sharded: bool, staged: bool, tmp_path: Path
) -> None:
    out = tmp_path / "export"
    ranks = run(cells.export, layout, path=model_dirs[name], out=str(out), sharded=sharded, staged=staged)

    files = sorted(out.glob("*.safetensors"))
    names = [key for file in files for key in safe_open(file, "pt").keys()]  # noqa: SIM118 - not a dict
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert len(files) == (WORLDS[layout] if sharded else 1)
    assert (out / "model.safetensors.index.json").exists() == sharded
    assert len(list(out.glob("optim_world_size_*_rank_*.pt"))) == WORLDS[layout]
    assert sorted(names) == sorted(ranks[0])
    assert loaded.dtype == torch.float32
    for rank in ranks:
        _assert_equal(rank, {key: value.detach() for key, value in loaded.named_parameters()})
    _assert_equal(cells.load_hf(model_dirs[name], "fsdp:d1", str(out)), ranks[0])


@pytest.mark.parametrize("layout", ["d2", "t2", pytest.param("d2t2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_hf_load_into_any_layout_gives_the_files_values(
    run: Run, model_dirs: dict[str, str], layout: str, dtype: str, tmp_path: Path
) -> None:
    other = tiny_model("qwen2", seed=5)
    other.save_pretrained(tmp_path / "other")
    expected = {name: p.detach().to(getattr(torch, dtype)) for name, p in other.named_parameters()}
    for weights in run(cells.load_hf, layout, path=model_dirs["tied"], other=str(tmp_path / "other"), dtype=dtype):
        _assert_equal(weights, expected)


def test_hf_load_missing_tensors_are_named_on_every_rank(run: Run, model_dirs: dict[str, str], tmp_path: Path) -> None:
    tiny_model("qwen2", seed=5).save_pretrained(tmp_path / "other")
    tensors = load_file(tmp_path / "other" / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, tmp_path / "other" / "model.safetensors", metadata={"format": "pt"})
    for message in run(cells.load_hf_error, "d2", path=model_dirs["tied"], other=str(tmp_path / "other")):
        assert "1 of 26 tensors are missing: model.norm.weight" in message


@pytest.mark.parametrize("weight_format", ["hf", "dcp"])
@pytest.mark.parametrize("full_rank", [0, 1, None])
def test_save_on_a_full_disk_raises_on_every_rank_and_keeps_the_previous_checkpoint(
    run: Run, model_dirs: dict[str, str], weight_format: str, full_rank: int | None, tmp_path: Path
) -> None:
    out = str(tmp_path / "saved")
    ranks = run(
        cells.save_on_full_disk,
        "d2",
        path=model_dirs["tied"],
        out=out,
        weight_format=weight_format,
        full_rank=full_rank,
        timeout_s=30,
    )
    for rank in ranks:
        assert f"{out} could not be written; what was there before is unchanged" in rank["message"]
        _assert_equal(rank["reloaded"], rank["saved"])
    assert ranks[0]["listed"] == ["saved"]


@pytest.mark.parametrize("layout", ["d2", "t2"])
def test_saver_async_checkpoints_hold_the_weights_of_their_step(
    run: Run, model_dirs: dict[str, str], layout: str, tmp_path: Path
) -> None:
    first, second = run(cells.save_in_background, layout, path=model_dirs["tied"], root=str(tmp_path), steps=3)
    assert first.keys() == second.keys()
    assert len(first) == 3
    for target, weights in first.items():
        loaded = AutoModelForCausalLM.from_pretrained(target)
        _assert_equal(weights, {key: value.detach() for key, value in loaded.named_parameters()})
        assert (Path(target) / "manifest.json").is_file()
        assert [e.name for e in Path(target).parent.iterdir() if e.name.startswith(".")] == []
