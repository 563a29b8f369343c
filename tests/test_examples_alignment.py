"""The alignment examples on a CPU, as their README shows them: two real steps each, on the data that they make."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = {
    "toy_dpo_cpu": ("dpo.py", "pairs", "dpo/loss/avg"),
    "toy_rw_cpu": ("reward_model.py", "pairs", "rw/loss/avg"),
    "toy_sft_cpu": ("chat_sft.py", "chat", "sft/loss/avg"),
}


def run(*arguments: str | Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{arguments}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("toy")
    run("examples/alignment/make_toy_data.py", path)
    return path


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", EXAMPLES)
def test_alignment_example_trains_two_real_steps_and_evaluates(name: str, toy: Path, tmp_path: Path) -> None:
    script, data, key = EXAMPLES[name]
    settings = [
        f"actor.path={toy / 'model'}",
        f"train_dataset.path={toy / data}",
        f"valid_dataset.path={toy / data}",
        f"cluster.fileroot={tmp_path}",
        "total_train_steps=2",
        "evaluator.freq_steps=2",
    ]

    run(f"examples/alignment/{script}", "--config", f"examples/alignment/{name}.yaml", *settings)

    (stats_file,) = tmp_path.glob(f"logs/*/{name.replace('_', '-')}/trial0/stats.jsonl")
    rows = [json.loads(line)["stats"] for line in stats_file.read_text().splitlines() if '"stats"' in line]
    assert len(rows) == 2
    assert all(math.isfinite(row[key]) for row in rows)
    assert key.replace("/", "-eval/", 1) in rows[-1]
    assert list(tmp_path.glob(f"checkpoints/*/{name.replace('_', '-')}/trial0/default/*/model.safetensors"))


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.timeout(600)
def test_rlhf_example_trains_two_real_steps_on_a_reward_model_of_the_other_example(toy: Path, tmp_path: Path) -> None:
    model, root = f"actor.path={toy / 'model'}", f"cluster.fileroot={tmp_path}"
    pairs = f"train_dataset.path={toy / 'pairs'}"
    steps = ("total_train_steps=2", "saver.freq_steps=2")
    config = ("--config", "examples/alignment/toy_rw_cpu.yaml")
    run("examples/alignment/reward_model.py", *config, model, root, pairs, "valid_dataset=null", *steps)
    (reward_model,) = tmp_path.glob("checkpoints/*/toy-rw-cpu/trial0/default/*")

    config = ("--reward-model", str(reward_model), "--config", "examples/alignment/toy_rlhf_cpu.yaml")
    run("examples/alignment/rlhf.py", *config, model, root, *steps)

    (stats_file,) = tmp_path.glob("logs/*/toy-rlhf-cpu/trial0/stats.jsonl")
    rows = [json.loads(line)["stats"] for line in stats_file.read_text().splitlines() if '"stats"' in line]
    assert len(rows) == 2
    for row in rows:
        assert all(math.isfinite(value) for value in row.values())
        assert row["ppo_actor/task_reward/max"] > row["ppo_actor/task_reward/min"]
        assert row["ppo_critic/update_successful"] == 1
