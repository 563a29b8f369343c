"""The chaos suite's own machinery: what seeds draw, and that its checks notice what they are for."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import books, traces
from tests.chaos.scenario import KINDS, STEPS, draw
from tests.full.table import SEEDS

SCENARIOS = [draw(seed) for seed in range(SEEDS)]


# --- scenarios ------------------------------------------------------------------------------------------------------


def test_seeds_strike_every_kind_of_process_with_every_signal() -> None:
    strikes = [strike for scenario in SCENARIOS for strike in scenario.strikes]
    assert {strike.kind for strike in strikes} == set(KINDS)
    assert {strike.how.name for strike in strikes} == {"SIGKILL", "SIGTERM", "SIGSTOP", "SIGINT"}
    assert all(1 <= strike.step < STEPS - 1 for strike in strikes)


def test_seeds_cover_every_layout() -> None:
    assert {scenario.eta for scenario in SCENARIOS} == {0, 1, 2}
    assert {(scenario.replicas, scenario.ranks) for scenario in SCENARIOS} == {(1, 1), (1, 2), (2, 1), (2, 2)}
    assert draw(3) == draw(3)


# --- books ----------------------------------------------------------------------------------------------------------


def state(position: int, counts: dict[str, int], open_rows: list[list[int]] | None = None) -> dict[str, Any]:
    """Books of a run in its first epoch, as ``RowLedger.state_dict`` gives them."""
    ends = {"trained": 0, "filtered": 0, "failed": 0, **counts}
    return {"cursor": {"epoch": 0, "position": position}, "open_rows": open_rows or [], "counts": ends}


def end(position: int, how: str = "trained") -> dict[str, Any]:
    return {"event": "end", "row": [0, position, position], "how": how}


def step(number: int, *positions: int) -> list[dict[str, Any]]:
    rows = [[0, position, position] for position in positions]
    return [*(end(position) for position in positions), {"event": "step", "step": number, "rows": rows}]


def diary() -> list[dict[str, Any]]:
    """Two steps of two rows; a restart undoes a third, and an end that came with it."""
    point = state(5, {"trained": 2, "filtered": 1}, [[0, 3, 3], [0, 4, 4]])
    return [
        {"event": "start", "pid": 1},
        {"event": "open", "step": 0, "rows": state(0, {})},
        end(0, "filtered"),
        *step(0, 1, 2),
        {"event": "point", "step": 0, "rows": point},
        *step(1, 3, 5),
        {"event": "open", "step": 1, "rows": point},
        *step(1, 3, 4),
        {"event": "done", "rows": state(5, {"trained": 4, "filtered": 1})},
    ]


def test_books_of_a_restarted_run_add_up() -> None:
    found = books.follow(diary(), 8)
    assert found.problems == []
    assert found.opened == [0, 1]
    assert found.trained() == Counter({(0, 1): 1, (0, 2): 1, (0, 3): 1, (0, 4): 1})


@pytest.mark.parametrize(
    ("place", "entry", "expected"),
    [
        (9, end(1), "ended as trained, and again as trained"),
        (9, end(6), "dispensed, not ended or the reverse"),
        (-1, {"event": "done", "rows": state(6, {"trained": 4, "filtered": 1})}, "dispensed, not ended"),
        (-1, {"event": "done", "rows": state(5, {"trained": 4}, [[0, 0, 0]])}, "rows without an end"),
        (-1, {"event": "done", "rows": state(5, {"trained": 5})}, "the books say"),
        (7, {"event": "point", "step": 0, "rows": state(5, {})}, "the recover point was given"),
        (-1, {"event": "start", "pid": 2}, "has no end"),
    ],
)
def test_books_notice_what_does_not_add_up(place: int, entry: dict[str, Any], expected: str) -> None:
    entries = diary()
    if place == -1:
        entries[-1] = entry
    else:
        entries.insert(len(entries) - 1 if place == 9 else place, entry)
    assert any(expected in problem for problem in books.follow(entries, 8).problems)


# --- traces ---------------------------------------------------------------------------------------------------------

CHILD = """
import socket, sys
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
sys.stdin.read()
"""


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    """A process of a run, that listens."""
    environment = {**os.environ, traces.TAG: "test-of-traces"}
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_traces_see_process_and_port_until_they_are_gone(child: subprocess.Popen[str]) -> None:
    found = traces.Traces("test-of-traces")
    found.look()
    assert len(found.ports) == 1
    assert [what.split()[0] for what in found.left()] == ["process", "port"]
    child.kill()
    child.wait()
    assert found.wait_gone(5.0)[1] == []


@pytest.mark.skipif(not traces.SHM.is_dir(), reason="no /dev/shm here")
def test_traces_see_shared_memory_that_nobody_uses() -> None:
    found = traces.Traces("test-of-traces")
    name = f"areal-test-{os.getpid()}"
    path = Path(traces.SHM, name)
    with path.open("w"):
        assert f"shared memory /dev/shm/{name}" not in found.left()
    try:
        assert f"shared memory /dev/shm/{name}" in found.left()
    finally:
        path.unlink()


def test_stranger_lives_until_the_end() -> None:
    with traces.stranger() as process:
        assert process.poll() is None
    assert process.poll() is not None
