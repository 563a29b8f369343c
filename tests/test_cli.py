"""The ``areal`` command, mostly in process; what needs a bare interpreter runs in one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from areal import __version__
from areal.cli import main
from tests.trainer_runs import rl_config, run_rl, tiny_policy

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "math" / "gsm8k_rl.py"
CONFIG = ROOT / "examples" / "math" / "gsm8k_grpo_cpu.yaml"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_policy(tmp_path_factory.mktemp("cli"))


@pytest.fixture
def gsm8k(tmp_path: Path) -> Path:
    """A folder with a few rows in the shape of GSM8K, in characters that the tiny tokenizer has."""
    folder = tmp_path / "gsm8k"
    folder.mkdir()
    rows = [{"question": f"{i}+{i}=", "answer": f"({i}+{i})\n#### {2 * i}"} for i in range(10, 34)]
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def argv(monkeypatch: pytest.MonkeyPatch) -> None:
    """``areal train`` sets these for the script; put them back afterwards."""
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))


def overrides(gsm8k: Path, model: str, tmp_path: Path) -> list[str]:
    return [
        "--config",
        str(CONFIG),
        f"train_dataset.path={gsm8k}",
        f"actor.path={model}",
        f"cluster.fileroot={tmp_path}",
        "gconfig.max_new_tokens=8",
    ]


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"areal {__version__}\n"
    assert main([]) == 0
    assert "train" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        main(["train", "--help"])
    assert stopped.value.code == 0
    assert "--dry-run" in capsys.readouterr().out


def test_help_imports_no_torch() -> None:
    code = "import sys; from areal.cli import main\ntry: main(['--help'])\nfinally: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "False"


def test_train_with_a_missing_script_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "nowhere.py"]) == 2
    assert "no such script: nowhere.py" in capsys.readouterr().err


def test_train_passes_arguments_on(argv: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nif __name__ == '__main__':\n    print(sys.argv[1:])\n")
    assert main(["train", str(script), "--config", "x.yaml", "a.b=1"]) == 0
    assert capsys.readouterr().out == "['--config', 'x.yaml', 'a.b=1']\n"


def test_dry_run_of_the_example_prints_its_plan(
    argv: Any, gsm8k: Path, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["train", str(SCRIPT), *overrides(gsm8k, model, tmp_path), "--dry-run"])
    printed = capsys.readouterr().out
    assert stopped.value.code == 0
    assert "per step: 4 rows, 16 sequences, at most 128 generated tokens" in printed
    assert "steps: 3 (6 per epoch)" in printed
    assert "the run can start" in printed
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize("name", ["gsm8k_grpo.yaml", "gsm8k_grpo_vllm.yaml"])
def test_dry_run_of_a_gpu_example_says_it_can_start(
    name: str, argv: Any, gsm8k: Path, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = overrides(gsm8k, model, tmp_path)
    arguments[1] = str(CONFIG.with_name(name))
    extra = [f"valid_dataset.path={gsm8k}", "train_dataset.batch_size=4"]
    with pytest.raises(SystemExit) as stopped:
        main(["train", str(SCRIPT), *arguments, *extra, "--dry-run"])
    printed = capsys.readouterr().out
    assert stopped.value.code == 0, printed
    assert "the run can start" in printed


def test_dry_run_lists_what_is_refused(
    argv: Any, gsm8k: Path, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = overrides(gsm8k, model, tmp_path)
    arguments[1] = str(CONFIG.with_name("gsm8k_grpo.yaml"))
    extra = [f"valid_dataset.path={gsm8k}", "train_dataset.batch_size=4", "actor.weight_update_mode=shm"]
    with pytest.raises(SystemExit) as stopped:
        main(["train", str(SCRIPT), *arguments, *extra, "--dry-run"])
    printed = capsys.readouterr().out
    assert stopped.value.code == 2
    assert "refused: actor.weight_update_mode=shm: sglang receives weights by xccl, disk" in printed


def test_train_runs_the_example(argv: Any, gsm8k: Path, model: str, tmp_path: Path) -> None:
    assert main(["train", str(SCRIPT), *overrides(gsm8k, model, tmp_path), "total_train_steps=1"]) == 0
    (stats,) = tmp_path.glob("logs/*/gsm8k-grpo-cpu/trial0/stats.jsonl")
    assert len(stats.read_text().splitlines()) == 1


def test_train_runs_the_supervised_example(argv: Any, gsm8k: Path, model: str, tmp_path: Path) -> None:
    arguments = overrides(gsm8k, model, tmp_path)[:-1]
    arguments[1] = str(CONFIG.with_name("gsm8k_sft_cpu.yaml"))
    assert main(["train", str(SCRIPT.with_name("gsm8k_sft.py")), *arguments, "total_train_steps=2"]) == 0
    (stats,) = tmp_path.glob("logs/*/gsm8k-sft-cpu/trial0/stats.jsonl")
    assert len(stats.read_text().splitlines()) == 2


def test_plot_draws_a_run(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_rl(rl_config(tmp_path, model, "total_train_steps=2"))
    (stats,) = tmp_path.glob("logs/*/tests/grpo/stats.jsonl")
    target = tmp_path / "picture.png"
    capsys.readouterr()
    assert main(["plot", str(stats.parent), "-o", str(target)]) == 0
    assert capsys.readouterr().out.strip() == str(target)
    assert target.read_bytes().startswith(b"\x89PNG")
    assert main(["plot", str(stats), "-o", str(target), "--key", "ppo_actor/update/entropy/avg"]) == 0
    capsys.readouterr()
    assert main(["plot", str(stats), "--key", "no/such/key"]) == 2
    assert "no/such/key" in capsys.readouterr().err


def test_plot_without_statistics_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", str(tmp_path)]) == 2
    assert "no stats.jsonl" in capsys.readouterr().err


def test_doctor_reports_this_installation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "torch" in printed
    assert "The core installation works." in printed
