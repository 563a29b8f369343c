"""Rollout worker and trainer on different addresses: two network namespaces joined by a virtual cable."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.components.services import require_program
from tests.controller.runs import TableTrainer, record_tables, worker_config
from tests.trainer_runs import stats_of, tiny_policy


@contextlib.contextmanager
def namespace() -> Iterator[tuple[str, str]]:
    """A network namespace with one address, and a route to this machine's; gives its name and address."""
    require_program("ip")
    if os.getuid() != 0:
        pytest.skip("network namespaces need root")
    token = secrets.token_hex(3)
    name, ours, theirs = f"areal-{token}", f"av{token}a", f"av{token}b"
    subnet = f"10.{200 + secrets.randbelow(50)}.{secrets.randbelow(250)}"

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)

    ip("netns", "add", name)
    try:
        ip("link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", name)
        ip("addr", "add", f"{subnet}.1/24", "dev", ours)
        ip("link", "set", ours, "up")
        ip("-n", name, "addr", "add", f"{subnet}.2/24", "dev", theirs)
        ip("-n", name, "link", "set", theirs, "up")
        ip("-n", name, "link", "set", "lo", "up")
        ip("-n", name, "route", "add", "default", "via", f"{subnet}.1")
        yield name, f"{subnet}.2"
    finally:
        ip("netns", "del", name)  # the cable goes with it


class NotingTrainer(TableTrainer):
    """Notes where its workers are."""

    def _train_step(self, step: object, *args: object) -> object:
        ids = ("actor/0", "rollout/0")
        self.addresses = [self.scheduler.client(worker_id).address.rpartition(":")[0] for worker_id in ids]
        return super()._train_step(step, *args)


@pytest.mark.slow
@pytest.mark.ci
def test_rollout_worker_in_another_network_trains_three_steps(tmp_path: Path) -> None:
    policy = tiny_policy(tmp_path / "policy")
    with namespace() as (name, address):
        command = f"ip netns exec {name} {sys.executable} -m areal.infra.rpc.rpc_server"
        spec = f"rollout.scheduling_spec=[{{cpu: 1, cmd: '{command}'}}]"
        config = worker_config(tmp_path, policy, "scheduler.host=0.0.0.0", spec)
        trainer = record_tables(config, trainer_class=NotingTrainer)

    assert trainer.addresses[1] == address
    assert trainer.addresses[0] != address
    assert len(stats_of(config)) == 3
    assert len(trainer.groups) == 12
