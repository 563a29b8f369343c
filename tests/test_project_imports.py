"""Importing does nothing heavy: each package imports alone, and the light entry points load no torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from areal.tools.check_layers import find_modules

ROOT = Path(__file__).resolve().parents[1]
MODULES = find_modules(ROOT)
PACKAGES = sorted({".".join(name.split(".")[:2]) for name in MODULES})
OPTIONAL = ("ray", "redis", "etcd3gw", "megatron", "peft", "openai", "anthropic", "wandb", "swanlab", "trackio", "vllm")
# Classes of megatron-core are extended there; the engine imports them when it is made.
NEED_MEGATRON = tuple(
    f"areal.engine.megatron_utils.{name}" for name in ("build", "cpu_compat", "model", "optimizer", "pipeline", "spec")
)
LIGHT = ("areal", "areal.api", "areal.api.cli_args", "areal.api.io_struct", "areal.cli", "areal.utils.errors")

# Imports every module of one package in one fresh interpreter and reports what failed and what was loaded.
PROBE = """
import importlib, json, os, sys
names = json.loads(sys.argv[1])
before = dict(os.environ)
failed = {}
for name in names:
    try:
        importlib.import_module(name)
    except BaseException as exc:
        failed[name] = f"{type(exc).__name__}: {exc}"
dist = sys.modules.get("torch.distributed")
print(json.dumps({
    "failed": failed,
    "loaded": sorted({name.split(".")[0] for name in sys.modules}),
    "environment": sorted(k for k in os.environ.keys() | before.keys() if os.environ.get(k) != before.get(k)),
    "process_group": bool(dist and dist.is_available() and dist.is_initialized()),
}))
"""


def probe(names: list[str]) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(names)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("package", PACKAGES)
def test_import_package_alone_succeeds_without_side_effects(package):
    names = [name for name in MODULES if name == package or name.startswith(package + ".")]
    names = [name for name in names if name not in NEED_MEGATRON]

    result = probe(names if package != "areal" else ["areal"])

    assert result["failed"] == {}
    assert not result["process_group"]
    assert [key for key in result["environment"] if key.startswith(("AREAL", "CUDA", "OMP", "TOKENIZERS"))] == []
    assert [name for name in OPTIONAL if name in result["loaded"]] == []


@pytest.mark.parametrize("name", LIGHT)
def test_import_light_module_loads_no_torch(name):
    result = probe([name])

    assert result["failed"] == {}
    assert [heavy for heavy in ("torch", "transformers", "datasets", "numpy") if heavy in result["loaded"]] == []


def test_import_config_package_loads_no_torch():
    result = probe([name for name in MODULES if name.startswith("areal.api.config")])

    assert result["failed"] == {}
    assert "torch" not in result["loaded"]


def test_areal_help_loads_no_torch():
    script = (
        "import sys\nfrom areal.cli import main\nsys.argv = ['areal', '--help']\n"
        "try:\n    code = main()\nexcept SystemExit as exc:\n    code = exc.code\n"
        "assert not code, code\nassert 'torch' not in sys.modules, 'torch was loaded'\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)

    assert done.returncode == 0, done.stderr
    for command in ("train", "doctor", "plot"):
        assert command in done.stdout
