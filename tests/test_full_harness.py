"""The nightly tier's own machinery: its table, its selection, and that a cell which fails is reported as failed."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from areal.api.cli_args import GRPOConfig, load_expr_config
from areal.utils.dynamic_import import import_from_string
from tests.full import __main__ as command
from tests.full.cell import ROOT, Cell
from tests.full.chaos import draw
from tests.full.chaos_faults import FAULTS, Attempt, FaultPlan, expected_counts
from tests.full.kill_child import OperationCounter
from tests.full.presets import PAIR_PRESETS, PRESETS
from tests.full.runner import Runner, select
from tests.full.table import OTHER_CELLS, SEEDS, build_table

TABLE = build_table()


# --- the table ------------------------------------------------------------------------------------------------------


def test_table_names_are_unique_and_start_with_their_kind() -> None:
    names = [cell.name for cell in TABLE]
    assert len(names) == len(set(names))
    assert all(cell.name.startswith(f"{cell.kind}/") and cell.limit_s > 0 for cell in TABLE)


def test_table_has_the_suite_every_preset_scheduler_and_backend_and_twenty_seeds_of_each_kind() -> None:
    kinds = [cell.kind for cell in TABLE]
    assert SEEDS == 20
    assert {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)} == {
        "tests": 1,
        "checkpoint": 2,
        "accuracy": 1 + len(PRESETS) + len(PAIR_PRESETS),
        "scheduler": 3,
        "backend": 8,
        "chaos": 20,
        "chaos-workers": 20,
        "kill": 20,
    }


def test_table_files_that_are_cells_of_their_own_exist() -> None:
    assert all((ROOT / file).is_file() for file in OTHER_CELLS)


def test_table_functions_take_a_context_and_the_arguments_of_their_cells() -> None:
    for cell in TABLE:
        inspect.signature(import_from_string(cell.function)).bind(None, **cell.args)
        json.dumps(dict(cell.args))


@pytest.mark.parametrize("name", PRESETS)
def test_preset_is_a_valid_variant_of_the_quickstart(name: str, tmp_path: Path) -> None:
    preset = PRESETS[name]
    file = ROOT / "examples" / "quickstart" / "grpo.yaml"
    config, _ = load_expr_config(
        ["--config", str(file), f"cluster.fileroot={tmp_path}", "actor.path=somewhere", *preset.overrides], GRPOConfig
    )
    assert config.rollout.max_head_offpolicyness == preset.eta
    assert 0.56 < preset.bar < 1
    assert preset.filter_fn is None or callable(import_from_string(preset.filter_fn))


@pytest.mark.parametrize(
    ("only", "kinds", "expected"),
    [
        ("chaos/0?", [], 10),
        ("grpo-sync", [], 1),
        (None, ["kill"], 20),
        ("0", ["kill", "chaos"], 22),
        ("no such cell", [], 0),
    ],
)
def test_selection_by_pattern_and_kind(only: str | None, kinds: list[str], expected: int) -> None:
    assert len(select(TABLE, only, kinds)) == expected


# --- the runner -----------------------------------------------------------------------------------------------------


def toy(name: str, **kwargs: Any) -> Cell:
    return Cell(f"toy/{name}", "toy", f"tests.full.toys.{name}", **kwargs)


TOYS = [
    toy("passes", args={"value": 3}),
    toy("violates"),
    toy("raises"),
    toy("dies"),
    toy("hangs", limit_s=1.0),
    toy("leaves_a_process"),
]


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The summary file of a run over all toys, by the command."""
    output = tmp_path_factory.mktemp("full") / "summary.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "build_table", lambda seeds: TOYS)
        patch.setattr("tests.full.runner.LEFTOVER_GRACE_S", 0.3)
        assert command.main(["--out", str(output)]) == 1
    return json.loads(output.read_text())


def test_summary_counts_what_passed_and_failed(summary: dict[str, Any]) -> None:
    assert summary["cells_selected"] == 6
    assert (summary["passed"], summary["failed"]) == (1, 5)
    assert [cell["name"] for cell in summary["cells"]] == [cell.name for cell in TOYS]
    assert summary["cells"][0]["facts"] == {"value": 3}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("violates", "the first thing; the second thing"),
        ("raises", "KeyError: 'the column'"),
        ("dies", "exit code 9: .*last words"),
        ("hangs", "killed after its limit of 1 s"),
        ("leaves_a_process", "a process was left running: .*sleep"),
    ],
)
def test_cell_that_fails_says_why(name: str, reason: str, summary: dict[str, Any]) -> None:
    cell = next(cell for cell in summary["cells"] if cell["name"] == f"toy/{name}")
    assert not cell["passed"]
    assert re.search(reason, cell["reason"])
    assert Path(cell["log"]).is_file()


def test_command_all_passed_exits_with_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "build_table", lambda seeds: TOYS)
    assert command.main(["--only", "passes", "--out", str(tmp_path / "summary.json")]) == 0


@pytest.mark.parametrize("arguments", [["--kinds", "chaos,nonsense"], ["--only", "nonsense"]])
def test_command_unknown_selection_is_refused(arguments: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        command.main([*arguments, "--out", str(tmp_path / "summary.json")])
    assert caught.value.code == 2


def test_runner_keeps_what_cells_share_only_when_asked(tmp_path: Path) -> None:
    output = tmp_path / "summary.json"
    (Runner(output).shared / "warm-start").mkdir()
    assert (Runner(output, reuse=True).shared / "warm-start").is_dir()
    assert not (Runner(output).shared / "warm-start").exists()


# --- the books of the chaos cells -----------------------------------------------------------------------------------


def test_chaos_seeds_meet_every_fault() -> None:
    assert {fault for seed in range(SEEDS) for fault in draw(seed).faults} == set(FAULTS)


def test_chaos_faults_are_the_same_each_time_a_row_runs() -> None:
    plans = [FaultPlan(3, ["reward-none", "workflow-raises"], 0.5, 0.1) for _ in range(2)]
    drawn = [[plan.draw(0, row, sample) for row in range(8) for sample in range(4)] for plan in plans]
    assert drawn[0] == drawn[1]
    assert {"", "reward-none", "workflow-raises"} == set(drawn[0])


def test_chaos_lost_connection_happens_once_per_sample() -> None:
    plan = FaultPlan(0, ["connection-is-lost"], 1.0, 0.0)
    assert [plan.draw(0, 1, 0), plan.draw(0, 1, 0), plan.draw(0, 2, 0)] == [
        "connection-is-lost",
        "",
        "connection-is-lost",
    ]


def test_chaos_expected_counts_replay_the_rules() -> None:
    plan = FaultPlan(0, [], 0.0, 0.0)
    plan.outcomes = {
        Attempt(task=0, row=0, sample=0, number=1): "ok",
        Attempt(0, 0, 1, 1): "reward",  # a partial group is accepted
        Attempt(1, 1, 0, 1): "error",  # a row that fails, is retried once and fails again
        Attempt(1, 1, 0, 2): "timeout",
        Attempt(2, 2, 0, 1): "none",
        Attempt(3, 3, 0, 1): "lost",
        Attempt(3, 3, 1, 1): "ok",
        Attempt(3, 3, 0, 2): "ok",  # refused by the filter
    }
    expected = expected_counts(plan, refuses={3}, raises=set(), max_row_retries=1)
    assert dict(expected.dropped) == {"reward": 1, "error": 1, "timeout": 1, "none": 1, "lost": 1}
    assert +expected.groups == {"accepted": 1, "failed": 2, "retried": 1, "filtered": 2, "lost": 1}
    assert dict(expected.ended) == {"failed": 1, "filtered": 2}


# --- the counter of the kill cells ----------------------------------------------------------------------------------

COUNT = """
import os, shutil, sys
from pathlib import Path
from tests.full.kill_child import OperationCounter
root = Path(sys.argv[1])
counter = OperationCounter(root / "checkpoints", lambda number: None)
counter.install()
(root / "elsewhere").write_text("x")
assert counter.count == 0
(root / "checkpoints" / "a").mkdir(parents=True)
before = counter.count
assert before >= 1
file = root / "checkpoints" / "a" / "file"
with file.open("w") as handle:
    os.fsync(handle.fileno())
os.replace(file, file.with_name("other"))
assert counter.count == before + 3, counter.count
shutil.rmtree(root / "checkpoints" / "a")
assert counter.count >= before + 5, counter.count
"""


def test_kill_counter_numbers_the_operations_below_its_directory(tmp_path: Path) -> None:
    assert OperationCounter(tmp_path, print).count == 0
    done = subprocess.run([sys.executable, "-c", COUNT, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
