"""Whole tensors, weight updates and statistics of Archon engines on two ranks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.archon_fakes import hf_model
from tests.external_servers import ExternalServer, external_servers
from tests.torchrun import archon_weight_cells as cells
from tests.torchrun import feature_cells, script_cells, weight_cells
from tests.torchrun.live_group import LiveGroup

PROMPT = [5, 6, 7]
FAMILIES = ("qwen2", "qwen2_untied", "qwen3_moe_mixed")


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Directories of models of six layers: with a tied head, with one of its own, with experts."""
    root = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        hf_model(family, num_hidden_layers=6).save_pretrained(root / family)
    return {family: str(root / family) for family in FAMILIES}


# -- whole tensors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("backend", "schedule"),
    [
        ("archon:d2", "1F1B"),
        ("archon:p2", "1F1B"),
        ("archon:p2", "Interleaved1F1B"),  # stages of both ranks alternate
        ("archon:p2", "ZBVZeroBubble"),  # the first rank has the first and the last stage
    ],
)
def test_named_full_tensors_first_rank_has_the_whole_model_in_its_order(
    two_ranks: LiveGroup, families: dict[str, str], family: str, backend: str, schedule: str
) -> None:
    path = families[family]
    one, _ = cells.published(path, "archon:d1")

    (first, _), (second, _) = two_ranks.run(cells.published, path=path, backend=backend, schedule=schedule)

    expected = load_file(Path(path) / "model.safetensors")
    names = [name for name, _ in one]
    assert sorted(names) == sorted(expected)
    assert [name for name, _ in first] == names
    for name, values in [*first, *second]:
        np.testing.assert_array_equal(values, expected[name].numpy(), err_msg=name)
    assert [name for name, _ in second] == _of_second_rank(names, backend, schedule)


def _of_second_rank(names: list[str], backend: str, schedule: str) -> list[str]:
    """Names of its stages."""
    if backend == "archon:d2":
        return names
    layers = {"1F1B": "345", "Interleaved1F1B": "125", "ZBVZeroBubble": "1234"}
    own = [rf"model\.layers\.[{layers[schedule]}]\."]
    if schedule != "ZBVZeroBubble":
        own += [r"model\.norm\.", r"lm_head\."]
    return [name for name in names if any(re.match(prefix, name) for prefix in own)]


@pytest.mark.slow  # four ranks
@pytest.mark.parametrize("backend", ["archon:d2p2", "archon:p2t2", "archon:p2c2"])
def test_named_full_tensors_of_two_pipelines_the_first_rank_of_each_has_the_whole_model(
    four_ranks: LiveGroup, families: dict[str, str], backend: str
) -> None:
    path = families["qwen2_untied"]
    expected = load_file(Path(path) / "model.safetensors")

    ranks = four_ranks.run(cells.published, path=path, backend=backend, schedule="Interleaved1F1B")

    assert [len(found) == len(expected) for found, _ in ranks] == [True, True, False, False]
    for found, _ in ranks:
        for name, values in found:
            np.testing.assert_array_equal(values, expected[name].numpy(), err_msg=name)


def test_named_full_tensors_of_a_bfloat16_engine_arrive_in_its_dtype(
    two_ranks: LiveGroup, families: dict[str, str]
) -> None:
    path = families["qwen2_untied"]

    ranks = two_ranks.run(cells.published, path=path, backend="archon:p2", dtype="bfloat16")

    expected = load_file(Path(path) / "model.safetensors")
    for found, dtypes in ranks:
        assert dtypes == {torch.bfloat16}
        for name, values in found:
            np.testing.assert_array_equal(values, expected[name].bfloat16().float().numpy(), err_msg=name)


def test_get_full_tensor_gives_the_whole_of_every_form_of_parameter(two_ranks: LiveGroup) -> None:
    for rank in two_ranks.run(cells.whole_of_parts):
        assert rank == {"plain": True, "rows": True, "columns": True}


# -- the path of scripts -----------------------------------------------------------------------------------------------


Connect = Callable[[str], tuple[ExternalServer, list[dict[str, Any]]]]


@pytest.fixture
def connect(two_ranks: LiveGroup, model_dirs: dict[str, str], tmp_path: Path) -> Iterator[Connect]:
    """``connect(kind) -> (server, what the ranks know of the group)`` for an ``archon:p2`` trainer."""
    path = model_dirs["untied"]

    with ExitStack() as ends:

        def call(kind: str) -> tuple[ExternalServer, list[dict[str, Any]]]:
            way = {"kind": kind, "root": str(tmp_path)}
            described = two_ranks.run(cells.connect, address=server.address, path=path, **way)
            ends.callback(two_ranks.run, cells.disconnect)
            return server, described

        two_ranks.run(weight_cells.open_trainer, path=path, backend="archon:p2", archon=cells.archon_of())
        ends.callback(two_ranks.run, weight_cells.close_trainer)
        (server,) = ends.enter_context(external_servers(1, path, tmp_path, "none"))
        yield call


def _assert_serves(ranks: LiveGroup, version: int) -> list[float]:
    """The server generates with the trainer's weights; the log-probs of what it drew."""
    tokens, logprobs, versions = ranks.run(script_cells.sample, ids=PROMPT)[0]
    theirs = ranks.run(weight_cells.logprobs_of, tokens=PROMPT + tokens)[0][len(PROMPT) - 1 :]
    assert logprobs == pytest.approx(theirs, abs=1e-3)
    assert set(versions) == {version}
    return logprobs


def test_weight_update_group_is_built_once_and_every_version_arrives_in_it(
    two_ranks: LiveGroup, connect: Connect, tmp_path: Path
) -> None:
    _, described = connect("xccl")
    assert [rank["before"] for rank in described] == [(False, f"update_weight_group_{rank}") for rank in (0, 1)]
    assert all(rank["initialized"] for rank in described)
    first = described[0]
    assert first["name"].startswith("update_weight_group_0-")
    assert first["ranks"] == [2]  # the first rank and the server
    host, port = first["address"]
    assert port > 0
    assert first["lists"] == ([first["name"]], [host], [port])
    assert described[1]["lists"] == ([], [], [])
    seen = []
    for version in (1, 2):
        after = two_ranks.run(cells.step, version=version, kind="xccl", root=str(tmp_path))
        assert after[0]["name"] == first["name"]
        seen.append(_assert_serves(two_ranks, version))
    assert seen[0] != pytest.approx(seen[1], abs=1e-3)


def test_update_weights_from_disk_server_generates_with_the_trainers(
    two_ranks: LiveGroup, connect: Connect, tmp_path: Path
) -> None:
    connect("disk")
    two_ranks.run(cells.step, version=1, kind="disk", root=str(tmp_path))
    _assert_serves(two_ranks, 1)
    assert not list(tmp_path.rglob("weight_update_v*"))  # loaded, hence cleared


def test_update_bucket_weights_sends_its_list_or_leaves_the_old_version_in_service(
    two_ranks: LiveGroup, connect: Connect, tmp_path: Path
) -> None:
    server, _ = connect("xccl")

    first, _ = two_ranks.run(cells.send_list, version=1)
    assert first == {"left": 0, "refusal": ""}
    _assert_serves(two_ranks, 1)

    served = server.generate(PROMPT)
    first, _ = two_ranks.run(cells.send_list, version=2, without_last=True)
    assert "did not arrive: lm_head.weight" in first["refusal"]
    assert first["left"] > 0
    assert server.generate(PROMPT) == served
    after = two_ranks.run(cells.step, version=3, kind="xccl", root=str(tmp_path))  # in a new group
    assert after[0]["initialized"]
    _assert_serves(two_ranks, 3)


# -- statistics --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_export_stats_of_a_pipeline_every_rank_has_those_of_the_loss(
    two_ranks: LiveGroup, families: dict[str, str], schedule: str
) -> None:
    last = 0 if schedule == "ZBVZeroBubble" else 1

    ranks = two_ranks.run(cells.stats_of_a_step, path=families["qwen2"], schedule=schedule)

    (first, _), (second, _) = ranks
    recorded = ranks[last][1]
    assert first == second
    assert "ppo_actor/update/actor_loss/avg" in recorded
    assert "ppo_actor/update/actor_loss/avg" not in ranks[1 - last][1]
    assert first.keys() == recorded.keys() | ranks[1 - last][1].keys()
    for key, value in recorded.items():
        largest = max(own[key] for _, own in ranks if key in own)
        assert first[key] == (largest if key.startswith("memory/") else value), key


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_mismatch_beyond_the_limit_stops_every_stage(
    two_ranks: LiveGroup, families: dict[str, str], schedule: str
) -> None:
    messages = two_ranks.run(cells.mismatch_that_stops, path=families["qwen2"], schedule=schedule, timeout_s=60)

    assert "sampler and trainer v0 disagree" in messages[0]
    assert messages[0] == messages[1]


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_failing_step_of_a_pipeline_is_captured_and_replays(
    two_ranks: LiveGroup, families: dict[str, str], schedule: str, tmp_path: Path
) -> None:
    path, directory = families["qwen2"], str(tmp_path / "failures")

    found = two_ranks.run(cells.captured, path=path, directory=directory, schedule=schedule)

    names = ["config.json", "failure.json", "model", "rank_0.pt", "rank_1.pt", "state"]
    assert found[0] == found[1] == [f"step_0/{name}" for name in names]
    findings = json.loads((tmp_path / "failures" / "step_0" / "failure.json").read_text())["findings"]
    assert findings["first_bad_parameter"] is None
    assert findings["first_bad_gradient"] == "tok_embeddings.weight"
    reports = two_ranks.run(feature_cells.replay, directory=f"{directory}/step_0")
    assert all(report["reproduced"] for report in reports), reports
