"""Cells that pass and fail on purpose, for the test of the runner. Only the standard library, so they start fast."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from tests.full.cell import CellContext


def passes(context: CellContext, value: int) -> None:
    """Everything holds."""
    context.facts["value"] = value
    context.expect((context.work / "x").write_text("x") == 1, "cannot write")


def violates(context: CellContext) -> None:
    """Two things do not hold."""
    context.facts["seen"] = 1
    context.expect(False, "the first thing")
    context.expect(False, "the second thing")


def raises(context: CellContext) -> None:
    """An error of its own."""
    raise KeyError("the column")


def dies(context: CellContext) -> None:
    """No result at all."""
    os.write(2, b"last words\n")
    os._exit(9)


def hangs(context: CellContext) -> None:
    """Longer than its limit."""
    time.sleep(3600)


def leaves_a_process(context: CellContext) -> None:
    """Passes, but something still runs."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
