"""The workflow of the chaos cells: RLVR that injects the faults of its plan and books how each sample should end."""

from __future__ import annotations

import asyncio
import random
import uuid
from pathlib import Path
from typing import Any

from areal.api.io_struct import ModelRequest
from areal.api.reward_api import AsyncRewardWrapper
from areal.infra import workflow_context
from areal.infra.rollout.groups import drop_reason
from areal.workflow.rlvr import RLVRWorkflow
from tests.full.chaos_faults import Attempt, FaultPlan
from tests.full.chaos_rewards import chaotic_reward

REWARD_TIMEOUT_S = 1.5
HANG_S = 3600.0


class ChaosWorkflow(RLVRWorkflow):
    """RLVR under a :class:`FaultPlan`.

    Args:
        gconfig: sampling settings.
        tokenizer: path.
        plan: faults and their book.
        scratch: directory for the rewards' marks.
    """

    def __init__(self, gconfig: Any, tokenizer: Any, plan: FaultPlan, scratch: Path) -> None:
        super().__init__(chaotic_reward, gconfig, tokenizer)
        self._score = AsyncRewardWrapper(chaotic_reward, REWARD_TIMEOUT_S, max_workers=2, max_retries=1)
        self.plan = plan
        self._scratch = scratch

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        context = workflow_context.get()
        episode = context.episode
        assert episode is not None
        assert context.task_id is not None
        attempt = self.plan.begin(context.task_id, episode.row, episode.sample)
        fault = self.plan.draw(episode.epoch, episode.row, episode.sample)
        try:
            return await self._misbehave(attempt, fault, engine, data)
        except (Exception, SystemExit) as error:
            if self.plan.outcomes[attempt] == "ok":
                self.plan.outcomes[attempt] = drop_reason(error)
                self.plan.surprises.append(f"{attempt} ({fault or 'no fault'}): {type(error).__name__}: {error}")
            raise

    async def _misbehave(self, attempt: Attempt, fault: str, engine: Any, data: dict[str, Any]) -> Any:
        if fault == "generation-is-aborted":
            return await self._aborted(attempt, engine, data)
        if fault:
            self.plan.inject(attempt, fault)
        if fault.startswith("reward-"):
            token = self._scratch / f"{attempt.task}-{attempt.sample}-{attempt.number}"
            return await super().arun_episode(engine, {**data, "fault": fault, "token": str(token)})
        await self._before(fault, engine)
        if fault == "prompt-is-malformed":
            data = {**data, "messages": [{"role": "user"}]}
        if fault == "prompt-is-too-long":
            data = {**data, "messages": [{"role": "user", "content": "1+" * 4000}]}
        return self._spoil(fault, await super().arun_episode(engine, data))

    async def _before(self, fault: str, engine: Any) -> None:
        """What goes wrong before the generation."""
        if fault == "workflow-raises":
            raise KeyError("the column that is not there")
        if fault == "workflow-exits":
            raise SystemExit(3)
        if fault == "connection-is-lost":
            raise ConnectionResetError("the engine went away")
        if fault == "workflow-is-slow":
            await asyncio.sleep(random.random() * 0.4)
        if fault == "workflow-hangs":
            await asyncio.sleep(HANG_S)
        if fault == "workflow-ignores-cancellation":
            try:
                await asyncio.sleep(HANG_S)
            except asyncio.CancelledError:
                await asyncio.sleep(1.0)
        if fault == "prompt-is-out-of-vocabulary":
            await engine.agenerate(ModelRequest(input_ids=[10**6], gconfig=self.gconfig, tokenizer=self.tokenizer))

    async def _aborted(self, attempt: Attempt, engine: Any, data: dict[str, Any]) -> Any:
        """Abort the own request; it may have ended before."""
        ids, _ = self._encode(data)
        request = ModelRequest(
            rid=uuid.uuid4().hex, input_ids=list(ids), gconfig=self.gconfig.new(max_new_tokens=200, ignore_eos=True)
        )
        running = asyncio.ensure_future(engine.agenerate(request))
        await asyncio.sleep(0.002)
        engine.sampler.abort(request.rid)
        response = await running
        if response.stop_reason == "abort":
            self.plan.inject(attempt, "generation-is-aborted")
            raise RuntimeError("aborted")
        return await super().arun_episode(engine, data)

    @staticmethod
    def _spoil(fault: str, table: dict[str, Any]) -> Any:
        """What goes wrong with the result."""
        if fault == "workflow-returns-none":
            return None
        if fault == "workflow-returns-text":
            return "a trajectory"
        if fault == "workflow-forgets-a-column":
            return {name: value for name, value in table.items() if name != "logprobs"}
        if fault == "workflow-returns-nan-reward":
            table["rewards"] = table["rewards"] * float("nan")
        return table
