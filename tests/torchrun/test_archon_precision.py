"""Archon below float32, with recomputed activations, and when FSDP gives weights back: all ways agree on each step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.archon_fakes import hf_model
from tests.torchrun import archon_precision_cells as cells
from tests.torchrun.live_group import LiveGroup

SCHEDULES = ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")
OPTIMIZERS = {"masters": {"type": "adam", "lr": 1e-3}, "no-masters": {"type": "adam_bf16", "lr": 1e-3}}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("archon") / "model"
    hf_model("qwen3", num_hidden_layers=4).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("archon") / "experts"
    hf_model("qwen3_moe_mixed").save_pretrained(path)
    return str(path)


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_ranks_every_schedule_in_bfloat16_has_the_gradients_of_1f1b(
    two_ranks: LiveGroup, path: str, optimizer: str
) -> None:
    arguments = {"path": path, "backend": "archon:p2", "optimizer": OPTIMIZERS[optimizer]}
    expected = two_ranks.run(cells.norms, archon={"pp_schedule": "1F1B"}, **arguments)[0]

    found = {s: two_ranks.run(cells.norms, archon={"pp_schedule": s}, **arguments) for s in SCHEDULES}

    assert expected[0] > 0.1
    for schedule, ranks in found.items():
        for norms in ranks:
            assert norms == pytest.approx(expected, rel=1e-4), schedule


@pytest.mark.parametrize("backend", ["archon:d2", "archon:t2"])
def test_two_ranks_reshard_policies_have_equal_gradients(two_ranks: LiveGroup, path: str, backend: str) -> None:
    arguments = {"path": path, "backend": backend, "optimizer": OPTIMIZERS["masters"], "dtype": "float32"}
    expected = two_ranks.run(cells.norms, archon={}, **arguments)

    always = two_ranks.run(cells.norms, archon={"reshard_after_forward_policy": "always"}, **arguments)
    never = two_ranks.run(cells.norms, archon={"reshard_after_forward_policy": "never"}, **arguments)

    assert always == expected
    assert never == expected


@pytest.mark.parametrize(("policy", "sharded"), [("always", True), ("default", True), ("never", False)])
def test_two_ranks_reshard_policy_says_when_layers_give_weights_back(
    two_ranks: LiveGroup, path: str, policy: str, sharded: bool
) -> None:
    found = two_ranks.run(cells.layers_are_sharded_at_the_loss, path=path, backend="archon:d2", policy=policy)

    assert found == [sharded, sharded]


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize(
    ("backend", "schedule"),
    [
        ("d2", "1F1B"),
        ("t2", "1F1B"),
        ("c2", "1F1B"),
        ("p2", "1F1B"),
        ("p2", "ZBVZeroBubble"),
        ("(attn:d2|ffn:e2)", "1F1B"),
        ("(attn:t2|ffn:e2)", "1F1B"),
    ],
)
def test_two_ranks_recomputing_activations_changes_no_gradient(
    two_ranks: LiveGroup, experts: str, backend: str, schedule: str
) -> None:
    modes = [
        {"ac_mode": "none"},
        {"ac_mode": "full"},
        {"ac_mode": "selective", "selective_ac_option": "op"},
        {"ac_mode": "selective", "selective_ac_option": "2"},
    ]
    sections = [{"pp_schedule": schedule, **mode} for mode in modes]

    for expected, *found in two_ranks.run(cells.recomputed, path=experts, backend=f"archon:{backend}", archon=sections):
        for norms in found:
            assert norms == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["d2", "c2", "p2"])
def test_two_ranks_compiled_layers_have_equal_gradients(two_ranks: LiveGroup, path: str, backend: str) -> None:
    sections = [{"pp_schedule": "1F1B", "enable_compile": on, "attn_type": "sdpa"} for on in (False, True)]

    for expected, compiled in two_ranks.run(cells.recomputed, path=path, backend=f"archon:{backend}", archon=sections):
        assert compiled == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("policy", ["default", "never"])
def test_two_ranks_recover_point_after_scoring_holds_the_weights(
    two_ranks: LiveGroup, path: str, policy: str, tmp_path: Path
) -> None:
    arguments = {"path": path, "backend": "archon:d2", "policy": policy, "out": str(tmp_path / "point")}

    found = two_ranks.run(cells.sharded_after_scoring, **arguments)

    assert found == [(True, True), (True, True)]


@pytest.mark.slow
def test_four_ranks_recover_point_after_scoring_in_a_pipeline_holds_the_weights(
    four_ranks: LiveGroup, path: str, tmp_path: Path
) -> None:
    arguments = {"path": path, "backend": "archon:d2p2", "policy": "default", "out": str(tmp_path / "point")}

    found = four_ranks.run(cells.sharded_after_scoring, **arguments)

    assert found == [(True, True)] * 4


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["t2p2", "p2t2"])
def test_four_ranks_gradients_of_several_calls_add_up(four_ranks: LiveGroup, path: str, backend: str) -> None:
    expected = cells.norm_of_two_calls(path, "archon:d1")

    found = four_ranks.run(cells.norm_of_two_calls, path=path, backend=f"archon:{backend}")

    assert expected > 0.1
    assert found == pytest.approx([expected] * 4, rel=1e-5)


def test_two_ranks_first_stage_owns_the_rows_and_the_last_one_has_the_results(two_ranks: LiveGroup, path: str) -> None:
    assert two_ranks.run(cells.heads, path=path, backend="archon:p2") == [(0, True, 1), (0, False, 1)]
    assert two_ranks.run(cells.heads, path=path, backend="archon:d2") == [(0, True, 0), (1, True, 1)]
