"""The GSM8K example on a CPU, as the tutorial shows it: a real language model on real rows, a few real steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run(arguments: list[str | Path], timeout_s: float) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s,
    )  # fmt: skip
    assert done.returncode == 0, f"{arguments}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("smollm2") / "model"
    run(["examples/math/prepare_smollm2.py", path], 600)
    return path


def run_two_rl_steps(config: str, model: Path, data: Path, root: Path, *more: str) -> None:
    settings = [
        f"actor.path={model}",
        f"train_dataset.path={data / 'gsm8k'}",
        f"cluster.fileroot={root}",
        "total_train_steps=2",
        "gconfig.max_new_tokens=48",
    ]
    run(["examples/math/gsm8k_rl.py", "--config", f"examples/math/{config}", *settings, *more], 1200)


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.timeout(1500)
def test_gsm8k_rl_smollm2_on_cpu_trains_real_steps(smollm2: Path, test_data: Path, tmp_path: Path) -> None:
    run_two_rl_steps("gsm8k_grpo_cpu.yaml", smollm2, test_data, tmp_path)

    (stats_file,) = tmp_path.glob("logs/*/gsm8k-grpo-cpu/trial0/stats.jsonl")
    rows = [json.loads(line) for line in stats_file.read_text().splitlines() if '"stats"' in line]
    assert [row["global_step"] for row in rows] == [0, 1]
    assert all(row["stats"]["ppo_actor/n_seqs"] == 16 for row in rows)
    assert all(row["stats"]["rollout/staleness/max"] <= 1 for row in rows)
    assert list(tmp_path.glob("checkpoints/*/gsm8k-grpo-cpu/trial0/default/*/model.safetensors"))


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.timeout(900)
def test_gsm8k_sft_smollm2_on_cpu_loss_goes_down(smollm2: Path, test_data: Path, tmp_path: Path) -> None:
    script = ["examples/math/gsm8k_sft.py", "--config", "examples/math/gsm8k_sft_cpu.yaml"]
    settings = [
        f"actor.path={smollm2}",
        f"train_dataset.path={test_data / 'gsm8k'}",
        f"cluster.fileroot={tmp_path}",
        "total_train_steps=4",
        "train_dataset.batch_size=4",
        "actor.optimizer.warmup_steps_proportion=0.0",
        "actor.optimizer.lr=3e-5",
    ]

    run([*script, *settings], 800)

    (stats_file,) = tmp_path.glob("logs/*/gsm8k-sft-cpu/trial0/stats.jsonl")
    losses = [json.loads(line)["stats"]["sft/loss/avg"] for line in stats_file.read_text().splitlines()]
    assert len(losses) == 4
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.timeout(1500)
def test_gsm8k_lora_smollm2_on_cpu_trains_and_saves_an_adapter(smollm2: Path, test_data: Path, tmp_path: Path) -> None:
    run_two_rl_steps("gsm8k_grpo_lora_cpu.yaml", smollm2, test_data, tmp_path, "rollout.weight_probe_interval=1")

    (stats_file,) = tmp_path.glob("logs/*/gsm8k-grpo-lora-cpu/trial0/stats.jsonl")
    rows = [json.loads(line) for line in stats_file.read_text().splitlines() if '"stats"' in line]
    assert [row["stats"]["weight_probe/abs_diff_max"] < 1e-2 for row in rows] == [True, True]
    assert list(tmp_path.glob("checkpoints/*/gsm8k-grpo-lora-cpu/trial0/default/*/adapter_model.safetensors"))
