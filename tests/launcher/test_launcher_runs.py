"""Whole runs under the launchers: equal to inline runs, restarted when a rank is killed, gone when they are stopped."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from areal.infra.launcher.base import VERSION_FILE
from areal.utils import fs
from areal.utils.stats_logger import read_stats
from tests.components import ray_cluster, slurm
from tests.components.services import require_module
from tests.controller.runs import TableTrainer, record_tables
from tests.fakes import save_tiny_model
from tests.pair_runs import DPO_BASE, dpo_config, planted_pairs, run_pairs
from tests.scheduler_engines import wait_gone
from tests.servers.conftest import server_python
from tests.trainer_runs import RL_BASE, SFT_BASE, VOCAB_SIZE, rl_config, run_sft, sft_config, stats_of, tiny_policy

pytestmark = [pytest.mark.slow, pytest.mark.ci]

REPO = Path(__file__).resolve().parents[2]
EXAMPLES = REPO / "examples" / "launchers"
SCRIPT = str(Path(__file__).with_name("train_tiny.py"))
LOSSES = ("ppo_actor/update/grad_norm", "ppo_actor/update/actor_loss/avg", "ppo_actor/task_reward/avg")
SPEC = "[{cpu: 1, mem: 1, env_vars: {OMP_NUM_THREADS: '1'}}]"


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Hugging Face directory of the initial policy."""
    return tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def inline(policy: str, tmp_path_factory: pytest.TempPathFactory) -> TableTrainer:
    """The run that all others must equal."""
    torch.set_num_threads(1)
    return record_tables(rl_config(tmp_path_factory.mktemp("inline"), policy, "native.num_threads=1"))


class Launched:
    """A launcher's process.

    Args:
        command: what comes before the script.
        root: of everything that the run writes.
    """

    def __init__(  # noqa: PLR0913 - two that only some tests set
        self, command: list[str], root: Path, policy: str, *overrides: str, base: str = RL_BASE, script: str = SCRIPT
    ) -> None:
        (root / "names").mkdir(parents=True)
        config = root / "c.yaml"
        config.write_text(base)
        specs = [f"actor.scheduling_spec={SPEC}", *([f"rollout.scheduling_spec={SPEC}"] if base is RL_BASE else [])]
        places = [f"cluster.fileroot={root}", f"cluster.name_resolve.nfs_record_root={root}/names"]
        options = [f"actor.path={policy}", *places, *specs, *overrides]
        self.root = root
        self.output = root / "output.txt"
        flag = [] if command[0] in ("bash", "sbatch") else ["--config"]  # examples take the file alone
        self.command = [*command, script, *flag, str(config), *options]
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                self.command,
                cwd=REPO,
                env={**os.environ, "PYTHONPATH": str(REPO), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def finish(self, timeout_s: float = 150.0) -> str:
        """Wait until it has ended; returns what it printed."""
        try:
            self.process.wait(timeout_s)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGTERM)
                self.process.wait(20.0)
        return self.output.read_text()

    def wait_for(self, pattern: str, timeout_s: float = 60.0) -> re.Match[str]:
        """Wait until it has printed something."""
        deadline = time.monotonic() + timeout_s
        while (found := re.search(pattern, self.output.read_text())) is None:
            assert self.process.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.05)
        return found

    def processes(self) -> list[psutil.Process]:
        """Everything that belongs to the run, the launcher too."""
        run_id = self.wait_for(r"of run (\w+) serves")[1]
        found = [psutil.Process(self.process.pid)]
        for process in psutil.process_iter():
            try:
                if process.environ().get("AREAL_WORKER", "").startswith(f"{run_id}/"):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def stats(self, trial: str = "grpo") -> list[dict[str, float]]:
        """Statistics of the run's steps."""
        return [row["stats"] for row in read_stats(self.log_dir(trial))]

    def log_dir(self, trial: str = "grpo") -> Path:
        """Where the run leaves its files."""
        return fs.get_log_path(self.root, "tests", trial)


def launcher(kind: str) -> list[str]:
    """Command of a launcher."""
    return [sys.executable, "-m", f"areal.infra.launcher.{kind}"]


def assert_same_tables(inline: TableTrainer, file: Path) -> None:
    """The launched run trained the same rows in the same order on the same tokens."""
    found = torch.load(file, weights_only=True)
    assert [(step, row.index) for step, (row, _) in inline.groups] == [(step, row) for step, row, _ in found]
    for (_, (_, mine)), (_, row, theirs) in zip(inline.groups, found, strict=True):
        assert torch.equal(mine["input_ids"], theirs["input_ids"]), row
        assert torch.equal(mine["versions"], theirs["versions"]), row
        torch.testing.assert_close(mine["logprobs"], theirs["logprobs"], rtol=0, atol=1e-4)


def assert_same_losses(inline: TableTrainer, stats: list[dict[str, float]]) -> None:
    """Same losses, rewards and gradients in every step."""
    for mine, theirs in zip(stats_of(inline.config), stats, strict=True):
        for key in LOSSES:
            assert mine[key] == pytest.approx(theirs[key], abs=1e-4), key


def test_local_launcher_killed_rank_starts_the_run_again(inline: TableTrainer, policy: str, tmp_path: Path) -> None:
    recover = ("recover.mode=auto", "recover.freq_steps=1", "recover.retries=1", "total_train_steps=4")
    sizes = ("~actor.backend", "~rollout.backend", "allocation_mode=native:d1+fsdp:d2")
    run = Launched(launcher("local"), tmp_path / "run", policy, *sizes, *recover)
    run.wait_for(r"step 1/4")
    (rank,) = [
        process
        for process in run.processes()[1:]
        if process.environ()["AREAL_WORKER"].endswith("/actor/1/0")
        and "areal.infra.rpc.rpc_server" in process.cmdline()
    ]
    rank.kill()
    output = run.finish()
    assert run.process.returncode == 0, output
    assert "worker actor/1 failed" in output
    assert "signal SIGKILL" in output
    assert "Restart 1 of 1" in output
    stats = run.stats()
    assert len(stats) == 4
    assert fs.read_json(run.log_dir() / VERSION_FILE)["trial_name"] == "grpo"
    assert_same_losses(inline, stats[:3])


def test_local_launcher_supervised_ranks_equal_inline(policy: str, tmp_path: Path) -> None:
    config = sft_config(tmp_path / "inline", policy, "total_train_steps=2")
    torch.set_num_threads(1)
    expected = [step["sft/loss/avg"] for step in run_sft(config)]
    overrides = ("total_train_steps=2", "actor.backend=fsdp:d2", "kind=sft")
    run = Launched(launcher("local"), tmp_path / "run", policy, *overrides, base=SFT_BASE)
    output = run.finish()
    assert run.process.returncode == 0, output
    assert [step["sft/loss/avg"] for step in run.stats("sft")] == pytest.approx(expected, abs=1e-4)
    assert "[actor/1] script finished, follower=True" in output


def test_local_launcher_preference_ranks_host_the_reference_and_equal_inline(policy: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    expected = run_pairs(dpo_config(tmp_path / "inline", policy), planted_pairs(8))
    overrides = ("actor.backend=fsdp:d2", "kind=dpo")
    run = Launched(launcher("local"), tmp_path / "run", policy, *overrides, base=DPO_BASE)
    output = run.finish()
    assert run.process.returncode == 0, output
    for key in ("dpo/loss/avg", "dpo/reward_margin/avg"):
        found = [step[key] for step in run.stats("dpo")]
        assert found == pytest.approx([step[key] for step in expected], abs=1e-4), key


def test_local_launcher_failing_script_ends_with_its_error(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint('about to fail')\nsys.exit(3)\n")
    recover = ("recover.mode=auto", "recover.retries=1")
    run = Launched(launcher("local"), tmp_path / "run", "nowhere", *recover, script=str(script))
    output = run.finish()
    assert run.process.returncode == 3, output
    assert "Restart 1 of 1" in output
    assert output.count("[actor/0] about to fail") == 2
    assert "started again recover.retries=1 times before" in output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda s: s.name)
def test_local_launcher_stopped_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, time\nprint('rank', os.environ['RANK'], flush=True)\ntime.sleep(600)\n")
    sizes = ("~actor.backend", "~rollout.backend", "allocation_mode=native:d1+fsdp:d2")
    run = Launched(launcher("local"), tmp_path / "run", "nowhere", *sizes, script=str(script))
    run.wait_for(r"rank 0")
    run.wait_for(r"rank 1")
    processes = run.processes()
    token = next(run.log_dir().glob(".token-*"))
    for process in processes:
        assert token.read_text() not in " ".join([*process.cmdline(), *process.environ().values()])
    assert token.stat().st_mode & 0o777 == 0o600
    assert len(processes) == 1 + 3 + 2  # launcher, workers, scripts
    os.kill(run.process.pid, number)
    run.process.wait(10.0)
    assert wait_gone([process.pid for process in processes], 30.0) == []
    assert run.process.returncode in (-number, 128 + number)


def check_equal(run: Launched, output: str, inline: TableTrainer) -> None:
    """A run that left its tables beside its root is the inline run."""
    assert run.process.returncode == 0, output
    assert (run.root / "tables.pt").exists(), output
    assert_same_tables(inline, run.root / "tables.pt")
    assert_same_losses(inline, run.stats())


def example(command: list[str], root: Path, policy: str) -> Launched:
    """An example's script, on its way."""
    return Launched(command, root, policy, f"tables={root}/tables.pt")


@pytest.mark.parametrize("mode", [[], ["--spmd"]], ids=["single-controller", "spmd"])
def test_example_local_without_staleness_equals_inline(
    mode: list[str], inline: TableTrainer, policy: str, tmp_path: Path
) -> None:
    run = example(["bash", str(EXAMPLES / "local.sh"), *mode], tmp_path / "run", policy)
    check_equal(run, run.finish(), inline)
    assert not list(run.log_dir().glob(".token-*"))


def test_example_ray_without_staleness_equals_inline(inline: TableTrainer, policy: str, tmp_path: Path) -> None:
    require_module("ray")
    with ray_cluster.running_cluster():
        for mode in ([], ["--spmd"]):
            run = example(["bash", str(EXAMPLES / "ray.sh"), *mode], tmp_path / f"run{len(mode)}", policy)
            check_equal(run, run.finish(), inline)


def test_example_slurm_without_staleness_equals_inline(inline: TableTrainer, policy: str, tmp_path: Path) -> None:
    with slurm.running_cluster() as cluster:
        for mode in ([], ["--spmd"]):
            log = tmp_path / f"job{len(mode)}.log"
            sbatch = ["sbatch", "--parsable", f"--output={log}", str(EXAMPLES / "slurm.sbatch"), *mode]
            run = example(sbatch, tmp_path / f"run{len(mode)}", policy)
            output = run.finish()
            assert cluster.wait_empty(120.0) == []
            check_equal(run, output + (log.read_text() if log.exists() else ""), inline)


def test_local_launcher_with_vllm_trains_and_leaves_no_process(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}  # what vLLM needs on a CPU
    policy = save_tiny_model(tmp_path / "policy", vocab_size=VOCAB_SIZE, **sizes)
    layout = ("~actor.backend", "~rollout.backend", "allocation_mode=vllm:d1+fsdp:d1", "total_train_steps=2")
    limits = ("rollout.setup_timeout=400", "rollout.wait_timeout_s=400")
    server = f"vllm.python={server_python('vllm')}"
    run = Launched(launcher("local"), tmp_path / "run", policy, *layout, *limits, server)
    run.wait_for(r"step 1/2", 240.0)
    processes = psutil.Process(run.process.pid).children(recursive=True)
    assert any("vllm" in " ".join(process.cmdline()) for process in processes)
    output = run.finish()
    assert run.process.returncode == 0, output
    assert len(run.stats()) == 2
    assert wait_gone([process.pid for process in processes], 30.0) == []
