"""Runs cells, each in a process of its own, and writes the summary. Used by ``python -m tests.full``.

table ─► select ─► one process per cell (time limit) ─► leftovers looked for and killed ─► summary.json
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import psutil

from areal.utils import fs
from areal.utils.version import get_version_info
from tests.full.cell import ROOT, Cell

FORMAT = 1
MARK = "AREAL_FULL_CELL"  # in the environment of a cell's process, and so of whatever it starts
LEFTOVER_GRACE_S = 3.0
TAIL_LINES = 12

Say = Callable[[str], None]


def select(cells: Sequence[Cell], only: str | None, kinds: Sequence[str]) -> list[Cell]:
    """The cells whose kind is in ``kinds`` (all if empty) and whose name contains or matches ``only``."""
    chosen = [cell for cell in cells if not kinds or cell.kind in kinds]
    return [cell for cell in chosen if only is None or only in cell.name or fnmatch(cell.name, only)]


class Runner:
    """Runs cells one after another.

    Args:
        output: summary file.
        reuse: keep what earlier runs made for several cells (warm start, reference run).
        say: prints one line of progress.
    """

    def __init__(self, output: Path, *, reuse: bool = False, say: Say = print) -> None:
        self.output = output.resolve()
        self.work = self.output.parent / "work"
        self.shared = self.output.parent / "shared"
        self.say = say
        for directory in [self.work] if reuse else [self.work, self.shared]:
            fs.remove_tree(directory)
        self.shared.mkdir(parents=True, exist_ok=True)
        fs.clean_leftovers(self.shared)

    def run(self, cells: Sequence[Cell]) -> dict[str, Any]:
        """Run ``cells``; the summary, which is also written after each of them."""
        began, results = time.monotonic(), []
        for number, cell in enumerate(cells, 1):
            self.say(f"[{number}/{len(cells)}] {cell.name}")
            result = self._run_cell(cell)
            results.append(result)
            facts = ", ".join(f"{key}={value}" for key, value in result["facts"].items())
            self.say(f"    {'passed' if result['passed'] else 'FAILED'} in {result['seconds']} s  {facts}")
            if not result["passed"]:
                self.say(f"    {result['reason']}")
            summary = summarize(results, len(cells), time.monotonic() - began)
            fs.atomic_write_json(self.output, summary)
        return summary

    def _run_cell(self, cell: Cell) -> dict[str, Any]:
        work = self.work / cell.name
        work.mkdir(parents=True)
        result_file, log_file = work.parent / f"{work.name}.json", work.parent / f"{work.name}.log"
        command = [sys.executable, "-m", "tests.full.one", json.dumps(asdict(cell)), "--work", str(work)]
        command += ["--shared", str(self.shared), "--result", str(result_file)]
        began = time.monotonic()
        code, left = _run_process(command, log_file, cell.limit_s)
        seconds = round(time.monotonic() - began, 1)
        facts, failures = _read_result(result_file)
        if code is None:
            failures.append(f"killed after its limit of {cell.limit_s:g} s")
        elif not failures and (code != 0 or not result_file.is_file()):
            failures.append(f"its process ended with exit code {code}: {_tail(log_file)}")
        if code is not None:
            failures += [f"a process was left running: {command_line}" for command_line in left]
        outcome = {"name": cell.name, "kind": cell.kind, "passed": not failures, "seconds": seconds, "facts": facts}
        if not failures:
            fs.remove_tree(work)
            return outcome
        return {**outcome, "reason": "; ".join(failures), "log": str(log_file)}


def _run_process(command: Sequence[str], log_file: Path, limit_s: float) -> tuple[int | None, list[str]]:
    """Run to the end or the limit; the exit code (None: killed at the limit), and what was left running."""
    mark = uuid.uuid4().hex
    with log_file.open("w") as log:
        child = subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=log, env={**os.environ, MARK: mark}, start_new_session=True
        )
        code: int | None = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = child.wait(limit_s)
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
            left = kill_leftovers(mark, 0.0 if code is None else LEFTOVER_GRACE_S)
    return code, left


def summarize(results: Sequence[dict[str, Any]], total: int, seconds: float) -> dict[str, Any]:
    """The summary of the cells that ran, out of ``total``."""
    passed = sum(result["passed"] for result in results)
    return {
        "format": FORMAT,
        "areal": get_version_info().full_version,
        "cells_selected": total,
        "passed": passed,
        "failed": len(results) - passed,
        "seconds": round(seconds, 1),
        "cells": list(results),
    }


def kill_leftovers(mark: str, grace_s: float) -> list[str]:
    """Command lines of the processes with ``mark`` in their environment that outlive ``grace_s``; they are killed."""
    deadline = time.monotonic() + grace_s
    found = _marked(mark)
    while found and time.monotonic() < deadline:
        time.sleep(0.1)
        found = _marked(mark)
    lines = []
    for process in found:
        with contextlib.suppress(psutil.Error):
            lines.append(" ".join(process.cmdline())[:200])
            process.kill()
    return lines


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _read_result(path: Path) -> tuple[dict[str, Any], list[str]]:
    try:
        result = json.loads(path.read_text())
    except FileNotFoundError:
        return {}, []
    except json.JSONDecodeError as error:
        return {}, [f"its result is damaged: {error}"]
    return result["facts"], result["failures"]


def _tail(path: Path) -> str:
    return " | ".join(path.read_text(errors="replace").strip().splitlines()[-TAIL_LINES:])
