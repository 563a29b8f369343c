"""What one episode costs the controller: 256 rollout workers in another process, 8,192 episodes in flight.

``python benchmark/bench_controller.py`` starts a process that answers for every worker after a drawn delay, without
computing anything, and runs the rollout executor against it over the real wire. Target: less than 1 ms of the
controller's processor time (``process_time``) per episode.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from areal.api.cli_args import InferenceEngineConfig
from areal.api.remote import remote
from areal.api.workflow_api import RolloutWorkflow
from areal.engine.inference.rollout_worker import _Outbox
from areal.infra.controller.remote_groups import RemoteGroups
from areal.infra.controller.worker_pool import WorkerPool
from areal.infra.rollout.executor import WorkflowExecutor
from areal.infra.rollout.orders import GroupOrder, GroupReport
from areal.infra.rpc.client import WorkerClient
from areal.infra.rpc.identity import RunIdentity, set_identity
from areal.infra.rpc.rtensor import RTensor
from areal.infra.rpc.server import WorkerServer
from areal.utils.dataloader import RowLoader
from benchmark.common import arguments, emit, summary

WORKERS, IN_FLIGHT, BATCH = 256, 8192, 1024
IDENTITY = RunIdentity(run_id="benchmark", token="benchmark-token")


class Nothing(RolloutWorkflow):
    """Never run: the fake workers answer without it."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any]:
        raise AssertionError


class FakeWorker:
    """Reports every group as accepted after a drawn delay."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._outbox = _Outbox()

    @remote(concurrent=True)
    async def define(self, number: int, recipe: Any, accept: Any) -> None:
        """Workflows are not needed."""

    @remote(concurrent=True)
    async def submit(self, orders: list[GroupOrder], together: bool) -> None:
        """Answer later."""
        loop = asyncio.get_running_loop()
        for order in orders:
            loop.call_later(self._delay_s * random.uniform(0.5, 1.5), self._finish, order)

    @remote(concurrent=True)
    async def collect(self, acknowledged: int, timeout_s: float) -> tuple[int, list[GroupReport]]:
        """As a rollout worker."""
        return await self._outbox.after(acknowledged, timeout_s)

    def _finish(self, order: GroupOrder) -> None:
        shard = RTensor("none", "127.0.0.1:1", "uint8", (1,))
        self._outbox.put(
            GroupReport(
                order.key,
                "accepted",
                succeeded=1,
                shard=shard,
                lengths=(600,),
                rewards=(1.0,),
                min_version=10**6,
                max_version=10**6,
            )
        )


def serve(delay_s: float) -> None:
    """The other process: every worker on one server; prints its address."""
    set_identity(IDENTITY)
    server = WorkerServer(IDENTITY, role="rollout", index=0)
    for index in range(WORKERS):
        server.host_object(f"rollout/{index}", FakeWorker(delay_s))
    server.start()
    print(server.address, flush=True)
    sys.stdin.read()  # until the benchmark ends
    server.stop()


class Crew:
    """Clients of the fake workers."""

    def __init__(self, address: str) -> None:
        self._clients = {f"rollout/{i}": WorkerClient(address) for i in range(WORKERS)}

    def client(self, worker_id: str) -> WorkerClient:
        return self._clients[worker_id]

    def failure(self, worker_id: str) -> str | None:
        return None

    def revive(self, worker_id: str) -> None:
        raise AssertionError(f"{worker_id} was lost")


def milliseconds_per_episode(episodes: int, delay_s: float) -> tuple[float, float]:
    """Processor time of this process per episode, and episodes per second."""
    command = [sys.executable, __file__, "--serve", str(delay_s)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    crew = Crew(process.stdout.readline().strip())
    failures: list[BaseException] = []

    def failed(error: BaseException) -> None:
        failures.append(error)
        executor.lost_groups.fail(error)

    pool = WorkerPool(crew, list(crew._clients), max_deaths=0, on_lost=lambda owner: None, on_failure=failed)
    config = InferenceEngineConfig(
        backend=f"native:d{WORKERS}",
        consumer_batch_size=BATCH,
        max_head_offpolicyness=16,
        max_concurrent_rollouts=IN_FLIGHT,
        wait_timeout_s=300,
    )
    executor = WorkflowExecutor(config, None, remote=RemoteGroups(pool))
    pool.free = lambda owner, shard: None  # type: ignore[method-assign]  # there is nothing to free
    pool.start()
    executor.initialize()
    steps = episodes // BATCH
    rows = [
        {"messages": [{"role": "user", "content": f"What is {i} + {i}?"}], "answer": str(2 * i)} for i in range(4096)
    ]
    loader, workflow = RowLoader(rows, BATCH, shuffle=False), Nothing()
    for step in range(2):
        executor.next_batch(loader, workflow)
        executor.set_version(step + 1)
    began, used = time.perf_counter(), time.process_time()
    for step in range(2, steps + 2):
        executor.next_batch(loader, workflow)
        executor.set_version(step + 1)
    seconds, used = time.perf_counter() - began, time.process_time() - used
    executor.destroy()
    pool.close()
    process.communicate(timeout=30)
    if failures:
        raise failures[0]
    return 1000 * used / (steps * BATCH), steps * BATCH / seconds


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        serve(float(sys.argv[2]))
        return
    parser = arguments(__doc__ or "")
    parser.add_argument("--episodes", type=int, default=16 * BATCH)
    parser.add_argument("--delay-s", type=float, default=6.0, help="mean time of an episode")
    options = parser.parse_args()
    torch.set_num_threads(1)
    set_identity(IDENTITY)
    cost, speed = [], []
    for index in range(options.repeats):
        found = milliseconds_per_episode(options.episodes, options.delay_s)
        print(f"round {index + 1}/{options.repeats}: {found[0]:.3f} ms, {found[1]:.0f} episodes/s", file=sys.stderr)
        cost.append(found[0])
        speed.append(found[1])
    result = {
        "workers": WORKERS,
        "in_flight": IN_FLIGHT,
        "controller_ms_per_episode": summary(cost),
        "episodes_per_second": summary(speed),
        "target": "< 1 ms",
    }
    emit("controller", result, options.out)


if __name__ == "__main__":
    main()
