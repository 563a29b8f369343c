"""Builds the environment that inference servers run in: ``areal install-server {vllm,sglang} DIR [--device cpu|cuda]``.

In: a directory that is not there yet. Out: a virtual environment with the pinned packages of ``requirements/``, a stamp
that says it is complete, and the line of configuration that makes a run use it. A marker in the directory says that an
installation is under way; one that was interrupted is removed by the next. Called by ``areal.cli``.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from areal.engine.inference.launch import import_path
from areal.engine.inference.server_env import INCOMPLETE, STAMP, has_gpu
from areal.infra.launcher.inference_server import server_environment
from areal.utils import fs
from areal.utils.errors import ArealError

_ASK_S = 60.0
_INSTALL_S = 3600.0
_CHECK_S = 600.0


class InstallError(ArealError, RuntimeError):
    """An environment cannot be built; nothing that looks complete is left."""


@dataclass(frozen=True)
class Recipe:
    """How one environment is built.

    Attributes:
        requirements: file in ``requirements/``.
        resolved: the file names every package, so pip resolves nothing.
        pythons: versions with which its packages exist.
        modules: that must import afterwards.
        setting: key that names the interpreter.
    """

    requirements: str
    resolved: bool
    pythons: tuple[tuple[int, int], ...]
    modules: tuple[str, ...]
    setting: str


_VLLM = ("vllm.entrypoints.openai.api_server",)
_SGLANG = ("sglang.launch_server", "sglang.srt.entrypoints.http_server")
RECIPES = {
    ("vllm", "cpu"): Recipe("vllm-cpu.txt", True, ((3, 11), (3, 12), (3, 13)), _VLLM, "vllm.python"),
    ("vllm", "cuda"): Recipe("vllm.txt", False, ((3, 11), (3, 12), (3, 13)), _VLLM, "vllm.python"),
    ("sglang", "cpu"): Recipe("sglang-cpu.txt", True, ((3, 11), (3, 12)), _SGLANG, "sglang.python"),
    ("sglang", "cuda"): Recipe("sglang.txt", False, ((3, 11), (3, 12)), _SGLANG, "sglang.python"),
}


def main(options: argparse.Namespace) -> int:
    """Entry point: 0 when the environment is there, 1 when it cannot be built."""
    device = options.device or ("cuda" if has_gpu() else "cpu")
    try:
        python = install(options.backend, options.directory, device, options.python)
    except InstallError as exc:
        sys.stderr.write(f"areal install-server: {exc}\n")
        return 1
    setting = RECIPES[options.backend, device].setting
    sys.stdout.write(
        f"{options.backend} is installed in {options.directory} for {device}. Use it with\n"
        f"  rollout.backend={options.backend}:d1 {setting}={python}\n"
        f"or in YAML\n  {options.backend}:\n    python: {python}\n"
    )
    return 0


def install(backend: str, directory: Path, device: str, python: str) -> Path:
    """Build the environment unless it is complete already; returns its interpreter.

    Raises:
        InstallError: names the step that failed and what to do.
    """
    recipe, directory = RECIPES[backend, device], directory.absolute()
    requirements = requirements_dir() / recipe.requirements
    digest = hashlib.sha256(requirements.read_bytes()).hexdigest()
    version = _check_python(backend, recipe, python)
    target = directory / "bin" / "python"
    if _is_complete(directory, digest):
        return target
    _make_room(directory)
    marker = directory / INCOMPLETE
    directory.mkdir(parents=True, exist_ok=True)
    marker.write_text(f"`areal install-server {backend}` has not finished here\n", encoding="utf-8")
    try:
        _build(recipe, directory, python, requirements)
        _check_imports(backend, recipe, target, device)
    except BaseException:
        _remove(directory)
        raise
    stamp = {"backend": backend, "device": device, "python": version, "requirements_sha256": digest}
    fs.atomic_write_json(directory / STAMP, stamp)
    marker.unlink()
    return target


def requirements_dir() -> Path:
    """``requirements/`` beside the package in a checkout, inside it in an installed one.

    Raises:
        InstallError: neither is there.
    """
    package = Path(__file__).resolve().parents[1]
    for found in (package / "requirements", package.parent / "requirements"):
        if (found / "vllm-cpu.txt").is_file():
            return found
    raise InstallError(f"requirements/ is neither in {package} nor beside it; install AReaL again")


def _check_python(backend: str, recipe: Recipe, python: str) -> str:
    code = "import sys, venv, ensurepip; print(*sys.version_info[:3], sep='.')"
    try:
        answer = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, timeout=_ASK_S, check=True, env=server_environment({})
        )
    except (OSError, subprocess.SubprocessError) as exc:
        detail = (getattr(exc, "stderr", None) or str(exc)).strip()[-300:]
        raise InstallError(
            f"{python} cannot make virtual environments: {detail}; name an interpreter with its modules venv and "
            "ensurepip: --python"
        ) from exc
    version = answer.stdout.strip()
    if tuple(int(part) for part in version.split(".")[:2]) not in recipe.pythons:
        allowed = ", ".join(f"{major}.{minor}" for major, minor in recipe.pythons)
        raise InstallError(
            f"{python} is Python {version}; the packages of {backend} are pinned for {allowed}: name one with --python"
        )
    return version


def _is_complete(directory: Path, digest: str) -> bool:
    if (directory / INCOMPLETE).exists():
        return False
    try:
        stamp = json.loads((directory / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if stamp.get("requirements_sha256") != digest:
        raise InstallError(f"{directory} holds an environment of other pins; remove it or name another directory")
    return True


def _make_room(directory: Path) -> None:
    if (directory / INCOMPLETE).is_file():
        sys.stderr.write(f"removing the unfinished environment in {directory}\n")
        _remove(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise InstallError(f"{directory} is there already and not an environment of ours; name a new directory")


def _remove(directory: Path) -> None:
    """The marker goes last, so that what is left of an interrupted removal is known as unfinished."""
    for entry in directory.iterdir() if directory.is_dir() else ():
        if entry.name != INCOMPLETE:
            with contextlib.suppress(OSError):
                entry.unlink() if entry.is_symlink() or not entry.is_dir() else shutil.rmtree(entry)
    shutil.rmtree(directory, ignore_errors=True)


def _build(recipe: Recipe, directory: Path, python: str, requirements: Path) -> None:
    _run("making the environment", [python, "-m", "venv", str(directory)], _ASK_S * 5)
    pip = [str(directory / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input", "install"]
    options = ["--no-deps"] if recipe.resolved else []
    _run("installing (some minutes)", [*pip, "--quiet", *options, "-r", str(requirements)], _INSTALL_S)


def _check_imports(backend: str, recipe: Recipe, python: Path, device: str) -> None:
    if device == "cuda" and not has_gpu():
        return  # GPU builds of some modules do not import without a device
    env = {"PYTHONPATH": import_path(backend, device), "VLLM_NO_USAGE_STATS": "1", "SGLANG_USE_CPU_ENGINE": "1"}
    code = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)"
    _run("importing the server", [str(python), "-c", code, *recipe.modules], _CHECK_S, env)


def _run(step: str, command: list[str], limit_s: float, env: dict[str, str] | None = None) -> None:
    sys.stderr.write(f"{step} ...\n")
    environment = None if env is None else server_environment(env)
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit_s, env=environment
        )
    except (OSError, subprocess.SubprocessError) as exc:
        raise InstallError(f"{step}: {exc}") from exc
    if done.returncode:
        words = " ".join(command)
        raise InstallError(
            f"{step} failed with code {done.returncode}; nothing is left of it\ncommand: {words}\n"
            f"{(done.stderr or done.stdout).strip()[-3000:]}"
        )
