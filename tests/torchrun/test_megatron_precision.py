"""Megatron below float32, gradients over several calls, skipped steps, and memory that an engine gives back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.archon_fakes import hf_model
from tests.torchrun import archon_precision_cells
from tests.torchrun.live_group import LiveGroup
from tests.torchrun.parity import UNEVEN, whole_tensors

pytest.importorskip("megatron.core", reason="megatron-core is not installed; pip install 'areal[megatron]'")
from tests.torchrun import megatron_cells as cells  # noqa: E402 - needs megatron-core

LAYOUTS = ["d2", *(pytest.param(name, marks=[pytest.mark.slow, pytest.mark.ci]) for name in ("t2", "c2", "p2"))]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("megatron") / "model"
    hf_model("qwen3", num_hidden_layers=4).save_pretrained(path)
    return str(path)


def test_bfloat16_steps_have_the_gradient_norms_of_float32(path: str) -> None:
    expected = cells.norms(path, "megatron:d1", dtype="float32")

    assert cells.norms(path, "megatron:d1") == pytest.approx(expected, rel=2e-2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_bfloat16_steps_have_the_gradient_norms_of_one_process(
    two_ranks: LiveGroup, path: str, layout: str
) -> None:
    expected = cells.norms(path, "megatron:d1")

    for found in two_ranks.run(cells.norms, path=path, backend=f"megatron:{layout}"):
        assert found == pytest.approx(expected, rel=2e-2)


@pytest.mark.parametrize("layout", ["d2", "t2"])
def test_two_ranks_bfloat16_masters_hold_the_checkpoint_in_float32(
    two_ranks: LiveGroup, path: str, layout: str
) -> None:
    assert two_ranks.run(cells.masters, path=path, backend=f"megatron:{layout}") == [0.0, 0.0]


WHOLE = {"megatron": {"ddp": {"use_distributed_optimizer": False}}}


@pytest.mark.parametrize(
    ("first", "second", "settings"),
    [
        ("d2", "p2", {"dtype": "bfloat16"}),
        ("t2", "d2", {"dtype": "bfloat16"}),
        ("d2", "t2", WHOLE),
        ("d2", "p2", {"optimizer": {"type": "sgd", "lr": 1e-2}}),
    ],
    ids=str,
)
def test_two_ranks_masters_and_moments_are_the_same_bits_in_another_layout(
    two_ranks: LiveGroup, path: str, first: str, second: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    arguments = {"path": path, "out": str(tmp_path / "point"), **settings}
    expected = two_ranks.run(cells.states, backend=f"megatron:{first}", shards=UNEVEN[1 + (first == "d2")], **arguments)

    found = two_ranks.run(cells.states, backend=f"megatron:{second}", shards=None, **arguments)

    ours, wanted = whole_tensors(found), whole_tensors(expected)
    assert ours.keys() == wanted.keys()
    kinds = {name.rpartition(".")[2] for name in wanted}
    assert kinds == ({"master"} if "optimizer" in settings else {"master", "exp_avg", "exp_avg_sq"})
    for name, tensor in wanted.items():
        assert torch.equal(ours[name], tensor), name


def test_recover_point_restores_the_place_in_the_schedule_if_it_is_asked_to(path: str, tmp_path: Path) -> None:
    assert cells.place_in_schedule(path, str(tmp_path / "with"), restore=True) == [2, 2]
    assert cells.place_in_schedule(path, str(tmp_path / "without"), restore=False) == [2, 0]


@pytest.mark.parametrize("layout", ["t2", "p2"])
def test_two_ranks_gradients_of_several_calls_add_up(two_ranks: LiveGroup, path: str, layout: str) -> None:
    expected = archon_precision_cells.norm_of_two_calls(path, "archon:d1")

    found = two_ranks.run(cells.norms_of_steps, path=path, backend=f"megatron:{layout}", calls=(2,))

    assert expected > 0.1
    assert [norm for (norm,) in found] == pytest.approx([expected] * 2, rel=1e-5)


@pytest.mark.parametrize("calls", [(1, 2, 1, 2), (2, 1, 2, 2)], ids=str)
@pytest.mark.parametrize(("layout", "virtual"), [("d2", 1), ("p2", 2)])
def test_two_ranks_overlapped_reduction_waits_for_the_last_of_several_calls(
    two_ranks: LiveGroup, path: str, layout: str, virtual: int, calls: tuple[int, ...]
) -> None:
    arguments = {"path": path, "backend": f"megatron:{layout}", "calls": calls}
    section = {"virtual_pipeline_parallel_size": virtual}
    expected = two_ranks.run(cells.norms_of_steps, **arguments, megatron=section)

    found = two_ranks.run(cells.norms_of_steps, **arguments, megatron={**section, "ddp": {"overlap_grad_reduce": True}})

    assert len({round(norm, 3) for norm in expected[0]}) == 2
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize("layout", ["d2", "p2"])
def test_two_ranks_step_without_a_finite_norm_is_skipped(two_ranks: LiveGroup, path: str, layout: str) -> None:
    for result, unchanged in two_ranks.run(cells.skipped, path=path, backend=f"megatron:{layout}"):
        assert result["update_successful"] == 0.0
        assert result["nonfinite_steps"] == 1.0
        assert unchanged


@pytest.mark.parametrize("layout", ["d2", "p2"])
def test_two_ranks_engine_that_left_memory_goes_on_as_before(two_ranks: LiveGroup, path: str, layout: str) -> None:
    assert two_ranks.run(cells.offloaded, path=path, backend=f"megatron:{layout}") == [True, True]


def test_two_ranks_first_stage_owns_the_rows_and_the_last_one_has_the_results(two_ranks: LiveGroup, path: str) -> None:
    assert two_ranks.run(cells.heads, path=path, backend="megatron:p2") == [(0, True, 1), (0, False, 1)]
    assert two_ranks.run(cells.heads, path=path, backend="megatron:d2") == [(0, True, 0), (1, True, 1)]
