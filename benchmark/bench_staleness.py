"""How much asynchrony buys, without any computation: an engine that only waits, and a trainer that only waits.

``python benchmark/bench_staleness.py`` runs the rollout executor with episodes of log-normal length (median 1, sigma
1), batches of 32, 256 at once, and a train step of 8 medians, under ``on_stale: wait``. Steps per second at eta 1, 2, 4
and 8 against eta 0. Targets: 1.9x at eta 1, 2.0x at eta 4, and no sample older than eta.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from areal.api.cli_args import InferenceEngineConfig
from areal.api.workflow_api import RolloutWorkflow
from areal.infra import workflow_context
from areal.infra.rollout.executor import WorkflowExecutor
from areal.utils.dataloader import RowLoader
from benchmark.common import alternate, arguments, emit, ratio, summary

BATCH, CONCURRENCY, STEP_MEDIANS = 32, 256, 8
ETAS = (0, 1, 2, 4, 8)


class WaitingEngine:
    """Knows the version; generates nothing."""

    version = 0

    def get_version(self) -> int:
        return self.version


class LogNormalWorkflow(RolloutWorkflow):
    """An episode that takes a drawn time; its tokens carry the version of its start."""

    def __init__(self, median_s: float) -> None:
        self.median_s = median_s

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any]:
        episode = workflow_context.get().episode
        assert episode is not None
        version = engine.get_version()
        await asyncio.sleep(self.median_s * random.Random(f"{episode.epoch}/{episode.row}").lognormvariate(0.0, 1.0))
        return {
            "input_ids": torch.tensor([[2, 3]], dtype=torch.int32),
            "attention_mask": torch.ones(1, 2, dtype=torch.bool),
            "loss_mask": torch.tensor([[0, 1]], dtype=torch.int32),
            "logprobs": torch.zeros(1, 2),
            "versions": torch.tensor([[-1, version]], dtype=torch.int32),
            "rewards": torch.tensor([1.0]),
        }


def steps_per_second(eta: int, steps: int, median_s: float, oldest: dict[int, int]) -> float:
    """Speed of a run after its first two steps; notes the oldest sample."""
    engine = WaitingEngine()
    config = InferenceEngineConfig(
        backend="native:d1",
        consumer_batch_size=BATCH,
        max_head_offpolicyness=eta,
        max_concurrent_rollouts=CONCURRENCY,
        on_stale="wait",
        wait_timeout_s=300,
    )
    executor = WorkflowExecutor(config, engine)
    executor.initialize()
    data = RowLoader([{"row": i} for i in range(BATCH * (steps + 20))], BATCH, shuffle=False)
    workflow = LogNormalWorkflow(median_s)
    began = 0.0
    for step in range(steps):
        if step == 2:
            began = time.perf_counter()
        refs = executor.next_batch(data, workflow)
        oldest[eta] = max(oldest.get(eta, 0), max(step - ref.min_version for ref in refs))
        time.sleep(STEP_MEDIANS * median_s)
        engine.version = step + 1
        executor.set_version(step + 1)
    seconds = time.perf_counter() - began
    executor.destroy()
    return (steps - 2) / seconds


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--median-ms", type=float, default=25.0, help="median episode")
    options = parser.parse_args()
    torch.set_num_threads(1)
    oldest: dict[int, int] = {}

    def side(eta: int) -> Any:
        return lambda: steps_per_second(eta, options.steps, options.median_ms / 1000, oldest)

    measured = alternate({f"eta={eta}": side(eta) for eta in ETAS}, options.repeats)
    result = {
        "steps_per_second": {name: summary(values) for name, values in measured.items()},
        "over_eta_0": {name: ratio(values, measured["eta=0"]) for name, values in measured.items() if name != "eta=0"},
        "oldest_sample": {f"eta={eta}": age for eta, age in oldest.items()},
        "targets": {"eta=1": 1.9, "eta=4": 2.0, "oldest_sample": "<= eta"},
    }
    emit("staleness", result, options.out)


if __name__ == "__main__":
    main()
