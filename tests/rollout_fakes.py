"""Workflows, engines and configs for the rollout tests: instant, scripted, and recording."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from areal.api.cli_args import InferenceEngineConfig
from areal.api.io_struct import ModelRequest, ModelResponse
from areal.api.trajectory import TrajectoryRef
from areal.api.workflow_api import RolloutWorkflow
from areal.infra import workflow_context
from areal.infra.rollout.executor import WorkflowExecutor
from areal.utils.dataloader import RowLoader


def rows(count: int) -> list[dict[str, Any]]:
    """A dataset of ``{"x": i}``."""
    return [{"x": i} for i in range(count)]


def loader(count: int, batch: int, **settings: Any) -> RowLoader:
    """An unshuffled row loader, unless told otherwise."""
    return RowLoader(rows(count), batch, **{"shuffle": False, **settings})


def table(reward: float = 1.0, length: int = 4, version: int = 0) -> dict[str, torch.Tensor]:
    """A trajectory of one sequence: one prompt token, the rest generated at ``version``."""
    mask = torch.ones(1, length, dtype=torch.int32)
    mask[:, 0] = 0
    versions = torch.full((1, length), version, dtype=torch.int32)
    versions[:, 0] = -1
    return {
        "input_ids": torch.arange(length, dtype=torch.int32)[None],
        "attention_mask": torch.ones(1, length, dtype=torch.bool),
        "loss_mask": mask,
        "logprobs": torch.zeros(1, length),
        "versions": versions,
        "rewards": torch.tensor([float(reward)]),
    }


class FakeEngine:
    """Stamps its version on what it generates."""

    def __init__(self) -> None:
        self.version = 0

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        workflow_context.prepare_request(req)
        await asyncio.sleep(0)
        response = ModelResponse(req.input_ids, [5, 1], [-0.5, -0.5], [self.version] * 2)
        workflow_context.note_response(response)
        return response


class GatedEngine(FakeEngine):
    """Queues while held, and records which orders were admitted together."""

    def __init__(self) -> None:
        super().__init__()
        self.held = False
        self.queue: list[tuple[tuple[int, ...], asyncio.Future[None]]] = []
        self.admissions: list[list[tuple[int, ...]]] = []

    def hold_admission(self) -> None:
        self.held = True

    def release_admission(self) -> None:
        self.held = False
        queue, self.queue = sorted(self.queue, key=lambda item: item[0]), []
        self.admissions.append([order for order, _ in queue])
        for _, future in queue:
            future.set_result(None)

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        workflow_context.prepare_request(req)
        if self.held:
            future = asyncio.get_running_loop().create_future()
            self.queue.append((req.order, future))
            await future
        else:
            self.admissions.append([req.order])
        response = ModelResponse(req.input_ids, [req.seed % 50, 1], [-0.5] * 2, [self.version] * 2)
        workflow_context.note_response(response)
        return response


class FunctionWorkflow(RolloutWorkflow):
    """Runs ``fn(engine, data)``: a coroutine, or a plain value."""

    def __init__(self, fn: Callable[[Any, dict[str, Any]], Any]) -> None:
        self.fn = fn

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        value = self.fn(engine, data)
        return await value if asyncio.iscoroutine(value) else value


class InstantWorkflow(RolloutWorkflow):
    """Returns a table of the engine's version at once; the reward is the row's ``x``."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        return table(data["x"], version=engine.version)


class GeneratingWorkflow(RolloutWorkflow):
    """One request per episode."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        response = await engine.agenerate(ModelRequest(input_ids=[1, 2]))
        out = table(data["x"], length=4)
        out["input_ids"][0, 2:] = torch.tensor(response.output_tokens)
        out["versions"][0, 2:] = torch.tensor(response.output_versions)
        return out


def config(batch: int = 4, eta: int = 0, **settings: Any) -> InferenceEngineConfig:
    """Rollout settings with limits fit for tests."""
    defaults: dict[str, Any] = {
        "backend": "native:d1",
        "consumer_batch_size": batch,
        "max_head_offpolicyness": eta,
        "max_concurrent_rollouts": (eta + 1) * batch,
        "wait_timeout_s": 20.0,
        "episode_timeout_s": 20.0,
    }
    return InferenceEngineConfig(**(defaults | settings))


@contextlib.contextmanager
def executor(settings: InferenceEngineConfig, engine: Any = None, **kwargs: Any) -> Iterator[WorkflowExecutor]:
    """A running executor, destroyed at the end."""
    made = WorkflowExecutor(settings, FakeEngine() if engine is None else engine, **kwargs)
    made.initialize()
    try:
        yield made
    finally:
        made.destroy()


def publish(made: WorkflowExecutor, engine: Any, version: int) -> None:
    """What a trainer does at the end of a step."""
    engine.version = version
    made.set_version(version)
    made.step_done()


def reject_odd(trajectory: dict[str, Any]) -> bool:
    """A filter: keeps groups whose first reward is even."""
    return int(trajectory["rewards"][0]) % 2 == 0


def run_steps(  # noqa: PLR0913 - test helper
    made: WorkflowExecutor, engine: Any, data: Any, workflow: Any, steps: int, **kwargs: Any
) -> list[list[TrajectoryRef]]:
    """Take and publish ``steps`` batches, starting at version 0."""
    batches = []
    for step in range(steps):
        batches.append(made.next_batch(data, workflow, **kwargs))
        publish(made, engine, step + 1)
    return batches
