"""Weight calls to scripted servers: all of them, in order, and what happens when one fails."""

from __future__ import annotations

import threading
import time

import pytest

from areal.engine.core.weight_sources import DiskSource, WeightGroup, XcclSource
from areal.engine.core.weight_sync import ParamRecord
from areal.utils.errors import EngineStoppedError, WeightSyncError
from tests.server_fakes import (
    FakeProtocol,
    FakeServer,
    Fault,
    ask,
    begin,
    generate,
    remote_config,
    sampling,
    wait_until,
)

GROUP = WeightGroup("g1", "127.0.0.1", 1, world_size=5, rank=1, timeout_s=5.0)
DISK = DiskSource(1, "/nowhere")


def test_stage_records_of_every_rank_are_returned_and_nothing_is_served_yet() -> None:
    servers = [FakeServer(), FakeServer()]
    with sampling(*servers) as sampler:
        records = sampler.stage_source(DISK, 1)
        assert [server.version for server in servers] == [0, 0]
        assert sampler.get_version() == 0
        sampler.commit_weights(1)
        assert sampler.get_version() == 1
        assert generate(sampler, ask(max_new_tokens=2)).output_versions == [1, 1]
    assert records == [[ParamRecord("w", (2,), "float32", 1)]] * 2
    assert [server.version for server in servers] == [1, 1]


def test_stage_server_that_keeps_no_records_gives_none() -> None:
    server = FakeServer()
    server.reply_to("/stage", lambda _: {"success": True})
    with sampling(server) as sampler:
        assert sampler.stage_source(DISK, 1) is None


def test_groups_each_server_gets_its_own_ranks() -> None:
    servers = [FakeServer(), FakeServer()]
    with sampling(*servers, ranks_per_server=2) as sampler:
        assert sampler.group_ranks == 4
        sampler.join_group(GROUP)
        sampler.stage_source(XcclSource(1, GROUP, []), 1)
        sampler.leave_group(GROUP)
    for server, rank in zip(servers, (1, 3), strict=True):
        assert [body["rank"] for path in ("/join", "/stage", "/leave") for body in server.calls(path)] == [rank] * 3


def test_join_servers_are_told_at_once_since_each_waits_for_the_others() -> None:
    servers = [FakeServer(), FakeServer()]
    arrived: list[int] = []

    for server in servers:
        server.reply_to("/join", lambda body: arrived.append(body["rank"]) or {"success": True})
    servers[0].fail_next(Fault("stall"), path="/join")
    with sampling(*servers) as sampler:
        thread = threading.Thread(target=lambda: pytest.raises(EngineStoppedError, sampler.join_group, GROUP))
        thread.start()
        servers[1].wait_for(lambda s: len(s.calls("/join")) == 1)  # though the first never answers
        sampler.stop()
        thread.join(5)
        assert not thread.is_alive()


def test_stage_failure_of_one_server_ends_the_wait_for_the_other_and_the_old_version_serves() -> None:
    servers = [FakeServer(), FakeServer()]
    servers[0].fail_next(Fault("stall"), path="/stage")
    servers[1].fail_next(Fault("status", 400, '{"error": "directory lacks model.norm.weight"}'), path="/stage")
    with sampling(*servers) as sampler:
        started = time.monotonic()
        with pytest.raises(WeightSyncError, match=r"weights v1 failed: .*directory lacks model.norm.weight"):
            sampler.stage_source(DISK, 1)
        assert time.monotonic() - started < 20
        sampler.discard_weights()
        assert generate(sampler, ask(max_new_tokens=2)).output_versions == [0, 0]


def test_stage_reply_that_says_it_failed_is_an_error_and_is_not_repeated() -> None:
    server = FakeServer()
    server.reply_to("/stage", lambda _: {"error": "checksum of w differs"})
    with sampling(server) as sampler, pytest.raises(WeightSyncError, match="checksum of w differs"):
        sampler.stage_source(DISK, 1)
    assert len(server.calls("/stage")) == 1


def test_stage_stalled_server_ends_at_the_limit_of_the_call() -> None:
    server = FakeServer()
    server.fail_next(Fault("stall"), path="/stage")
    protocol = FakeProtocol()
    protocol.stage_s = 0.3
    with sampling(server, protocol=protocol) as sampler, pytest.raises(WeightSyncError, match="no answer within 0.3 s"):
        sampler.stage_source(DISK, 1)


@pytest.mark.parametrize("path", ["/stage", "/commit", "/discard"])
def test_update_stalled_server_ends_at_the_limit_of_the_update(path: str) -> None:
    server = FakeServer()
    server.fail_next(Fault("stall"), Fault("stall"), path=path)
    with sampling(server, config=remote_config(request_timeout=3600.0)) as sampler:
        step = {
            "/stage": lambda: None,
            "/commit": lambda: sampler.commit_weights(1),
            "/discard": sampler.discard_weights,
        }

        def whole() -> None:
            sampler.stage_source(DiskSource(1, "/nowhere", timeout_s=1.0), 1)
            step[path]()

        with pytest.raises(WeightSyncError, match=r"actor.weight_update_timeout_s"):
            whole()
        assert (sampler.failure is not None) == (path == "/commit")


def test_stage_server_that_fails_again_and_again_ends_at_the_limit_of_the_update() -> None:
    server = FakeServer()
    server.fail_next(*[Fault("status", 503)] * 1000, path="/stage")
    protocol = FakeProtocol()
    protocol.stage_once = False
    with (
        sampling(server, protocol=protocol, config=remote_config(request_retries=1000)) as sampler,
        pytest.raises(WeightSyncError, match="actor.weight_update_timeout_s"),
    ):
        sampler.stage_source(DiskSource(1, "/nowhere", timeout_s=1.0), 1)


def test_stage_slow_server_gets_the_limit_of_the_update_not_that_of_a_request() -> None:
    server = FakeServer()
    server.reply_to("/stage", lambda _: time.sleep(1.0) or {"records": []})
    protocol = FakeProtocol()
    protocol.stage_s = None
    with sampling(server, protocol=protocol, config=remote_config(request_timeout=0.5)) as sampler:
        assert sampler.stage_source(DiskSource(1, "/nowhere", timeout_s=60.0), 1) == []


@pytest.mark.parametrize("by_status", [True, False])
def test_commit_that_fails_leaves_versions_in_doubt_and_fails_the_sampler(by_status: bool) -> None:
    servers = [FakeServer(), FakeServer()]
    if by_status:
        servers[1].fail_next(Fault("status", 500), path="/commit")
    else:
        servers[1].reply_to("/commit", lambda _: {"error": "reload failed"})
    told: list[BaseException] = []
    with sampling(*servers) as sampler:
        sampler.on_failure = told.append
        sampler.stage_source(DISK, 1)
        with pytest.raises(WeightSyncError, match="switching to weights v1"):
            sampler.commit_weights(1)
        with pytest.raises(EngineStoppedError):
            generate(sampler, ask())
        wait_until(lambda: len(told) == 1)
        assert sampler.get_version() == 0


def test_discard_server_that_applies_at_once_cannot_go_back_and_fails_the_sampler() -> None:
    server = FakeServer()
    told: list[BaseException] = []
    with sampling(server, protocol=FakeProtocol(at_once=True)) as sampler:
        sampler.on_failure = told.append
        sampler.discard_weights()  # nothing was staged: no harm
        assert told == []
        sampler.stage_source(DISK, 1)
        sampler.discard_weights()
        wait_until(lambda: len(told) == 1)
    assert "cannot go back" in str(told[0])


@pytest.mark.parametrize("harmed", [True, False])
def test_stage_failure_fails_the_sampler_where_the_protocol_says_that_weights_are_mixed(harmed: bool) -> None:
    server = FakeServer()
    server.fail_next(Fault("status", 500), path="/stage")
    protocol = FakeProtocol(at_once=True)
    protocol.harmed = lambda source, error: harmed  # type: ignore[method-assign]
    told: list[BaseException] = []
    with sampling(server, protocol=protocol) as sampler:
        sampler.on_failure = told.append
        with pytest.raises(WeightSyncError):
            sampler.stage_source(DISK, 1)
        if harmed:
            wait_until(lambda: len(told) == 1)
        else:
            assert generate(sampler, ask(max_new_tokens=2)).output_len == 2
    assert len(told) == harmed


def test_stage_server_that_ends_meanwhile_unblocks_the_caller() -> None:
    server = FakeServer()
    server.fail_next(Fault("stall"), path="/stage")
    ended: list[str] = []
    with sampling(
        server, watch=lambda: ended[0] if ended else None, config=remote_config(request_timeout=60)
    ) as sampler:
        threading.Timer(0.1, ended.append, ["killed by signal 9"]).start()
        started = time.monotonic()
        with pytest.raises(EngineStoppedError, match="killed by signal 9"):
            sampler.stage_source(DISK, 1)
    assert time.monotonic() - started < 20


def test_generation_goes_on_while_a_server_stages() -> None:
    server = FakeServer(token_s=0.005)
    with sampling(server) as sampler:
        future = begin(sampler, ask(max_new_tokens=30))
        server.wait_for(lambda s: bool(s.jobs))
        sampler.stage_source(DISK, 1)
        assert future.result(30).output_versions == [0] * 30
