"""Scripts of Slurm jobs: the batch script that asks for nodes, and the script that each task runs.

In: what a job needs. Out: bash text. Called by the Slurm scheduler and launcher. Values of the user's own shell options
(``srun_additional_args``, ``additional_bash_cmds``) are written as they are, all else is quoted.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# Words of a task's command that become the address of its machine, and the process id of its script.
HOST, SCRIPT_PID = "{host}", "{script_pid}"


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """What one job asks Slurm for.

    Attributes:
        tasks: processes that one ``srun`` starts.
        nodes, tasks_per_node: how they are spread; None leaves it to Slurm.
        gpus_per_node: devices of each node, shared out among its tasks by the task script.
        mem_per_node_mb, mem_per_cpu_mb: give one of them.
        partition, nodelist, exclude: None leaves it to the cluster and to the ``SBATCH_*`` variables.
        chdir: working directory of the tasks.
    """

    name: str
    tasks: int
    log_path: Path
    chdir: str
    cpus_per_task: int = 1
    nodes: int | None = None
    tasks_per_node: int | None = None
    gpus_per_node: int = 0
    mem_per_node_mb: int | None = None
    mem_per_cpu_mb: int | None = None
    partition: str | None = None
    nodelist: str | None = None
    exclude: str | None = None

    def options(self) -> list[str]:
        """Options of sbatch."""
        values: dict[str, object] = {
            "job-name": self.name,
            "output": self.log_path,
            "open-mode": "append",
            "chdir": self.chdir,
            "nodes": self.nodes,
            "ntasks": self.tasks if self.tasks_per_node is None else None,
            "ntasks-per-node": self.tasks_per_node,
            "cpus-per-task": self.cpus_per_task,
            "gres": f"gpu:{self.gpus_per_node}" if self.gpus_per_node else None,
            "mem": None if self.mem_per_node_mb is None else f"{self.mem_per_node_mb}M",
            "mem-per-cpu": None if self.mem_per_cpu_mb is None else f"{self.mem_per_cpu_mb}M",
            "partition": self.partition,
            "nodelist": self.nodelist,
            "exclude": self.exclude,
        }
        return ["--no-requeue", *(f"--{name}={value}" for name, value in values.items() if value is not None)]


def batch_script(wanted: Allocation, task_scripts: Sequence[Path], srun_args: str = "") -> str:
    """A job whose only step runs ``task_scripts[i]`` as task i.

    One task that fails leaves the others alone (the user's ``-K`` is overridden): whoever submitted the job decides.
    """
    spread = f"--distribution=plane={wanted.tasks_per_node} " if wanted.tasks_per_node else ""
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            *(f"#SBATCH {shlex.quote(option)}" for option in wanted.options()),
            "unset SLURM_NTASKS_PER_NODE  # the last node may have fewer",
            "tasks=(",
            *(f"    {shlex.quote(str(script))}" for script in task_scripts),
            ")",
            f"srun {srun_args} \\",
            f"    --ntasks={wanted.tasks} --cpus-per-task={wanted.cpus_per_task} {spread}\\",
            "    --kill-on-bad-exit=0 --wait=0 \\",
            """    bash -c 'shift "$SLURM_PROCID"; exec bash "$1"' areal-task "${tasks[@]}\"""",
            "",
        ]
    )


@dataclass(frozen=True, kw_only=True)
class TaskFiles:
    """Files of one task: its script, its log, and what it reports.

    Attributes:
        place: written at the start, ``node slot``; slot counts the job's tasks on that node.
        exit: written at the end, the exit status of the command.
    """

    script: Path
    log: Path
    place: Path
    exit: Path


@dataclass(frozen=True, kw_only=True)
class Container:
    """An image in which a task's command runs."""

    image: str
    mount: str
    gpu: bool

    def wrap(self) -> list[str]:
        """Words before the command."""
        bind = ["-B", self.mount] if self.mount else []
        return ["apptainer", "exec", *(["--nv"] if self.gpu else []), *bind, self.image]


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """What one task runs.

    Attributes:
        command: its words; ``HOST`` and ``SCRIPT_PID`` are replaced on the node.
        env: variables to set.
        gpus: devices of the task; it takes the ``slot``-th share of those that Slurm gave the job on its node.
        slot: None takes Slurm's local task number.
        keep_devices: leave the devices as they are (a process beside another one).
        setup: the user's shell commands, run before ``command`` in the same place.
    """

    files: TaskFiles
    command: Sequence[str]
    env: Mapping[str, str]
    gpus: int = 0
    slot: int | None = None
    keep_devices: bool = False
    setup: Sequence[str] = ()
    container: Container | None = None


_DEVICES = """\
IFS=, read -ra devices <<<"${CUDA_VISIBLE_DEVICES:-${SLURM_STEP_GPUS:-${SLURM_JOB_GPUS:-}}}"
mine=("${devices[@]:slot * gpus:gpus}")
if (( ${#mine[@]} != gpus )); then
    echo "areal: task $slot of node ${SLURMD_NODENAME:-?} needs $gpus own devices; Slurm gave ${devices[*]:-none}"
    finish 1
fi
export CUDA_VISIBLE_DEVICES=$(IFS=,; echo "${mine[*]}")"""

_RUN = """\
trap : TERM  # whoever ends a task signals all its processes; stay until the command has ended
"${command[@]}" &
child=$!
while :; do
    wait "$child"
    status=$?
    kill -0 "$child" 2>/dev/null || break  # else only the wait was interrupted
done
finish "$status\""""


def task_script(spec: TaskSpec) -> str:
    """The script of one task: environment, devices, the command, and a record of how it ended."""
    files = spec.files
    container = spec.container.wrap() if spec.container is not None else []
    words = [*container, *_with_setup(spec.command, spec.setup)]
    exports = [f"export {name}={shlex.quote(value)}" for name, value in spec.env.items()]
    devices = (
        [] if spec.keep_devices else [f"gpus={spec.gpus}", _DEVICES if spec.gpus else "export CUDA_VISIBLE_DEVICES="]
    )
    slot = "${SLURM_LOCALID:-0}" if spec.slot is None else str(spec.slot)
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            f"exec >>{_quoted(files.log)} 2>&1",
            "finish() {  # STATUS: record it, whole or not at all",
            f'    echo "$1" >{_quoted(files.exit)}.new && mv {_quoted(files.exit)}.new {_quoted(files.exit)}',
            '    exit "$1"',
            "}",
            f"slot={slot}",
            f'echo "${{SLURMD_NODENAME:-$(hostname)}} $slot" >{_quoted(files.place)}',
            *exports,
            *devices,
            *([_ADDRESS] if HOST in spec.command else []),
            "command=(",
            *(f"    {_word(word)}" for word in words),
            ")",
            _RUN,
            "",
        ]
    )


# The address by which the node reaches the outside, as in areal.utils.network: a host's own name often means loopback.
_ADDRESS = """\
host=$(hostname -i 2>/dev/null | tr ' ' '\\n' | grep -v '^127\\.' | grep -m 1 '\\.')
[[ $host ]] || host=$(hostname -I 2>/dev/null | tr ' ' '\\n' | grep -m 1 '\\.')
host=${host:-127.0.0.1}"""


def _word(word: str) -> str:
    return {HOST: '"$host"', SCRIPT_PID: "$$"}.get(word) or shlex.quote(word)


def _with_setup(command: Sequence[str], setup: Sequence[str]) -> list[str]:
    """The command behind shell commands of the user; one that fails ends the task."""
    if not setup:
        return list(command)
    lines = [f"{{ {line}\n}} || exit" for line in setup]
    return ["bash", "-c", "\n".join([*lines, 'exec "$@"']), "areal-setup", *command]


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
