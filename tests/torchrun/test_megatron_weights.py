"""Whole tensors, weight updates, memory and captured steps of Megatron engines on two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.archon_fakes import hf_model
from tests.test_engine_memory import big_model
from tests.torchrun import feature_cells
from tests.torchrun.live_group import LiveGroup

pytest.importorskip("megatron.core", reason="megatron-core is not installed; pip install 'areal[megatron]'")
from tests.torchrun import megatron_cells as cells  # noqa: E402 - needs megatron-core

FAMILIES = ("qwen2", "qwen2_untied", "qwen3_moe_mixed")
MIB = 2**20


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Directories of models of four layers: with a tied head, with one of its own, with experts."""
    root = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        hf_model(family, num_hidden_layers=4).save_pretrained(root / family)
    return {family: str(root / family) for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", ["megatron:d2", "megatron:t2", "megatron:p2"])
def test_named_full_tensors_first_rank_has_the_whole_model_in_its_order(
    two_ranks: LiveGroup, families: dict[str, str], family: str, backend: str
) -> None:
    path = families[family]
    one, _ = cells.published(path, "megatron:d1")

    (first, _), (second, _) = two_ranks.run(cells.published, path=path, backend=backend)

    expected = load_file(Path(path) / "model.safetensors")
    names = [name for name, _ in one]
    assert sorted(names) == sorted(expected)
    assert [name for name, _ in first] == names
    assert second == []
    for name, values in first:
        np.testing.assert_array_equal(values, expected[name].numpy(), err_msg=name)


def test_named_full_tensors_of_a_bfloat16_engine_arrive_in_its_dtype(
    two_ranks: LiveGroup, families: dict[str, str]
) -> None:
    path = families["qwen2_untied"]

    (first, dtypes), _ = two_ranks.run(cells.published, path=path, backend="megatron:p2", dtype="bfloat16")

    assert dtypes == {torch.bfloat16}
    expected = load_file(Path(path) / "model.safetensors")
    for name, values in first:
        np.testing.assert_array_equal(values, expected[name].bfloat16().float().numpy(), err_msg=name)


@pytest.mark.parametrize("backend", ["megatron:p2", "megatron:d2"])
def test_failing_step_is_captured_and_replays(
    two_ranks: LiveGroup, families: dict[str, str], backend: str, tmp_path: Path
) -> None:
    path, directory = families["qwen2"], str(tmp_path / "failures")

    found = two_ranks.run(cells.captured, path=path, directory=directory, backend=backend)

    names = ["config.json", "failure.json", "model", "rank_0.pt", "rank_1.pt", "state"]
    assert found[0] == found[1] == [f"step_0/{name}" for name in names]
    findings = json.loads((tmp_path / "failures" / "step_0" / "failure.json").read_text())["findings"]
    assert findings["first_bad_parameter"] is None
    assert findings["first_bad_gradient"] == "embedding.word_embeddings.weight"
    reports = two_ranks.run(feature_cells.replay, directory=f"{directory}/step_0")
    assert all(report["reproduced"] for report in reports), reports


@pytest.mark.parametrize("backend", ["megatron:t2", "megatron:p2"])
def test_loading_and_export_grow_by_the_shard_and_one_tensor(
    two_ranks: LiveGroup, families: dict[str, str], backend: str, tmp_path: Path
) -> None:
    path = big_model(tmp_path / "big")

    answers = two_ranks.run(
        cells.growth, small=families["qwen2_untied"], path=path, backend=backend, out=str(tmp_path / "out")
    )

    for answer in answers:
        assert answer["first"] <= answer["shard"] + answer["largest"] + 64 * MIB
        assert answer["again"] <= answer["largest"] + 64 * MIB
        assert answer["export"] <= answer["shard"] + answer["largest"] + 64 * MIB
        assert answer["shard"] <= 0.66 * answer["whole"]
