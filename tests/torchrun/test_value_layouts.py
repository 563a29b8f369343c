"""Value models in every layout of every engine against one process with transformers in float32."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from areal.engine.fsdp_engine import FSDPEngine
from areal.experimental.engine.archon_engine import ArchonEngine
from tests.fakes import tiny_model
from tests.torchrun import value_cells as cells
from tests.torchrun.layout_cells import LENGTHS
from tests.torchrun.live_group import LiveGroup

EVERYTHING = list(range(len(LENGTHS)))
SHARDS = {1: [EVERYTHING], 2: [EVERYTHING[:5], EVERYTHING[5:]], 4: [[0, 1], [2], [3, 4, 5, 6, 7], []]}


def _megatron(*backends: str) -> list[Any]:
    """Backends that need megatron-core."""
    missing = importlib.util.find_spec("megatron") is None
    skip = pytest.mark.skipif(missing, reason="megatron-core is not installed; pip install 'areal[megatron]'")
    return [pytest.param(backend, marks=skip) for backend in backends]


TWO_RANKS = [
    *("fsdp:d2", "fsdp:t2", "fsdp:c2", "archon:d2", "archon:t2", "archon:c2", "archon:p2"),
    *_megatron("megatron:d2", "megatron:t2", "megatron:c2", "megatron:p2"),
]
MEGATRON_PAIR = [pytest.param("megatron:d2", "megatron:p2", marks=_megatron("")[0].marks)]
FOUR_RANKS = [
    "fsdp:d4",
    "fsdp:d2t2",
    "fsdp:d2c2",
    "fsdp:c2t2",
    "archon:d2t2",
    "archon:c2t2",
    "archon:p2t2",
    "archon:p2c2",
    *_megatron("megatron:d2t2", "megatron:p2t2", "megatron:p2c2"),
]


@pytest.fixture(scope="module")
def critic_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A causal LM with tied and one with untied head; a saved critic of each."""
    root = tmp_path_factory.mktemp("critics")
    tiny_model("qwen2").save_pretrained(root / "qwen2")
    tiny_model("llama", tie_word_embeddings=False).save_pretrained(root / "llama")
    for name in ("qwen2", "llama"):
        torch.manual_seed(1)
        model = AutoModelForSequenceClassification.from_pretrained(root / name, num_labels=1, dtype=torch.float32)
        torch.nn.init.normal_(model.score.weight, std=0.3)
        model.save_pretrained(root / f"{name}_critic")
    return {path.name: str(path) for path in root.iterdir()}


@cache
def _reference(path: str) -> cells.Outcome:
    return cells.reference(
        AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    )


def _size(backend: str, dim: str) -> int:
    layout = backend.partition(":")[2]
    return int(layout[layout.index(dim) + 1]) if dim in layout else 1


def _assert_equal(results: list[cells.Outcome], reference: cells.Outcome, backend: str) -> None:
    d, p = _size(backend, "d"), _size(backend, "p")
    inner = len(results) // d // p  # ranks of one stage that share rows are neighbours; stages are outermost
    for rank, ours in enumerate(results):
        own = SHARDS[d][(rank % (d * inner)) // inner]
        assert ours.losses == pytest.approx(reference.losses, rel=2e-5)
        assert ours.norms == pytest.approx(reference.norms, rel=2e-5)
        assert len(ours.values) == len(own)
        for row, values in zip(own, ours.values, strict=True):
            np.testing.assert_allclose(values[: LENGTHS[row]], reference.values[row], rtol=1e-4, atol=2e-5)
            assert not values[LENGTHS[row] :].any()
    weights: dict[str, Any] = {}
    for ours in results:
        weights |= ours.weights
    assert weights.keys() == reference.weights.keys()
    for name, weight in reference.weights.items():
        np.testing.assert_allclose(weights[name], weight, rtol=1e-5, atol=1e-5, err_msg=name)


def _check(group: LiveGroup, path: str, backend: str, **settings: Any) -> None:
    shards = SHARDS[_size(backend, "d")]
    results = group.run(cells.two_steps, path=path, backend=backend, shards=shards, **settings)
    _assert_equal(results, _reference(path), backend)


@pytest.mark.parametrize("backend", ["fsdp:d1", "archon:d1", *_megatron("megatron:d1")])
@pytest.mark.parametrize("name", ["qwen2_critic", "llama_critic"])
def test_value_model_one_process_equals_transformers(critic_dirs: dict[str, str], backend: str, name: str) -> None:
    results = [cells.two_steps(critic_dirs[name], backend, SHARDS[1])]

    _assert_equal(results, _reference(critic_dirs[name]), backend)


@pytest.mark.parametrize("backend", TWO_RANKS)
def test_value_model_two_ranks_equal_one_process(
    two_ranks: LiveGroup, critic_dirs: dict[str, str], backend: str
) -> None:
    _check(two_ranks, critic_dirs["qwen2_critic"], backend)


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("backend", FOUR_RANKS)
def test_value_model_four_ranks_equal_one_process(
    four_ranks: LiveGroup, critic_dirs: dict[str, str], backend: str
) -> None:
    _check(four_ranks, critic_dirs["llama_critic"], backend)


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"])
def test_value_model_every_pipeline_schedule_equals_one_process(
    two_ranks: LiveGroup, tmp_path: Path, schedule: str
) -> None:
    from areal.api.config.archon import ArchonEngineConfig

    tiny_model("qwen2", num_hidden_layers=3).save_pretrained(tmp_path / "lm")
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "lm", num_labels=1, dtype=torch.float32)
    model.save_pretrained(tmp_path / "critic")

    _check(two_ranks, str(tmp_path / "critic"), "archon:p2", archon=ArchonEngineConfig(pp_schedule=schedule))


@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_fresh_value_head_every_layout_and_engine_has_the_same(
    two_ranks: LiveGroup, critic_dirs: dict[str, str], name: str
) -> None:
    expected = cells.heads(critic_dirs[name], "fsdp:d1")

    assert expected is not None
    assert expected.shape == (1, 32)
    assert expected.std() > 0.1
    np.testing.assert_array_equal(cells.heads(critic_dirs[name], "archon:d1"), expected)
    megatron = ("megatron:p2", "megatron:t2") if importlib.util.find_spec("megatron") is not None else ()
    for backend in ("fsdp:d2", "fsdp:t2", "archon:p2", "archon:t2", *megatron):
        for found in two_ranks.run(cells.heads, path=critic_dirs[name], backend=backend):
            if found is not None:
                np.testing.assert_array_equal(found, expected, err_msg=backend)


def test_saved_critic_loads_in_transformers_and_the_other_engine(
    two_ranks: LiveGroup, critic_dirs: dict[str, str], tmp_path: Path
) -> None:
    for backend, other in (("fsdp:t2", ArchonEngine), ("archon:p2", FSDPEngine)):
        out = str(tmp_path / backend.replace(":", "_"))
        results = two_ranks.run(
            cells.two_steps, path=critic_dirs["qwen2_critic"], backend=backend, shards=SHARDS[1], out=out
        )
        weights = {name: tensor for result in results for name, tensor in result.weights.items()}

        loaded = AutoModelForSequenceClassification.from_pretrained(out, dtype=torch.float32)
        engine = cells.build(out, "archon:d1" if other is ArchonEngine else "fsdp:d1")

        assert loaded.config.num_labels == 1
        assert loaded.config.architectures == ["Qwen2ForSequenceClassification"]
        for name, parameter in loaded.named_parameters():
            np.testing.assert_array_equal(parameter.detach().numpy(), weights[name], err_msg=name)
        for name, tensor in engine.named_full_tensors():
            np.testing.assert_array_equal(tensor.detach().numpy(), weights[name], err_msg=name)
        engine.destroy()


@pytest.mark.parametrize(("saved", "resumed"), [("fsdp:d2", "fsdp:t2"), ("archon:t2", "archon:p2"), *MEGATRON_PAIR])
def test_value_model_recover_point_another_layout_goes_on_as_before(
    two_ranks: LiveGroup, critic_dirs: dict[str, str], tmp_path: Path, saved: str, resumed: str
) -> None:
    path, out = critic_dirs["qwen2"], str(tmp_path / "point")
    shards = {backend: SHARDS[_size(backend, "d")] for backend in (saved, resumed)}
    expected = two_ranks.run(cells.save_and_go_on, path=path, backend=saved, shards=shards[saved], out=out)[0]

    found = two_ranks.run(cells.resume, path=path, backend=resumed, shards=shards[resumed], out=out)[0]

    assert found == pytest.approx(expected, rel=2e-5)
    assert found[2] < found[0]
