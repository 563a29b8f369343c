"""Rollout executor with an instant engine: episodes per second, and memory of many episodes in flight.

``python benchmark/bench_executor.py [--rows N] [--in-flight N]`` prints one JSON object. Budgets: at least 3,000
episodes per second, and less than 500 MB for 10,000 in flight.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from areal.api.cli_args import GenerationHyperparameters, InferenceEngineConfig
from areal.api.io_struct import ModelRequest, ModelResponse
from areal.api.workflow_api import RolloutWorkflow
from areal.infra import workflow_context
from areal.infra.rollout.executor import WorkflowExecutor
from areal.utils.dataloader import RowLoader

LENGTH = 32  # tokens of each sequence, half of them prompt


class InstantEngine:
    """Answers at once; while ``gate`` is set, every request waits for it."""

    def __init__(self) -> None:
        self.version = 0
        self.gate: asyncio.Event | None = None
        self.waiting = 0
        self.loop: Any = None

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        workflow_context.prepare_request(req)
        if self.gate is not None:
            self.loop = asyncio.get_running_loop()
            self.waiting += 1
            await self.gate.wait()
        count = LENGTH // 2
        response = ModelResponse(req.input_ids, [5] * count, [-0.5] * count, [self.version] * count)
        workflow_context.note_response(response)
        return response


class OneRequest(RolloutWorkflow):
    """The work of a one-turn episode, without a reward."""

    gconfig = GenerationHyperparameters(max_new_tokens=LENGTH // 2)

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any]:
        response = await engine.agenerate(ModelRequest(input_ids=data["ids"], gconfig=self.gconfig))
        prompt = len(response.input_tokens)
        tokens = response.input_tokens + response.output_tokens
        return {
            "input_ids": torch.tensor([tokens], dtype=torch.int32),
            "attention_mask": torch.ones(1, len(tokens), dtype=torch.bool),
            "loss_mask": torch.tensor([[0] * prompt + [1] * response.output_len], dtype=torch.int32),
            "logprobs": torch.tensor([[0.0] * prompt + response.output_logprobs]),
            "versions": torch.tensor([[-1] * prompt + response.output_versions], dtype=torch.int32),
            "rewards": torch.tensor([1.0]),
        }


def make(batch: int, eta: int, in_flight: int, engine: InstantEngine) -> WorkflowExecutor:
    """A running executor."""
    config = InferenceEngineConfig(
        backend="native:d1",
        consumer_batch_size=batch,
        max_head_offpolicyness=eta,
        max_concurrent_rollouts=in_flight,
        wait_timeout_s=300,
    )
    executor = WorkflowExecutor(config, engine)
    executor.initialize()
    return executor


def loader(rows: int, batch: int) -> RowLoader:
    """Rows with a prompt of token ids."""
    return RowLoader([{"ids": [2] * (LENGTH // 2)} for _ in range(rows)], batch, shuffle=False)


def episodes_per_second(rows: int, batch: int, group_size: int) -> float:
    """Samples per second through ``next_batch`` with a trainer that does nothing."""
    engine = InstantEngine()
    executor = make(batch, 2, 4 * batch, engine)
    data, workflow = loader(rows, batch), OneRequest()
    steps = rows // batch // group_size
    executor.next_batch(data, workflow, group_size=group_size)
    began = time.perf_counter()
    for step in range(1, steps):
        engine.version = step
        executor.set_version(step)
        executor.next_batch(data, workflow, group_size=group_size)
    seconds = time.perf_counter() - began
    executor.destroy()
    return (steps - 1) * batch * group_size / seconds


def memory_in_flight_mb(count: int) -> float:
    """Growth of resident memory while ``count`` episodes wait for the engine."""
    engine = InstantEngine()
    executor = make(count, 0, count, engine)
    executor.rollout_batch([{"ids": [2]}] * 8, OneRequest())  # imports and first allocations are not counted
    executor.set_version(1)
    data = loader(count, count)
    process = psutil.Process()
    before = process.memory_info().rss
    engine.gate = gate = asyncio.Event()
    thread = threading.Thread(target=lambda: executor.next_batch(data, OneRequest()))
    thread.start()
    while engine.waiting < count:
        time.sleep(0.01)
    used = process.memory_info().rss - before
    engine.loop.call_soon_threadsafe(gate.set)
    thread.join()
    executor.destroy()
    return used / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--in-flight", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    memory_mb = memory_in_flight_mb(args.in_flight)
    speed = {
        str(group): [episodes_per_second(args.rows, args.batch, group) for _ in range(args.repeats)] for group in (1, 8)
    }
    result = {
        "benchmark": "executor",
        "episodes_per_second": {f"group_size={g}": round(statistics.median(v)) for g, v in speed.items()},
        "all": {f"group_size={g}": [round(x) for x in v] for g, v in speed.items()},
        "in_flight": args.in_flight,
        "in_flight_mb": round(memory_mb, 1),
        "targets": {"episodes_per_second": 3000, "in_flight_mb": 500},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
