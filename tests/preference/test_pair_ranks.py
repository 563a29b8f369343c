"""Preference runs on two ranks, as worker processes and under torchrun, equal the run in one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pair_runs import dpo_config, planted_pairs, run_pairs, rw_config
from tests.trainer_runs import checkpoints, stats_of, weights

MAKE = {"dpo": dpo_config, "rw": rw_config}
ACCURACY = {"dpo": "reward_accuracy", "rw": "correct_ratio"}
ROWS = 17  # the last step of an epoch has one pair: one rank gets none
OVERRIDES = (
    "train_dataset.drop_last=false",
    "total_train_steps=6",
    "saver.freq_steps=6",
    "evaluator.freq_steps=3",
    "actor.mb_spec.max_tokens_per_mb=40",
)
COLOCATED = ("ref.scheduling_strategy={type: colocation, target: actor}",)  # else it has workers of its own
SCRIPT = """
import sys
from pathlib import Path
from tests.preference.test_pair_ranks import MAKE, ROWS
from tests.pair_runs import planted_pairs, run_pairs
config = MAKE[sys.argv[1]](Path(sys.argv[2]), sys.argv[3], *sys.argv[4:])
run_pairs(config, planted_pairs(ROWS), valid=planted_pairs(9, seed=1))
"""


def valid_of(kind: str) -> str:
    return f"valid_dataset={{path: pairs, type: {kind}, batch_size: 4}}"


@pytest.fixture(scope="module", params=["dpo", "rw"])
def single(request: Any, model: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """Kind and config of a finished run in one process."""
    kind = request.param
    config = MAKE[kind](tmp_path_factory.mktemp("one") / "run", model, *OVERRIDES, valid_of(kind))
    run_pairs(config, planted_pairs(ROWS), valid=planted_pairs(9, seed=1))
    return kind, config


def assert_equal_runs(kind: str, single: Any, double: Any) -> None:
    one, two = stats_of(single), stats_of(double)
    assert len(one) == len(two) == 6
    assert [step[f"{kind}/n_pairs"] for step in two] == [4, 4, 4, 4, 1, 4]
    for key in (f"{kind}/loss/avg", f"{kind}/grad_norm", f"{kind}/lr", f"{kind}/{ACCURACY[kind]}/avg"):
        assert [s[key] for s in two] == pytest.approx([s[key] for s in one], rel=1e-3), key
    for step in (2, 5):
        assert two[step][f"{kind}-eval/n_pairs"] == 9
        assert two[step][f"{kind}-eval/loss/avg"] == pytest.approx(one[step][f"{kind}-eval/loss/avg"], rel=1e-3)
    expected = weights(checkpoints(single)[-1])
    for name, tensor in weights(checkpoints(double)[-1]).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", MAKE)
def test_archon_engine_equals_fsdp(kind: str, model: str, tmp_path: Path) -> None:
    one, other = (
        run_pairs(MAKE[kind](tmp_path / backend, model, f"actor.backend={backend}:d1"), planted_pairs(8))
        for backend in ("fsdp", "archon")
    )

    for key in (f"{kind}/loss/avg", f"{kind}/grad_norm"):
        assert [s[key] for s in other] == pytest.approx([s[key] for s in one], rel=1e-4), key


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ["fsdp:d1", "fsdp:d2"])
def test_worker_processes_equal_one_process(single: tuple[str, Any], backend: str, model: str, tmp_path: Path) -> None:
    kind, reference = single
    config = MAKE[kind](
        tmp_path / "run",
        model,
        *OVERRIDES,
        valid_of(kind),
        "scheduler.type=local",
        f"cluster.name_resolve.nfs_record_root={tmp_path}/names",
        "actor.scheduling_spec=[{cpu: 1, mem: 1, env_vars: {OMP_NUM_THREADS: '1'}}]",
        f"actor.backend={backend}",
        *(COLOCATED if (kind, backend) == ("dpo", "fsdp:d2") else ()),
    )

    run_pairs(config, planted_pairs(ROWS), valid=planted_pairs(9, seed=1))

    assert_equal_runs(kind, reference, config)


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.timeout(600)
def test_two_ranks_under_torchrun_equal_one_process(single: tuple[str, Any], model: str, tmp_path: Path) -> None:
    kind, reference = single
    script = tmp_path / "pairs.py"
    script.write_text(SCRIPT)
    root = Path(__file__).parents[2]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    settings = [*OVERRIDES, valid_of(kind), "actor.backend=fsdp:d2"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "tests")])}

    done = subprocess.run(
        [*launch, kind, str(tmp_path / "two"), model, *settings],
        cwd=root, env=environment, capture_output=True, text=True, timeout=500,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr[-4000:]
    assert_equal_runs(kind, reference, MAKE[kind](tmp_path / "two", model, *settings))
