"""How weights travel in a run: what ``auto`` picks for samplers on this machine and on others."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal.trainer import remote_builder, rollout_layout
from areal.trainer.rollout_layout import read_layout
from areal.utils.errors import UnsupportedFeatureError
from tests.controller.runs import worker_config

HERE = "127.0.0.1"
TOWARDS = "10.0.0.9"


class FakeScheduler:
    """Workers of each role by their addresses."""

    def __init__(self, **ips: list[str]) -> None:
        self._ips = ips

    def get_workers(self, role: str) -> list[Any]:
        return [SimpleNamespace(ip=ip) for ip in self._ips[role]]


@pytest.fixture
def publisher_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """``publisher_of(addresses, *overrides, actor=ips, rollout=ips)`` -> arguments of the publisher of such a run."""
    monkeypatch.setattr(rollout_layout, "address_towards", lambda _: TOWARDS)

    def build(addresses: list[str], *overrides: str, actor: list[str], rollout: list[str]) -> Any:
        made: list[Any] = []
        monkeypatch.setattr(rollout_layout, "find_servers", lambda *_: addresses)
        monkeypatch.setattr(remote_builder, "RemotePublisher", lambda *_, **kw: made.append(SimpleNamespace(**kw)))
        config = worker_config(tmp_path, "nowhere", "rollout.backend=native:d1", *overrides)
        role = SimpleNamespace(ranks=None, engine=None, train=None, eval=None)
        parts: Any = SimpleNamespace(actor=role, rollout=role, publisher=None, engines=dict)
        scheduler: Any = FakeScheduler(actor=actor, rollout=rollout)
        remote_builder._weight_updater(scheduler, config, read_layout(config), parts)
        return made[0]

    return build


@pytest.mark.parametrize(
    ("addresses", "actor", "rollout", "mode"),
    [
        ([], [HERE], [HERE], "shm"),
        ([], ["10.0.0.5", "10.0.0.5"], ["10.0.0.5"], "shm"),
        ([], ["10.0.0.5"], ["10.0.0.6"], "xccl"),
        ([f"{HERE}:1", "localhost:2", "[::1]:3"], [HERE], [HERE], "shm"),
        (["10.0.0.5:1"], ["10.0.0.5"], ["10.0.0.5"], "shm"),
        (["10.0.0.5:1"], [HERE], [HERE], "xccl"),
        ([f"{HERE}:1", "10.0.0.5:1"], [HERE], [HERE], "xccl"),
        (["10.0.0.6:1"], ["10.0.0.5"], ["10.0.0.5"], "xccl"),
        (["gpu-node-7:1"], [HERE], [HERE], "xccl"),
    ],
)
def test_auto_takes_shared_memory_only_if_every_sampler_is_on_the_trainers_host(
    publisher_of: Any, addresses: list[str], actor: list[str], rollout: list[str], mode: str
) -> None:
    assert publisher_of(addresses, actor=actor, rollout=rollout).mode == mode


@pytest.mark.parametrize(
    ("addresses", "first_rank", "host"),
    [
        ([], HERE, None),
        ([f"{HERE}:1"], HERE, None),
        (["10.0.0.5:1"], HERE, TOWARDS),
        ([f"{HERE}:1", "10.0.0.5:1"], HERE, TOWARDS),
        (["10.0.0.6:1"], "10.0.0.5", None),
    ],
)
def test_broadcast_first_rank_is_given_an_address_that_servers_elsewhere_can_reach(
    publisher_of: Any, addresses: list[str], first_rank: str, host: str | None
) -> None:
    assert publisher_of(addresses, actor=[first_rank], rollout=[first_rank]).settings.host == host


def test_auto_servers_that_cannot_map_memory_get_a_broadcast_on_one_host_too(publisher_of: Any) -> None:
    found = publisher_of([], "rollout.backend=sglang:d1", actor=[HERE], rollout=[HERE])
    assert (found.mode, found.settings.torch_helper) == ("xccl", True)


@pytest.mark.parametrize("mode", ["disk", "xccl", "shm"])
def test_mode_that_is_written_is_taken(publisher_of: Any, mode: str) -> None:
    assert publisher_of([], f"actor.weight_update_mode={mode}", actor=[HERE], rollout=[HERE]).mode == mode


def test_limit_and_buckets_are_those_of_the_config(publisher_of: Any) -> None:
    settings = ("actor.weight_update_timeout_s=7", "actor.weight_chunked_mem_mb=3")
    found = publisher_of([], *settings, actor=[HERE], rollout=[HERE]).settings
    assert (found.timeout_s, found.bucket_bytes) == (7.0, 3 << 20)


def test_mode_that_the_servers_cannot_receive_is_refused(publisher_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_layout.RolloutLayout, "protocol", rollout_layout.protocol_class("sglang"))
    with pytest.raises(UnsupportedFeatureError, match="weight_update_mode=shm: .* receives weights by xccl, disk"):
        publisher_of([], "actor.weight_update_mode=shm", actor=[HERE], rollout=[HERE])
