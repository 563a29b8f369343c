"""The wheel holds what it needs: built here, installed in a clean environment, it trains outside the clone."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CLEAN = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")}
# Set to reuse this interpreter's site-packages in the clean environment instead of downloading the dependencies.
FAST = "AREAL_WHEEL_TEST_FAST"


def run(command: list, cwd: Path, timeout_s: float) -> str:
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=CLEAN, capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(ROOT / name, source / name)
    for name in ("areal", "requirements"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, source], out, 120)
    (path,) = out.glob("areal-*.whl")
    return path


@pytest.mark.slow
@pytest.mark.ci
def test_wheel_content_is_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    modules = {p.relative_to(ROOT).as_posix() for p in (ROOT / "areal").rglob("*.py")}

    assert modules <= set(names)
    assert "areal/py.typed" in names
    assert {f"areal/{p.relative_to(ROOT)}" for p in (ROOT / "requirements").iterdir()} <= set(names)
    assert {name.split("/")[0] for name in names} == {"areal", wheel.name.rsplit("-py3", 1)[0] + ".dist-info"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.timeout(1500)
def test_wheel_installed_in_clean_environment_trains(wheel, tmp_path):
    environment, elsewhere = tmp_path / "venv", tmp_path / "elsewhere"
    elsewhere.mkdir()
    run([sys.executable, "-m", "venv", environment], tmp_path, 120)
    python = environment / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", wheel]
    if os.environ.get(FAST):
        install.insert(-1, "--no-deps")
        (site,) = environment.glob("lib/python3.*/site-packages")
        (path,) = [p for p in sys.path if p.endswith("site-packages")]
        (site / "borrowed.pth").write_text(path + "\n", encoding="utf-8")
    run(install, tmp_path, 1200)
    shutil.copy(ROOT / "tests" / "wheel_train.py", elsewhere / "train.py")

    result = json.loads(run([python, "train.py"], elsewhere, 300).splitlines()[-1])
    help_text = run([environment / "bin" / "areal", "--help"], elsewhere, 60)

    assert result["steps"] == 2
    assert Path(result["package"]).is_relative_to(environment)
    assert "train" in help_text
