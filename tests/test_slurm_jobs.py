"""What the Slurm scheduler reads from Slurm, and what it writes for it; no cluster is needed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from areal.api.config.scheduling import SchedulingSpec
from areal.infra.scheduler import slurm_jobs
from areal.infra.scheduler.exceptions import WorkerConfigurationError
from areal.infra.utils import slurm
from areal.infra.utils.slurm_script import HOST, Container, TaskFiles, TaskSpec, batch_script, task_script

# One line of `scontrol -o show job` of Slurm 22.05, shortened.
FAILED_JOB = (
    "JobId=7 JobName=exp_trial:actor UserId=root(0) JobState=FAILED Reason=NonZeroExitCode Dependency=(null) "
    "ExitCode=3:0 RunTime=00:00:01 ReqNodeList=(null) NodeList=n[1-2] BatchHost=n1 Command=/x/a=b.sh WorkDir=/tmp"
)


# --- what Slurm says -----------------------------------------------------------------------------------------------
def test_parse_squeue_lines_give_state_reason_and_nodes() -> None:
    text = "1|RUNNING|None|n[1-2]\n2|PENDING|ReqNodeNotAvail, UnavailableNodes:n1|\n"

    jobs = slurm.parse_squeue(text)

    assert jobs[1] == slurm.JobState(1, "RUNNING", nodes="n[1-2]")
    assert jobs[2] == slurm.JobState(2, "PENDING", "ReqNodeNotAvail, UnavailableNodes:n1")
    assert (jobs[1].waiting, jobs[2].waiting) == (False, True)


def test_parse_scontrol_ended_job_gives_its_exit_code() -> None:
    job = slurm.parse_scontrol(FAILED_JOB)

    assert job == slurm.JobState(7, "FAILED", "NonZeroExitCode", "3:0", "n[1-2]")
    assert job.ended
    assert str(job) == "Slurm job 7 is FAILED (exit code 3:0, reason NonZeroExitCode)"


@pytest.mark.parametrize("state", ["PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED"])
def test_job_state_of_an_active_job_has_not_ended(state: str) -> None:
    assert not slurm.JobState(1, state).ended


@pytest.mark.parametrize(
    "state", ["CANCELLED", "COMPLETED", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT", slurm.NOT_FOUND]
)
def test_job_state_of_an_inactive_job_has_ended(state: str) -> None:
    assert slurm.JobState(1, state).ended


@pytest.mark.parametrize(
    "reason",
    [
        "PartitionNodeLimit",
        "PartitionTimeLimit",
        "DependencyNeverSatisfied",
        "BadConstraints",
        "InvalidAccount",
        "AssocMaxNodePerJobLimit",
        "AssocMaxWallDurationPerJobLimit",
        "AssocGrpCPUMinutesLimit",
        "QOSMaxGRESPerJob",
        "QOSMinGRES",
    ],
)
def test_never_starts_permanent_reason_is_named(reason: str) -> None:
    assert slurm.never_starts(slurm.JobState(1, "PENDING", reason)) == reason


@pytest.mark.parametrize(
    "reason",
    [
        "",
        "Resources",
        "Priority",
        "Dependency",
        "BeginTime",
        "JobHeldUser",
        "AssocGrpGRES",
        "AssocGrpCPURunMinutesLimit",
        "AssocMaxJobsLimit",
        "QOSMaxJobsPerUserLimit",
        "QOSMaxGRESPerUser",
        "ReqNodeNotAvail, May be reserved for other job",
        "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions",
    ],
)
def test_never_starts_reason_that_may_clear_is_none(reason: str) -> None:
    assert slurm.never_starts(slurm.JobState(1, "PENDING", reason)) is None


def test_require_commands_without_slurm_names_setting_command_and_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")

    with pytest.raises(
        slurm.SlurmUnavailableError, match=r"scheduler\.type=slurm needs .*sbatch.*scheduler\.type=local"
    ):
        slurm.require_commands()


def test_submission_env_drops_what_the_surrounding_job_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_CONF", "SLURM_NTASKS", "SBATCH_PARTITION", "OTHER"):
        monkeypatch.setenv(name, "1")

    env = slurm.submission_env()

    assert {name for name in ("SLURM_CONF", "SLURM_NTASKS", "SBATCH_PARTITION", "OTHER") if name in env} == {
        "SLURM_CONF",
        "SBATCH_PARTITION",
        "OTHER",
    }


# --- what a role asks for ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("tasks", "gpu", "nodes", "per_node", "gres"),
    [(2, 8, 2, 1, 8), (8, 1, 1, 8, 8), (2, 1, 1, 2, 2), (9, 1, 2, 5, 5), (3, 3, 2, 2, 6), (4, 5, 4, 1, 5)],
)
def test_allocation_of_devices_fills_nodes_evenly(tasks: int, gpu: int, nodes: int, per_node: int, gres: int) -> None:
    wanted = slurm_jobs.allocation("job", SchedulingSpec(gpu=gpu, mem=4), tasks, 8, Path("/log"))

    assert (wanted.nodes, wanted.tasks_per_node, wanted.gpus_per_node) == (nodes, per_node, gres)
    assert wanted.mem_per_node_mb == per_node * 4096


def test_allocation_without_devices_leaves_the_nodes_to_slurm() -> None:
    wanted = slurm_jobs.allocation("job", SchedulingSpec(cpu=3, mem=4, exclude="n7"), 5, 8, Path("/log"))

    options = wanted.options()

    assert {"--ntasks=5", "--cpus-per-task=3", "--mem-per-cpu=1366M", "--exclude=n7"} <= set(options)
    assert not any(option.startswith(("--nodes", "--gres", "--mem=")) for option in options)


@pytest.mark.parametrize("spec", [{"container_type": "none"}, {}])
def test_container_none_or_default_image_that_is_not_there_is_none(spec: dict[str, str]) -> None:
    assert slurm_jobs.container(SchedulingSpec(**spec), "actor.scheduling_spec") is None


def test_container_written_image_that_is_not_there_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(_program(tmp_path, "apptainer")))

    with pytest.raises(
        WorkerConfigurationError, match=r"there is no image /x\.sif.*actor\.scheduling_spec\.container_type=none"
    ):
        slurm_jobs.container(SchedulingSpec(image="/x.sif"), "actor.scheduling_spec")


def test_container_present_wraps_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(_program(tmp_path, "apptainer")))
    image = tmp_path / "a.sif"
    image.touch()

    found = slurm_jobs.container(SchedulingSpec(image=str(image), mount="/data:/data", gpu=1), "actor.scheduling_spec")

    assert found is not None
    assert found.wrap() == ["apptainer", "exec", "--nv", "-B", "/data:/data", str(image)]


def _program(directory: Path, name: str) -> Path:
    """A directory with an executable of that name."""
    path = directory / name
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return directory


# --- scripts -------------------------------------------------------------------------------------------------------
def test_batch_script_runs_one_srun_with_a_script_per_task(tmp_path: Path) -> None:
    wanted = slurm_jobs.allocation(
        "exp_trial:actor", SchedulingSpec(gpu=4, mem=1, nodelist="n[1-2]"), 2, 4, tmp_path / "log"
    )

    text = batch_script(wanted, [tmp_path / "a b.sh", tmp_path / "c.sh"], "--chdir $PWD -K")

    assert text.count("\nsrun ") == 1
    assert "#SBATCH --gres=gpu:4\n" in text
    assert "#SBATCH '--nodelist=n[1-2]'\n" in text
    assert "srun --chdir $PWD -K" in text
    assert text.index("-K") < text.index("--kill-on-bad-exit=0")  # the later one counts
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


def run_task(tmp_path: Path, environment: dict[str, str], **spec: object) -> tuple[TaskFiles, int]:
    """Run a task's script as srun would."""
    files = TaskFiles(
        *(), script=tmp_path / "s.sh", log=tmp_path / "log", place=tmp_path / "place", exit=tmp_path / "exit"
    )
    files.script.write_text(task_script(TaskSpec(files=files, **{"env": {}, **spec})))
    env = {"PATH": os.environ["PATH"], **environment}
    return files, subprocess.run(["bash", str(files.script)], env=env, check=False).returncode


def test_task_script_second_task_of_a_node_gets_the_second_share(tmp_path: Path) -> None:
    slurm_gave = {"SLURM_LOCALID": "1", "SLURMD_NODENAME": "n1", "CUDA_VISIBLE_DEVICES": "2,3,5,7"}
    command = ["bash", "-c", 'echo "$CUDA_VISIBLE_DEVICES $WORD"; exit 3']

    files, code = run_task(tmp_path, slurm_gave, command=command, gpus=2, env={"WORD": "it's $HOME"})

    assert files.log.read_text() == "5,7 it's $HOME\n"
    assert (code, files.exit.read_text(), files.place.read_text()) == (3, "3\n", "n1 1\n")


def test_task_script_too_few_devices_says_what_slurm_gave(tmp_path: Path) -> None:
    files, code = run_task(tmp_path, {"SLURM_LOCALID": "1", "CUDA_VISIBLE_DEVICES": "0"}, command=["true"], gpus=1)

    assert code == 1
    assert "needs 1 own devices; Slurm gave 0" in files.log.read_text()
    assert files.exit.read_text() == "1\n"


def test_task_script_setup_that_fails_ends_the_task(tmp_path: Path) -> None:
    files, code = run_task(tmp_path, {}, command=["echo", "started"], setup=["export A=1  # fine", "false"])

    assert code == 1
    assert files.log.read_text() == ""


def test_task_script_command_killed_reports_the_signal(tmp_path: Path) -> None:
    files, _ = run_task(tmp_path, {}, command=["bash", "-c", "kill -KILL $$"])

    assert files.exit.read_text() == "137\n"


def test_task_script_host_becomes_an_address(tmp_path: Path) -> None:
    files, _ = run_task(tmp_path, {}, command=["echo", HOST])

    assert files.log.read_text().strip().count(".") == 3


def test_task_script_container_wraps_setup_and_command(tmp_path: Path) -> None:
    files = TaskFiles(script=tmp_path / "s", log=tmp_path / "l", place=tmp_path / "p", exit=tmp_path / "e")
    image = Container(image="/i.sif", mount="", gpu=False)

    text = task_script(TaskSpec(files=files, command=["run"], env={}, setup=["cd /"], container=image))

    words = [line.strip() for line in text[text.index("command=(") :].splitlines()[1:6]]
    assert words[:5] == ["apptainer", "exec", "/i.sif", "bash", "-c"]


# --- what tasks report, and who cleans up --------------------------------------------------------------------------
def test_exit_files_status_appears_with_the_file(tmp_path: Path) -> None:
    exits = slurm_jobs.ExitFiles(tmp_path)
    (tmp_path / "a.exit").write_text("137\n")

    assert exits.status(tmp_path / "a.exit") == 137
    assert exits.status(tmp_path / "b.exit") is None


def test_reaper_close_cancels_the_jobs_that_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = _program(tmp_path, "scancel") / "scancel"
    program.write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/cancelled\n')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    reaper = slurm_jobs.Reaper()
    for job in (1, 2):
        reaper.add(job)
    reaper.remove(1)

    reaper.close()

    assert (tmp_path / "cancelled").read_text().split() == ["--quiet", "2"]
