"""The live console: its numbers, the panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

from areal.utils import console as console_module
from areal.utils import logging
from areal.utils.console import LiveConsole, format_duration


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(console_module.time, "monotonic", lambda: now[0])
    return now


def test_line_shows_progress_metrics_speed_and_eta(clock):
    console = LiveConsole(10, live=False, title="run")
    console.start()
    for g in range(4):
        clock[0] += 2.0
        console.update(g, {"reward": 0.25 * g, "staleness": 1, "tokens_per_s": 12345.6, "unknown": 1})

    line = console.line()

    assert line == ("step 4/10 (40%), reward 0.750, staleness 1.00, tokens/s 12,346, 2.00 s/step, ETA 00:12")


def test_not_a_terminal_logs_plain_lines_at_intervals(clock, caplog):
    with LiveConsole(100, live=False, log_interval_s=10) as console:
        for g in range(12):
            clock[0] += 2.0
            console.update(g, {"reward": 0.5})
    lines = [r.getMessage() for r in caplog.records if r.name == "areal.Console"]
    assert len(lines) == 3
    assert all("reward 0.500" in line for line in lines)


def test_last_step_is_always_logged(clock, caplog):
    with LiveConsole(2, live=False, log_interval_s=1000) as console:
        for g in range(2):
            console.update(g, {})
    assert "step 2/2 (100%)" in caplog.text


def test_resumed_run_measures_its_own_speed(clock):
    console = LiveConsole(10, start_step=8, live=False)
    console.start()
    clock[0] += 3.0
    console.update(8, {})
    assert console.seconds_per_step() == pytest.approx(3.0)
    assert console.eta_s() == pytest.approx(3.0)


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_terminal_shows_panel_and_log_lines_above_it(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with LiveConsole(4, title="exp/trial") as console:
        console.phase("rollout: 5 of 8 groups")
        console.update(0, {"reward": 0.5})
        logging.getLogger("Above").info("a log line")
        console.stop()
        console.stop()
    text = terminal.getvalue()
    assert "exp/trial" in text
    assert "rollout: 5 of 8 groups" in text
    assert "a log line" in text


@pytest.mark.parametrize(("seconds", "text"), [(5, "00:05"), (65, "01:05"), (3723, "1:02:03"), (float("inf"), "--:--")])
def test_format_duration_values(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(("term", "panel"), [("xterm", True), ("dumb", False)])
def test_terminal_that_cannot_redraw_gets_plain_lines(monkeypatch, caplog, term, panel):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", term)
    with LiveConsole(1, title="exp/trial") as console:
        console.update(0, {"reward": 0.5})
    assert ("exp/trial" in terminal.getvalue()) == panel
    assert ("step 1/1 (100%)" in caplog.text) != panel


PANEL_SCRIPT = """
from areal.utils.console import LiveConsole
with LiveConsole(4, title="exp/trial") as console:
    console.phase("rollout")
    for step in range(3):
        console.update(step, {"reward": 0.5, "staleness": 1.0, "tokens_per_s": 12345.0, "sequences_per_s": 100.0})
"""


def on_a_pseudo_terminal(columns: int, **environment: str) -> str:
    """What ``PANEL_SCRIPT`` writes to a terminal of that width."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    inherited = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")}
    run = subprocess.Popen(
        [sys.executable, "-c", PANEL_SCRIPT], stderr=child, env={**inherited, "TERM": "xterm-256color", **environment}
    )
    os.close(child)
    written = b""
    try:
        while part := os.read(parent, 65536):
            written += part
    except OSError:  # the other end is closed
        pass
    finally:
        os.close(parent)
    assert run.wait() == 0
    return written.decode()


@pytest.mark.parametrize("columns", [40, 100])
def test_panel_fits_a_terminal_of_any_width(columns):
    written = on_a_pseudo_terminal(columns)
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", written)
    last = plain.replace("\r", "").rstrip("\n").split("\n")
    last = last[len(last) - 1 - next(i for i, line in enumerate(reversed(last)) if "exp/trial" in line) :]
    assert all(len(line) == columns for line in last), last
    text = " ".join(last)
    assert all(part in text for part in ("step 3/4", "elapsed", "reward 0.500", "12,345", "rollout"))
    assert max(line.count("\u2501") for line in last) > columns / 4  # the bar has room
    assert written.endswith("\x1b[?25h")  # the cursor is back


def test_panel_obeys_no_color():
    colour = re.compile(r"\x1b\[(?:[0-9;]*;)?[349][0-7](?:;[0-9;]*)?m")
    assert colour.search(on_a_pseudo_terminal(80))
    assert not colour.search(on_a_pseudo_terminal(80, NO_COLOR="1"))
