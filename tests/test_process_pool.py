"""The worker pool: bad calls cost only themselves, slots come back, nothing is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from areal.utils.process_pool import (
    CallTimeoutError,
    PoolClosedError,
    ProcessPool,
    RemoteCallError,
    WorkerDiedError,
    can_travel,
    default_workers,
    shared_pool,
)
from tests import reward_fakes
from tests.timing import slowness, wait_until

ROOT = Path(__file__).parent.parent


@pytest.fixture
def pool():
    made = ProcessPool(2)
    yield made
    made.close()


def test_hangs_and_deaths_cost_only_themselves_and_leave_nothing_behind():
    before = set(psutil.Process().children(recursive=True))
    pool, timeout_s = ProcessPool(2), 1.0
    pool.submit(reward_fakes.good, ("", "x")).result(30)  # a worker is up: start-up is not what is measured
    bad = [pool.submit(reward_fakes.by_order, ("hang",), timeout_s=timeout_s) for _ in range(3)]
    dead = pool.submit(reward_fakes.by_order, ("exit",), timeout_s=timeout_s)
    good = [pool.submit(reward_fakes.good, ("", "x" * i), timeout_s=timeout_s) for i in range(20)]
    assert [future.result(30) for future in good] == [float(i) for i in range(20)]
    for future in bad:
        with pytest.raises(CallTimeoutError):
            future.result(30)
    with pytest.raises(WorkerDiedError, match="exit code 1"):
        dead.result(30)
    closing = time.monotonic()
    pool.close()
    assert time.monotonic() - closing < 20.0
    assert set(psutil.Process().children(recursive=True)) <= before


def test_close_during_a_hang_is_quick_and_fails_the_call():
    pool = ProcessPool(1)
    hung = pool.submit(reward_fakes.by_order, ("hang",))
    queued = pool.submit(reward_fakes.good, ("", "x"))
    time.sleep(0.3)
    began = time.monotonic()
    pool.close()
    assert time.monotonic() - began < 20.0
    for future in (hung, queued):
        with pytest.raises(PoolClosedError):
            future.result(5)
    with pytest.raises(PoolClosedError):
        pool.submit(reward_fakes.good, ("", "x"))
    pool.close()


def test_exceptions_travel_with_the_workers_traceback(pool):
    with pytest.raises(ValueError, match="no reward for you") as caught:
        pool.submit(reward_fakes.by_order, ("raise",)).result(30)
    assert "by_order" in caught.value.__notes__[0]
    with pytest.raises(RemoteCallError, match="OddError: one two"):
        pool.submit(reward_fakes.by_order, ("raise odd",)).result(30)
    with pytest.raises(RemoteCallError, match="SystemExit"):
        pool.submit(reward_fakes.by_order, ("sys.exit",)).result(30)
    pids = {pool.submit(reward_fakes.process_id).result(30) for _ in range(4)}
    assert len(pids) == 1  # an exception does not cost the process


def test_workers_import_nothing_heavy():
    pool = ProcessPool(1)
    try:
        assert pool.submit(_module_names, ()).result(30) == []
    finally:
        pool.close()


def test_a_kill_takes_grandchildren_along(tmp_path, monkeypatch):
    monkeypatch.setenv("CHILD_PID_FILE", str(tmp_path / "pid"))
    pool = ProcessPool(1)
    try:
        with pytest.raises(CallTimeoutError):
            pool.submit(reward_fakes.spawn_child, timeout_s=1.0 * slowness()).result(60)
        pid = int((tmp_path / "pid").read_text())
        wait_until(lambda: not _alive(pid))
    finally:
        pool.close()


def test_worker_dies_with_its_parent(tmp_path):
    code = """
        import os, sys
        from areal.utils.process_pool import ProcessPool
        from tests import reward_fakes
        pool = ProcessPool(1)
        print(pool.submit(reward_fakes.process_id).result(30), flush=True)
        pool.submit(reward_fakes.by_order, ("hang",))
        import time; time.sleep(0.3)
        os.kill(os.getpid(), 9)
    """
    found = _python(code)
    pid = int(found.stdout.split()[0])
    wait_until(lambda: not _alive(pid))


def test_functions_of_a_guarded_script_run_in_workers(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import sys
        from areal.utils.process_pool import ProcessPool

        def reward(x):
            return x + 1

        if __name__ == "__main__":
            pool = ProcessPool(1)
            print(pool.submit(reward, (41,)).result(30))
            pool.close()
        """)
    )
    found = subprocess.run([sys.executable, str(script)], env=_env(), capture_output=True, text=True, timeout=60)
    assert found.stdout.split() == ["42"], found.stderr


def test_script_without_a_guard_fails_clearly(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        from areal.utils.process_pool import ProcessPool

        def reward(x):
            return x + 1

        pool = ProcessPool(1)
        try:
            print(pool.submit(reward, (41,)).result(30))
        except Exception as exc:
            print(type(exc).__name__, exc)
        pool.close()
        """)
    )
    found = subprocess.run([sys.executable, str(script)], env=_env(), capture_output=True, text=True, timeout=60)
    assert "if __name__" in found.stdout, found.stderr


def test_can_travel_tells_closures_from_functions():
    assert can_travel(reward_fakes.good)
    assert not can_travel(lambda: 1)


def test_cancelled_call_is_skipped(pool):
    hung = [pool.submit(reward_fakes.by_order, ("hang",), timeout_s=0.5) for _ in range(2)]
    queued = pool.submit(reward_fakes.good, ("", "x"))
    assert queued.cancel()
    assert pool.submit(reward_fakes.good, ("", "xy")).result(30) == 2.0
    assert all(isinstance(future.exception(30), CallTimeoutError) for future in hung)


def test_shared_pool_is_made_once_and_again_after_a_close():
    first = shared_pool(3)
    assert shared_pool(3) is first
    first.close()
    assert shared_pool(3) is not first


def test_sizes_are_checked():
    with pytest.raises(ValueError, match="max_workers=0"):
        ProcessPool(0)
    assert default_workers() >= 2


def test_throughput_of_small_calls_is_thousands_per_second(pool):
    pool.submit(reward_fakes.good, ("", "x")).result(30)
    began = time.monotonic()
    futures = [pool.submit(reward_fakes.good, ("", "abc")) for _ in range(500)]
    assert sum(future.result(30) for future in futures) == 1500.0
    assert time.monotonic() - began < 5.0 * slowness()


def _alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # in a container nobody may reap orphans
    except psutil.NoSuchProcess:
        return False


def _module_names():
    return [name for name in ("torch", "numpy", "transformers") if name in sys.modules]


def _env():
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def _python(code):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=_env(), cwd=ROOT, capture_output=True, text=True, timeout=60
    )
