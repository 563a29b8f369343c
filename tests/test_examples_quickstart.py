"""The quickstart script with a few steps: what it writes and what it prints last."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from areal.api.cli_args import GRPOConfig, SFTConfig, load_expr_config

ROOT = Path(__file__).parents[1]
KEYS = {"accuracy_before", "accuracy_after", "train_seconds", "steps", "sequences_per_second"}


def test_quickstart_files_load() -> None:
    folder = ROOT / "examples" / "quickstart"
    sft, _ = load_expr_config(["--config", str(folder / "sft.yaml")], SFTConfig)
    grpo, _ = load_expr_config(["--config", str(folder / "grpo.yaml")], GRPOConfig)
    learnt, trained = sft.train_dataset.dataset_kwargs, grpo.train_dataset.dataset_kwargs
    assert learnt["start"] + learnt["size"] <= trained["start"]  # the two stages share no problem
    assert trained["start"] + trained["size"] <= 8100 - 512  # and neither sees the test problems


@pytest.mark.slow
@pytest.mark.ci
def test_quickstart_writes_its_summary_and_names_it_last(tmp_path: Path) -> None:
    command = [sys.executable, "examples/quickstart/quickstart.py", f"output={tmp_path / 'out'}"]
    command += ["steps=2", "sft_steps=2", "seed=3", "rollout.max_head_offpolicyness=0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    last = done.stdout.rstrip().splitlines()[-1]
    assert last == str(tmp_path / "out" / "summary.json")
    summary = json.loads(Path(last).read_text())
    assert summary.keys() >= KEYS
    assert summary["steps"] == 2
    assert 0 <= summary["accuracy_before"] <= 1
    assert summary["sequences_per_second"] > 0
    assert (Path(summary["checkpoint"]) / "model.safetensors").is_file()
    assert Path(summary["reward_curve"]).is_file()
    assert len(Path(summary["samples"]).read_text().splitlines()) == 512
