"""Compiled layers, a mixture of experts and captured failures on two gloo ranks."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.engine_fakes import adamw, batch, reference_step
from tests.fakes import tiny_model
from tests.moe_fakes import save_tiny_moe
from tests.torchrun import feature_cells
from tests.torchrun.live_group import CellError, LiveGroup


@pytest.mark.slow  # about 20 s of C++ compilation
@pytest.mark.parametrize("backend", ["fsdp:d2", "fsdp:c2"])
def test_compiled_ranks_equal_plain_ranks(two_ranks: LiveGroup, tmp_path: Path, backend: str) -> None:
    tiny_model("qwen2").save_pretrained(tmp_path)
    plain, compiled = (
        two_ranks.run(feature_cells.compiled_steps, path=str(tmp_path), backend=backend, enable_compile=flag)
        for flag in (False, True)
    )
    for a, b in zip(plain, compiled, strict=True):
        assert b["losses"] == pytest.approx(a["losses"], abs=1e-5)
        assert b["norms"] == pytest.approx(a["norms"], rel=1e-5)
        assert 0 < b["graphs"] <= 12
        for name, tensor in a["weights"].items():
            torch.testing.assert_close(b["weights"][name], tensor, rtol=0, atol=1e-5)
        for ours, theirs in zip(b["logprobs"], a["logprobs"], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_compile_with_tensor_parallelism_is_refused(two_ranks: LiveGroup, tmp_path: Path) -> None:
    tiny_model("qwen2").save_pretrained(tmp_path)
    with pytest.raises(CellError, match=r"fsdp\.enable_compile=true does not work with tensor parallelism"):
        two_ranks.run(feature_cells.compiled_steps, path=str(tmp_path), backend="fsdp:t2", enable_compile=True)


def test_moe_ranks_equal_plain_transformers_and_export_its_names(two_ranks: LiveGroup, tmp_path: Path) -> None:
    path, out = save_tiny_moe(tmp_path / "moe"), tmp_path / "out"
    answers = two_ranks.run(feature_cells.moe_steps, path=path, out=str(out))
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    optimizer = adamw(reference)
    for step in range(2):
        loss, norm = reference_step(reference, batch(), optimizer)
        for answer in answers:
            assert answer["losses"][step] == pytest.approx(loss, rel=1e-5)
            assert answer["norms"][step] == pytest.approx(norm, rel=1e-5)
    reference.save_pretrained(tmp_path / "reference")
    expected, saved = load_file(tmp_path / "reference" / "model.safetensors"), load_file(out / "model.safetensors")
    assert saved.keys() == expected.keys() == answers[0]["sent"].keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(saved[name], tensor, rtol=1e-5, atol=1e-5)
        for copy in (answers[0]["sent"], answers[0]["weights"], answers[1]["weights"], answers[0]["read_back"]):
            assert torch.equal(copy[name], saved[name]), name
    for directory in (out, tmp_path / "out-files"):  # one file, and one of each rank
        loaded = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        loaded.save_pretrained(tmp_path / "again")
        again = load_file(tmp_path / "again" / "model.safetensors")
        assert all(torch.equal(again[name], tensor) for name, tensor in saved.items())
    assert len(list((tmp_path / "out-files").glob("*.safetensors"))) == 2


@pytest.mark.parametrize(("backend", "bad_losses"), [("fsdp:d2", [0, 1]), ("fsdp:c2", [1, 1]), ("fsdp:t2", [1, 1])])
def test_failing_step_of_two_ranks_is_captured_once_and_replays_on_two(
    two_ranks: LiveGroup, tmp_path: Path, backend: str, bad_losses: list[int]
) -> None:
    tiny_model("qwen2").save_pretrained(tmp_path / "model")
    directory = tmp_path / "failures"
    model = str(tmp_path / "model")
    found = two_ranks.run(feature_cells.capture, path=model, directory=str(directory), backend=backend)
    names = ["config.json", "failure.json", "model", "rank_0.pt", "rank_1.pt", "state"]
    assert found[0] == found[1] == [f"step_0/{name}" for name in names]
    reports = two_ranks.run(feature_cells.replay, directory=str(directory / "step_0"))
    assert [r["reproduced"] for r in reports] == [True, True]
    own = [[c["replayed"] for c in r["comparisons"] if c["name"].startswith("loss of")] for r in reports]
    assert [sum(map(math.isnan, losses)) for losses in own] == bad_losses


@pytest.mark.slow  # two Python processes that import torch: about 15 s
def test_replay_command_starts_the_ranks_itself(two_ranks: LiveGroup, tmp_path: Path) -> None:
    tiny_model("qwen2").save_pretrained(tmp_path / "model")
    model, directory = str(tmp_path / "model"), str(tmp_path / "failures")
    two_ranks.run(feature_cells.capture, path=model, directory=directory, backend="fsdp:d2")
    command = [sys.executable, "-m", "areal.cli", "replay", f"{directory}/step_0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | {"PYTHONPATH": "."})
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("reproduced\n")
