"""What launchers read of a command line, what they refuse before anything starts, and what they hand to scripts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from areal.api.alloc_mode import AllocationSyntaxError
from areal.infra.launcher.base import main
from areal.infra.launcher.plan import LaunchError, LaunchPlan, MissingPathError, check_nodes, read_plan
from areal.infra.scheduler.attached import attach
from areal.infra.scheduler.local import LocalScheduler
from areal.trainer.follower import follow
from areal.utils import environ
from areal.utils.errors import ConfigError
from tests.trainer_runs import RL_BASE, SFT_BASE

SCRIPT = str(Path(__file__).with_name("train_tiny.py"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory with config files and everything that they name."""
    (tmp_path / "names").mkdir()
    for name, text in (("rl", RL_BASE), ("sft", SFT_BASE)):
        (tmp_path / f"{name}.yaml").write_text(text)
        lines = [line for line in text.splitlines() if "backend: fsdp" not in line]
        (tmp_path / f"{name}-open.yaml").write_text("\n".join(lines).replace('backend: "native:d1", ', ""))
    return tmp_path


def plan_of(root: Path, *overrides: str, file: str = "rl.yaml") -> LaunchPlan:
    """The plan of a launch in ``root``."""
    return read_plan(arguments(root, *overrides, file=file))


def arguments(root: Path, *overrides: str, file: str = "rl.yaml", script: str = SCRIPT) -> list[str]:
    """Command line of a launch in ``root``."""
    places = [f"cluster.fileroot={root}", f"cluster.name_resolve.nfs_record_root={root}/names"]
    return [script, "--config", str(root / file), *places, *overrides]


def test_plan_without_allocation_mode_takes_sizes_from_backends(root: Path) -> None:
    plan = plan_of(root, "actor.backend=fsdp:d2t2", "rollout.backend=native:d3")
    assert (plan.ranks, plan.replicas, plan.workers) == (4, 3, "actor=4,rollout=3")


def test_plan_with_allocation_mode_tells_the_script_the_backends(root: Path) -> None:
    plan = plan_of(root, "allocation_mode=native:d2 + fsdp:d4", file="rl-open.yaml")
    assert (plan.ranks, plan.replicas) == (4, 2)
    assert sorted(plan.arguments[-3:]) == ["actor.backend=fsdp:d4", "rollout.backend=native:d2", "scheduler.type=null"]


def test_plan_with_servers_gives_a_worker_the_devices_of_its_server(root: Path) -> None:
    specs = "rollout.scheduling_spec=[{cpu: 2, gpu: 1, mem: 4}]"
    plan = plan_of(root, "allocation_mode=vllm:d2t2p2+fsdp:d2", specs, file="rl-open.yaml")
    assert (plan.replicas, plan.rollout.gpu, plan.rollout.cpu, plan.rollout.mem) == (2, 4, 8, 16)


def test_plan_of_supervised_run_has_no_rollout(root: Path) -> None:
    assert plan_of(root, "actor.backend=fsdp:d2", file="sft.yaml").workers == "actor=2"


def test_plan_ignores_what_only_the_scripts_own_class_knows(root: Path) -> None:
    plan = plan_of(root, "+my_section.key=1", "+actor.my_key=2", "trial_name=t-${my_section.key}")
    assert plan.config.trial_name == "t-1"


def test_plan_environment_is_common_to_jobs_and_the_spec_wins(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/outer")
    plan = plan_of(root, "actor.scheduling_spec=[{cpu: 2, env_vars: {VLLM_CACHE_ROOT: /mine}}]")
    assert plan.actor.env_vars["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert plan.actor.env_vars["TRITON_CACHE_DIR"] == "/outer"
    assert plan.actor.env_vars["VLLM_CACHE_ROOT"] == "/mine"
    assert plan.rollout.env_vars["VLLM_CACHE_ROOT"].startswith(environ.cache_dir())
    assert plan.actor.cmd is not None


@pytest.mark.parametrize(
    ("overrides", "error", "text"),
    [
        (["allocation_mode=native:d1+fsdp:d2"], LaunchError, "actor.backend='fsdp:d1' contradict"),
        (["allocation_mode=native:d1+native:d2+fsdp:d1"], LaunchError, "two components for rollout"),
        (["allocation_mode=native:d1+fsdp.d2"], AllocationSyntaxError, "fsdp.d2"),
        (["~actor.backend"], LaunchError, "set actor.backend"),
        (["~actor"], LaunchError, "no section actor"),
        (["~rollout", "allocation_mode=native:d1+fsdp:d1"], LaunchError, "no section rollout"),
        (["cluster.fileroot=/nowhere/at/all"], MissingPathError, "cluster.fileroot='/nowhere/at/all'"),
        (["cluster.name_resolve.nfs_record_root=/no"], MissingPathError, "cluster.name_resolve.nfs_record_root='/no'"),
        (["~trial_name"], ConfigError, "trial_name"),
        (["recover.mode=sometimes"], ConfigError, "recover.mode"),
    ],
)
def test_plan_that_cannot_work_is_refused_naming_the_key(
    root: Path, overrides: list[str], error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as caught:
        plan_of(root, *overrides)
    assert text in str(caught.value)


def test_plan_without_script_is_refused(root: Path) -> None:
    with pytest.raises(LaunchError, match="script is missing"):
        read_plan(["--config", str(root / "rl.yaml")])
    with pytest.raises(FileNotFoundError, match="nowhere.py"):
        read_plan(arguments(root, script="nowhere.py"))


def test_plan_larger_than_the_cluster_is_refused(root: Path) -> None:
    gpu = [
        "actor.scheduling_spec=[{gpu: 4}]",
        "actor.backend=fsdp:d4",
        "cluster.n_nodes=2",
        "cluster.n_gpus_per_node=4",
    ]
    with pytest.raises(LaunchError, match=r"need 16 devices; cluster\.n_nodes=2"):
        check_nodes(plan_of(root, *gpu))


def test_launcher_with_too_few_devices_starts_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.warns(FutureWarning, match="scheduler.type=local"):
        code = main("local", LocalScheduler, arguments(root, "actor.scheduling_spec=[{gpu: 3}]"))
    assert code == 1
    assert "scheduling_spec.gpu=3 need 3 devices" in capfd.readouterr().err


@pytest.mark.parametrize(("module", "missing"), [("slurm", "needs the commands sbatch"), ("ray", "RAY_ADDRESS")])
def test_launcher_without_its_cluster_says_what_is_missing(root: Path, module: str, missing: str) -> None:
    if module == "ray":
        pytest.importorskip("ray", reason="the extra ray is not installed")
    env = {"PATH": "/nonexistent", "PYTHONPATH": ".", "HOME": str(root), "RAY_ADDRESS": "127.0.0.1:1"}
    command = [sys.executable, "-m", f"areal.infra.launcher.{module}", *arguments(root)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert missing in done.stderr
    assert "FutureWarning" in done.stderr


def test_script_with_spmd_mode_and_no_launcher_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AREAL_SPMD_MODE", "1")
    monkeypatch.delenv("AREAL_RUN_ID", raising=False)
    with pytest.raises(ConfigError, match=r"AREAL_RUN_ID is not: start the script with python -m areal"):
        attach(None)


@pytest.mark.parametrize(("spmd", "rank"), [("0", "1"), ("1", "0")])
def test_follow_where_this_process_controls_gives_nothing(
    monkeypatch: pytest.MonkeyPatch, spmd: str, rank: str
) -> None:
    monkeypatch.setenv("AREAL_SPMD_MODE", spmd)
    monkeypatch.setenv("RANK", rank)
    assert follow(None) is None
