"""Real vLLM and SGLang servers as teachers: log-probs of a prompt against a plain forward pass."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from areal.workflow.taught import TeacherServer
from tests.fakes import VOCAB
from tests.servers.conftest import ServerFactory
from tests.servers.peer import LONGEST, save_suite_model, suite_model


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_logprobs_of_a_prompt_are_those_of_the_model(kind: Any, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    start: ServerFactory = request.getfixturevalue(f"{kind}_server")
    model = save_suite_model(tmp_path / "model", 0, tied=True)
    length = {"max_model_len": LONGEST} if kind == "vllm" else {"context_length": LONGEST}
    server = start(model, **length)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(4, VOCAB, (n,), generator=generator).tolist() for n in (2, 17, 60)]
    teacher = TeacherServer(server.address, kind, model)

    async def ask() -> list[list[float]]:
        twice = [*rows, *rows]  # the second time they may come from a prefix cache
        return await asyncio.gather(*(teacher.score(ids) for ids in twice))

    found = asyncio.run(ask())

    for ids, scores in zip([*rows, *rows], found, strict=True):
        with torch.no_grad():
            expected = suite_model(0, tied=True)(torch.tensor([ids])).logits[0].log_softmax(-1)
        expected = expected[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
        torch.testing.assert_close(torch.tensor(scores[1:]), expected, rtol=0, atol=1e-4)
