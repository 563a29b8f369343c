"""Plays a scenario: starts the run, strikes, starts a killed controller again, and checks what must hold afterwards.

python -m tests.chaos.play SEED [SEED ...]       plays seeds by hand and prints what was found
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil

from tests.chaos import traces
from tests.chaos.controller import read_progress
from tests.chaos.scenario import PHASES, Scenario, Strike
from tests.full.cell import ROOT

GONE_WITHIN_S = 10.0
LIMIT_S = 400.0
REPLACEMENT_S = 30.0  # from the death of a worker to the appearance of the next
STOPPED_S = 3.0  # how long a stopped controller stays stopped
POLL_S = 0.002
LOOK_S = 0.5


class Play:
    """One run under strikes.

    Args:
        scenario: what happens.
        root: directory of the run.
        policy: initial model.
    """

    def __init__(self, scenario: Scenario, root: Path, policy: str) -> None:
        self.scenario, self.root = scenario, root
        self.tag = uuid.uuid4().hex
        self.command = [sys.executable, "-m", "tests.chaos.controller", str(root), policy, *scenario.overrides()]
        self.traces = traces.Traces(self.tag)
        self.controller: subprocess.Popen[bytes] | None = None
        self.strikes: list[str] = []
        self.gone_s: list[float] = []
        self.problems: list[str] = []
        self._expected_end = False
        self._last_look = 0.0
        self._deadline = 0.0

    @property
    def log_file(self) -> Path:
        """Output of all controllers."""
        return self.root / "controller.log"

    def run(self) -> int | None:
        """Play to the end; the exit code of the last controller, None if it had to be killed at the limit."""
        self.root.mkdir(parents=True)
        self._deadline = time.monotonic() + LIMIT_S
        try:
            self._start()
            for strike in self.scenario.strikes:
                if not self._wait_for(strike):
                    self.strikes.append(f"missed: {strike.kind}")
                    break
                self._strike(strike)
            while self._alive():
                self._rest(0.05)
            code = self.controller.returncode if self.controller is not None else None
            seconds, left = self.traces.wait_gone(GONE_WITHIN_S)
            self.gone_s.append(seconds)
            self.problems += [f"left after the end: {what}" for what in left]
            return code if time.monotonic() < self._deadline else None
        finally:
            self._kill_all()

    # -- the run -------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Start the controller, (again) with the same command."""
        self._expected_end = False
        (self.root / "progress").write_text("-1 start")  # what the last one did is of no consequence
        with self.log_file.open("ab") as log:
            self.controller = subprocess.Popen(
                self.command,
                cwd=ROOT,
                env={**os.environ, traces.TAG: self.tag},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _alive(self) -> bool:
        """Whether the run goes on; starts the controller again if a strike has ended it."""
        assert self.controller is not None
        if time.monotonic() > self._deadline:
            self.problems.append(f"not finished after {LIMIT_S:g} s, in {read_progress(self.root)}")
            return False
        if self.controller.poll() is None:
            return True
        if not self._expected_end:
            return False
        self._start_again()
        return True

    def _start_again(self) -> None:
        """What the dead controller leaves must go; the next one may be started before that."""
        began, left = time.monotonic(), traces.tagged(self.tag)
        if self.scenario.at_once:
            self._start()
        while (still := [p for p in left if _lives(p)]) and time.monotonic() - began < GONE_WITHIN_S:
            self._rest(0.05)
        self.gone_s.append(time.monotonic() - began)
        self.problems += [f"left after a killed controller: {process}" for process in still]
        if not self.scenario.at_once:
            self._start()

    def _rest(self, seconds: float) -> None:
        time.sleep(seconds)
        if time.monotonic() - self._last_look > LOOK_S:
            self.traces.look()
            self._last_look = time.monotonic()

    def _kill_all(self) -> None:
        for process in traces.tagged(self.tag):
            with contextlib.suppress(psutil.Error):
                process.kill()
        if self.controller is not None:
            self.controller.wait()

    # -- strikes -------------------------------------------------------------------------------------------------------

    def _wait_for(self, strike: Strike) -> bool:
        """Wait for the moment of ``strike``; False if the run ended before."""
        due = (strike.step, PHASES.index(strike.phase))
        while self._alive():
            step, phase = read_progress(self.root)
            if (phase in PHASES and (step, PHASES.index(phase)) >= due) or step > strike.step:
                time.sleep(strike.delay_s)
                return self._alive()
            self._rest(POLL_S)
        return False

    def _strike(self, strike: Strike) -> None:
        assert self.controller is not None
        where = "{} {}".format(*read_progress(self.root))
        self.strikes.append(f"{strike.kind} {strike.how.name} in {where}")
        if strike.kind in ("controller", "point"):
            self._strike_controller(strike)
            return
        present = traces.workers(self.tag)
        role = strike.kind if strike.kind in ("rollout", "actor") else None
        candidates = [worker for worker in present if role in (None, worker.role)]
        if not candidates:
            self.strikes[-1] += " (nobody there)"
            return
        first = int(strike.pick * len(candidates))
        victims = [candidates[first]]
        if strike.kind == "two":
            victims.append(candidates[(first + 1) % len(candidates)])
        for victim in victims:
            _send(victim.process, strike.how)
        self.strikes[-1] += f": {', '.join(victim.mark.partition('/')[2] for victim in victims)}"
        if strike.kind == "again":
            self._strike_next(victims[0], strike)

    def _strike_controller(self, strike: Strike) -> None:
        assert self.controller is not None
        if strike.how == signal.SIGSTOP:
            self.controller.send_signal(signal.SIGSTOP)
            time.sleep(STOPPED_S)
            self.controller.send_signal(signal.SIGCONT)
            return
        if strike.kind == "point":
            self._wait_for_point()
        if self.controller.poll() is not None:
            self.strikes[-1] += " (too late)"
            return
        self._expected_end = True
        self.controller.send_signal(strike.how)
        try:
            self.controller.wait(GONE_WITHIN_S)
        except subprocess.TimeoutExpired:
            self.problems.append(f"the controller still ran {GONE_WITHIN_S:g} s after {strike.how.name}")
            self.controller.kill()

    def _wait_for_point(self) -> None:
        """Until a recover point is being written."""
        while self._alive() and not list(self.root.glob("checkpoints/*/tests/grpo/recover/.*aside*")):
            time.sleep(POLL_S / 4)

    def _strike_next(self, victim: traces.WorkerProcess, strike: Strike) -> None:
        """Kill the worker that takes the place of ``victim``, while it is being built."""
        name = victim.mark.split("/")[1:3]
        deadline = time.monotonic() + REPLACEMENT_S
        while self._alive() and time.monotonic() < deadline:
            for worker in traces.workers(self.tag):
                if worker.mark != victim.mark and worker.mark.split("/")[1:3] == name:
                    self._rest(strike.pause_s)
                    _send(worker.process, signal.SIGKILL)
                    self.strikes[-1] += f", again {strike.pause_s:.1f} s after {worker.mark.partition('/')[2]} came"
                    return
            self._rest(0.05)
        self.strikes[-1] += " (nobody took its place)"


def _send(process: psutil.Process, how: signal.Signals) -> None:
    with contextlib.suppress(psutil.Error):
        process.send_signal(how)


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
