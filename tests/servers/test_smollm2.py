"""Every server with SmolLM2-135M. Needs AREAL_TEST_SMOLLM2, a directory of it, and each server's interpreter."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from areal.api.config.inference import NativeConfig
from areal.engine.inference.backends import protocol_class
from areal.engine.inference.launch import LaunchOrder, launch_server
from tests.servers.peer import LONGEST, PROMPTS, Peer, error_of, request, rows_of
from tests.servers.suite import MODES, TOLERANCE

pytestmark = pytest.mark.slow


def _build(directory: str, seed: int) -> Any:
    """The model itself for seed 0, else with every matrix changed a little."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if seed and parameter.ndim == 2:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter += 0.05 * parameter.std() * noise
    return model


@pytest.fixture(scope="module", params=["native", "vllm", "sglang"])
def peer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    """A server of each kind, one after the other."""
    model = os.environ.get("AREAL_TEST_SMOLLM2")
    if not model or not Path(model).is_dir():
        pytest.skip("AREAL_TEST_SMOLLM2 does not name a directory with SmolLM2-135M")
    directory = tmp_path_factory.mktemp("smollm2")
    settings = {"sglang": {"context_length": LONGEST}, "vllm": {"max_model_len": LONGEST}}.get(request.param, {})
    if request.param == "native":
        order = LaunchOrder("native", NativeConfig(), model, directory / "log", env={"OMP_NUM_THREADS": "1"})
        server = launch_server(order, protocol_class("native")())
    else:
        server = request.getfixturevalue(f"{request.param}_server")(model, **settings)
    served = Peer(
        protocol_class(request.param)(), server.address, True, directory, build=lambda seed: _build(model, seed)
    )
    yield served
    served.close()
    server.process.stop()
    assert not served.failures


def test_greedy_tokens_are_those_of_transformers(peer: Peer) -> None:
    for response in peer.generate(*(request(ids, greedy=True, max_new_tokens=24) for ids in PROMPTS)):
        assert response.output_tokens == rows_of(peer.model, response).argmax(-1).tolist()
        assert error_of(peer.models, response) < TOLERANCE


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_logprobs_are_those_of_transformers(peer: Peer, temperature: float) -> None:
    responses = peer.generate(*(request(ids, temperature=temperature, max_new_tokens=24) for ids in PROMPTS))

    assert max(error_of(peer.models, response, temperature) for response in responses) < TOLERANCE


@pytest.mark.parametrize("mode", MODES)
def test_update_serves_the_new_model(peer: Peer, mode: str) -> None:
    if mode not in peer.protocol.capabilities.weight_modes:
        pytest.skip(f"a {peer.protocol.name} server takes no weights by {mode}")
    version, model = peer.next_model()
    old = peer.model

    peer.publish(mode, version, model)
    after = peer.generate(request(PROMPTS[3], greedy=True, max_new_tokens=12))[0]

    assert set(after.output_versions) == {version}
    assert error_of(peer.models, after) < TOLERANCE
    assert error_of({version: old}, after) > 10 * TOLERANCE
    peer.models = {version: model}


def test_update_in_the_middle_tags_every_token_with_its_version(peer: Peer) -> None:
    version, model = peer.next_model()
    running = peer.start_running(
        *(request(ids, seed=i, max_new_tokens=100) for i, ids in enumerate(PROMPTS * 2)), tokens=20
    )

    peer.publish("disk", version, model)
    responses = running.result(240)

    assert any(len(set(response.output_versions)) == 2 for response in responses)
    assert max(error_of(peer.models, response) for response in responses) < TOLERANCE
