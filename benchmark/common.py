"""What the benchmarks share: alternating runs, medians and ratios of one session, JSON on standard output.

Each ``bench_*.py`` measures its sides in turn (A B B A …), so that a machine that slows down slows both. Absolute
numbers of one machine say little; ratios measured side by side carry over.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

MIN_REPEATS = 5


def alternate(sides: Mapping[str, Callable[[], float]], repeats: int = MIN_REPEATS) -> dict[str, list[float]]:
    """Calls every side once per round and returns each side's measurements in order.

    Args:
        sides: name to function; a function returns one measurement (seconds, or any positive quantity).
        repeats: rounds. The order of the sides is reversed in every other round.
    """
    measured: dict[str, list[float]] = {name: [] for name in sides}
    for round_index in range(repeats):
        order = list(sides) if round_index % 2 == 0 else list(reversed(sides))
        for name in order:
            measured[name].append(sides[name]())
            print(f"round {round_index + 1}/{repeats} {name}: {measured[name][-1]:.4g}", file=sys.stderr)
    return measured


def summary(values: list[float]) -> dict[str, float | int]:
    """Median, extremes and number of measurements."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "n": len(values)}


def ratio(numerator: list[float], denominator: list[float]) -> dict[str, float | int]:
    """Summary of the ratios taken round by round."""
    return summary([a / b for a, b in zip(numerator, denominator, strict=True)])


def machine() -> dict[str, Any]:
    """What was measured on: needed to read the absolute numbers, not the ratios."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = [line for line in cpuinfo.read_text(encoding="utf-8").splitlines() if line.startswith("model name")]
        model = lines[0].split(":", 1)[1].strip() if lines else model
    facts: dict[str, Any] = {"cpu": model, "cores": os.cpu_count(), "python": platform.python_version()}
    for package in ("torch", "transformers"):
        facts[package] = package_version(sys.executable, package)
    return facts


def package_version(python: str, package: str) -> str | None:
    """Version of a package in the environment of the interpreter ``python``; None if it is not there."""
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return done.stdout.strip() or None


def run_json(command: list[str], *, threads: int, timeout_s: float = 1800, cwd: str | None = None) -> Any:
    """Runs a child with a fixed number of threads and returns the JSON of its last output line.

    Raises:
        RuntimeError: the child failed; the message ends with what it wrote to standard error.
    """
    env = dict(os.environ, OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads), TOKENIZERS_PARALLELISM="false")
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=cwd, timeout=timeout_s)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} exited with {done.returncode}:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def arguments(description: str) -> argparse.ArgumentParser:
    """A parser with the options of every benchmark."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--repeats", type=int, default=MIN_REPEATS, help="alternations, 5 or more for a ratio to publish"
    )
    parser.add_argument("--threads", type=int, default=2, help="threads of each side")
    parser.add_argument("--out", type=Path, help="also write the JSON to this file")
    return parser


def emit(name: str, result: Mapping[str, Any], out: Path | None = None) -> None:
    """Prints the result as one JSON object, with the machine and the command that made it."""
    report = {"benchmark": name, "command": " ".join(["python", *sys.argv]), "machine": machine(), **result}
    text = json.dumps(report, indent=2)
    print(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n", encoding="utf-8")
