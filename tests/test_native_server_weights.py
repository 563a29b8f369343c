"""Weight routes of the native HTTP server: disk, shared memory, staged updates, and those that fail."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from areal.engine.core.shared_weights import WeightWriter
from areal.engine.native import wire
from tests.fakes import tiny_model
from tests.native_helpers import weights_of
from tests.native_http import Server, Serving, logprobs_of, until

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Server]:
    async with Serving() as served:
        yield served


def _save(path: Path, seed: int = 7, **overrides: Any) -> str:
    tiny_model(seed=seed, **overrides).save_pretrained(path)
    return str(path)


async def test_update_from_disk_in_the_middle_of_a_request_keeps_it(server: Server, tmp_path: Path) -> None:
    path = _save(tmp_path)
    running = asyncio.ensure_future(server.generate(max_new_tokens=450, temperature=1.0))
    await until(lambda: server.engine.stats.generated_tokens > 10)

    reply = await server.post("/update_weights_from_disk", {"model_path": path, "weight_version": "3"})
    versions = (await running)["meta_info"]["output_token_versions"]

    assert reply["success"] is True
    assert {r["name"] for r in reply["records"][0]} == {name for name, _ in weights_of(tiny_model())}
    assert versions == sorted(versions)
    assert set(versions) == {0, 3}
    after = await server.generate()
    assert after["meta_info"]["weight_version"] == "3"
    reported, expected = logprobs_of(tiny_model(seed=7), after)
    assert reported == pytest.approx(expected, abs=1e-4)


async def test_update_from_disk_staged_serves_after_commit(server: Server, tmp_path: Path) -> None:
    path = _save(tmp_path)

    await server.post("/update_weights_from_disk", {"model_path": path, "weight_version": 1, "commit": False})
    before = await server.generate()
    await server.post("/commit_weights", {"weight_version": 2}, status=400)
    await server.post("/commit_weights", {"weight_version": 1})
    after = await server.generate()

    assert [r["meta_info"]["weight_version"] for r in (before, after)] == ["0", "1"]
    await server.post("/discard_weights")
    await server.post("/update_weight_version", {"new_version": "9"})
    assert (await server.generate())["meta_info"]["weight_version"] == "9"


async def test_update_from_shared_memory_serves_the_new_weights(server: Server) -> None:
    writer = WeightWriter()
    manifest = writer.write(weights_of(tiny_model(seed=7)), 4)

    body = json.loads(json.dumps(wire.write_manifest(manifest)))
    reply = await server.post("/update_weights_from_shm", {**body, "weight_version": 4})
    after = await server.generate()
    foreign = await server.post("/update_weights_from_shm", {**body, "host": "elsewhere"}, status=400)
    writer.close()

    assert wire.read_records(reply["records"]) == [[param.record() for param in manifest.params]]
    reported, expected = logprobs_of(tiny_model(seed=7), after)
    assert reported == pytest.approx(expected, abs=1e-4)
    assert "host" in foreign["message"]


@pytest.mark.parametrize("offset", [-64, 3, 1 << 40])
async def test_update_from_shared_memory_tensor_outside_the_memory_is_refused(server: Server, offset: int) -> None:
    writer = WeightWriter()
    body = wire.write_manifest(writer.write(weights_of(tiny_model(seed=7)), 4))
    body["params"][-1]["offset"] = offset

    reply = await server.post("/update_weights_from_shm", {**body, "weight_version": 4}, status=400)
    writer.close()

    assert "params.offset" in reply["message"]
    assert (await server.generate())["meta_info"]["weight_version"] == "0"


async def test_update_whose_client_leaves_keeps_its_turn_and_the_loop_answers(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = _save(tmp_path), server.engine.stage_source
    reached, go = threading.Event(), threading.Event()

    def slow(source: Any, version: int) -> Any:
        with server.engine._staging:
            reached.set()
            assert go.wait(10)
        return real(source, version)

    monkeypatch.setattr(server.engine, "stage_source", slow)
    body = {"model_path": path, "weight_version": 1, "commit": False}
    leaving = asyncio.ensure_future(server.post("/update_weights_from_disk", body))
    await until(reached.is_set)
    leaving.cancel()
    discarding = asyncio.ensure_future(server.post("/discard_weights"))
    await asyncio.sleep(0.1)
    health = await asyncio.wait_for(server.client.get("/health"), 5)
    waits = not discarding.done()
    go.set()
    await discarding

    assert (health.status, waits) == (200, True)
    await server.post("/commit_weights", {"weight_version": 1}, status=400)  # discarded, after it was staged


async def test_join_whose_client_leaves_can_still_be_left(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, go, left = threading.Event(), threading.Event(), threading.Event()

    def join(group: Any) -> None:
        reached.set()
        assert go.wait(10)

    monkeypatch.setattr(server.engine, "join_group", join)
    monkeypatch.setattr(server.engine, "leave_group", lambda group: left.set())
    body = {"group_name": "g", "master_address": "h", "master_port": 1, "world_size": 2, "rank_offset": 1}
    leaving = asyncio.ensure_future(server.post("/init_weights_update_group", body))
    await until(reached.is_set)
    leaving.cancel()
    await asyncio.sleep(0.1)
    go.set()
    await server.post("/update_weight_version", {"new_version": 1})  # its turn comes when the join is over
    await server.post("/destroy_weights_update_group", {"group_name": "g"})

    assert left.is_set()


@pytest.mark.parametrize("damage", ["absent", "lacks a tensor", "other shape", "truncated", "no weights"])
async def test_update_that_fails_leaves_the_old_versionServing(server: Server, tmp_path: Path, damage: str) -> None:
    path = _damaged(tmp_path, damage)

    reply = await server.post("/update_weights_from_disk", {"model_path": path, "weight_version": 1}, status=400)
    after = await server.generate()

    assert reply["success"] is False
    assert after["meta_info"]["weight_version"] == "0"
    reported, expected = logprobs_of(tiny_model(seed=0), after)
    assert reported == pytest.approx(expected, abs=1e-4)


def _damaged(path: Path, damage: str) -> str:
    from safetensors.torch import load_file, save_file

    if damage == "absent":
        return str(path / "nowhere")
    _save(path, **({"hidden_size": 64} if damage == "other shape" else {}))
    file = path / "model.safetensors"
    if damage == "lacks a tensor":
        tensors = load_file(file)
        tensors.pop("model.norm.weight")
        save_file(tensors, file)
    elif damage == "truncated":
        file.write_bytes(file.read_bytes()[:-1000])
    elif damage == "no weights":
        file.unlink()
    return str(path)


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/update_weights_from_disk", {}, "model_path"),
        ("/update_weights_from_disk", {"model_path": "x", "weight_version": "next"}, "weight_version"),
        ("/update_weights_from_disk", {"model_path": "x", "colour": 1}, "colour"),
        ("/update_weights_from_distributed", {"group_name": "g"}, "group_name"),
        ("/destroy_weights_update_group", {"group_name": "g"}, "group_name"),
        ("/init_weights_update_group", {"group_name": "g", "master_address": "h", "master_port": "x",
                                        "world_size": 2, "rank_offset": 1}, "master_port"),
        ("/init_weights_update_group", {"group_name": "g", "master_address": "h", "master_port": 1,
                                        "world_size": 2, "rank_offset": 0}, "rank_offset"),
        ("/init_weights_update_group", {"group_name": "g", "master_address": "h", "master_port": 1,
                                        "world_size": 2, "rank_offset": 1, "backend": "mpi"}, "backend"),
        ("/update_weight_version", {"new_version": -1}, "new_version"),
    ],
)  # fmt: skip
async def test_weight_call_with_a_wrong_body_is_refused(
    server: Server, path: str, body: dict[str, Any], named: str
) -> None:
    assert named in (await server.post(path, body, status=400))["error"]["message"]


async def test_two_updates_at_once_take_turns(server: Server, tmp_path: Path) -> None:
    paths = [_save(tmp_path / str(seed), seed) for seed in (7, 8)]

    await asyncio.gather(
        *(
            server.post("/update_weights_from_disk", {"model_path": path, "weight_version": version})
            for version, path in enumerate(paths, 1)
        )
    )
    after = await server.generate()

    version = int(after["meta_info"]["weight_version"])
    reported, expected = logprobs_of(tiny_model(seed=(7, 8)[version - 1]), after)
    assert reported == pytest.approx(expected, abs=1e-4)
