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
