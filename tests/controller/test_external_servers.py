"""Whole runs on servers that somebody else runs, named by AREAL_LLM_SERVER_ADDRS: used, updated and left running."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from areal.infra.rollout.failures import RolloutStoppedError
from tests.controller.runs import TableTrainer, record_tables, worker_config
from tests.controller.test_faults import assert_every_row_trained_once, assert_no_children
from tests.controller.test_server_runs import assert_logprobs_are_of_their_version, forward_logprobs
from tests.external_servers import ExternalServer, external_servers
from tests.trainer_runs import checkpoints, tiny_policy

pytestmark = pytest.mark.slow

STEPS = 4
PROMPT = [5, 9, 12, 7]
BASE = ("rollout.max_head_offpolicyness=1", "saver.freq_steps=1", "rollout.setup_timeout=60")


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Hugging Face directory of the initial policy."""
    return tiny_policy(tmp_path_factory.mktemp("policy"))


def run_on(servers: list[ExternalServer], *args: Any, **options: Any) -> Any:
    """A run whose samplers are these servers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AREAL_LLM_SERVER_ADDRS", ",".join(server.address for server in servers))
        return record_tables(*args, **options)


def assert_serves_last_version(servers: list[ExternalServer], config: Any) -> None:
    """Every server lives, is not paused, and generates with the run's last weights."""
    last = checkpoints(config)[-1]
    for server in servers:
        assert server.alive, server.log()
        tokens, logprobs, versions = server.generate(PROMPT)
        assert set(versions) == {STEPS}
        expected = forward_logprobs(str(last), torch.tensor([PROMPT + tokens]))[0, len(PROMPT) :]
        assert logprobs == pytest.approx(expected.tolist(), abs=1e-3)


def in_ci(*values: Any) -> Any:
    """A case that is not left to the nightly tests."""
    return pytest.param(*values, marks=pytest.mark.ci)


@pytest.mark.parametrize("mode", ["shm", in_ci("xccl"), "disk"])
def test_external_servers_serve_two_runs_and_outlive_them(mode: str, policy: str, tmp_path: Path) -> None:
    overrides = ("rollout.backend='native:d2'", f"actor.weight_update_mode={mode}", *BASE)
    with external_servers(2, policy, tmp_path) as servers:
        for number in ("first", "second"):  # which begins at v0 again, on servers at the last version of the first
            config = worker_config(tmp_path / number, policy, f"total_train_steps={STEPS}", *overrides)

            trainer = run_on(servers, config)

            assert_every_row_trained_once(trainer, steps=STEPS, batch=4)
            assert max(assert_logprobs_are_of_their_version(trainer, config, policy)) >= 1
            assert_no_children()
            assert_serves_last_version(servers, config)


class ServerKiller(TableTrainer):
    """Kills a server once, at the beginning of a step; starts it again after ``away_s`` seconds, if that is given."""

    server: ExternalServer
    away_s: float | None = None
    killed = False

    def _train_step(self, step: Any, *args: Any) -> Any:
        if step.global_step == 2 and not self.killed:
            self.killed = True
            self.server.kill()
            if self.away_s is not None:
                threading.Thread(target=self._start_again).start()
        return super()._train_step(step, *args)

    def _start_again(self) -> None:
        time.sleep(self.away_s or 0.0)
        self.server.start(wait=False)


def killer(server: ExternalServer, away_s: float | None) -> type[ServerKiller]:
    """A trainer class that kills ``server``."""
    return type("Killer", (ServerKiller,), {"server": server, "away_s": away_s})


@pytest.mark.parametrize(
    ("mode", "layout", "eta"),
    [
        in_ci("xccl", "native:d2", 2),
        in_ci("disk", "native:d1", 0),  # one worker has both servers
        ("shm", "native:d2", 0),
        ("shm", "native:d2", 2),
        ("xccl", "native:d2", 0),
        ("xccl", "native:d1", 2),
    ],
)
def test_external_server_killed_and_started_again_gets_the_version_in_service(
    mode: str, layout: str, eta: int, policy: str, tmp_path: Path
) -> None:
    overrides = (f"actor.weight_update_mode={mode}", f"rollout.backend='{layout}'", *BASE)
    config = worker_config(tmp_path, policy, "total_train_steps=6", *overrides, f"rollout.max_head_offpolicyness={eta}")
    with external_servers(2, policy, tmp_path) as servers:
        trainer = run_on(servers, config, trainer_class=killer(servers[0], 1.0))

        assert trainer.killed
        assert_every_row_trained_once(trainer, steps=6, batch=4)
        assert_logprobs_are_of_their_version(trainer, config, policy)
        assert_no_children()


def test_external_server_that_stays_away_ends_the_run_by_name(policy: str, tmp_path: Path) -> None:
    length = ("total_train_epochs=100", "total_train_steps=800")
    limits = ("rollout.setup_timeout=3", "recover.retries=1", "rollout.max_head_offpolicyness=0")
    config = worker_config(tmp_path, policy, "rollout.backend='native:d2'", *length, *limits)
    with external_servers(2, policy, tmp_path) as servers:
        with pytest.raises(RolloutStoppedError, match=f"WorkerLostError.*{servers[0].address} answers no"):
            run_on(servers, config, trainer_class=killer(servers[0], None))

        assert servers[1].alive
        servers[1].generate(PROMPT)  # not left paused
        assert_no_children()
