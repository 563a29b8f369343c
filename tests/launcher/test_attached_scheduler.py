"""The scheduler of a script under a launcher, on worker servers of this process."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from areal.api.cli_args import NameResolveConfig
from areal.api.config.scheduling import SchedulingStrategy
from areal.infra.rpc.server import WorkerServer
from areal.infra.run_context import RunContext
from areal.infra.scheduler import attached
from areal.infra.scheduler.attached import AttachedScheduler, released_key
from areal.infra.scheduler.exceptions import SchedulerError, WorkerConfigurationError, WorkerCreationError
from areal.utils import name_resolve, names
from areal.utils.errors import NameEntryNotFoundError
from tests.scheduler_engines import ENGINE, make_context, make_job


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunContext]:
    """A launcher's run with two actor workers and a rollout worker, all in this process."""
    found = make_context(tmp_path)
    servers = []
    for role, index in (("actor", 0), ("actor", 1), ("rollout", 0)):
        servers.append(WorkerServer(found.identity, role=role, index=index))
        servers[-1].start()
        name_resolve.add(names.worker("exp", "trial", role, index), servers[-1].address)
    monkeypatch.setenv("AREAL_SPMD_WORKERS", "actor=2,rollout=1")
    yield dataclasses.replace(found, joined=True)
    for server in servers:
        server.stop()
    name_resolve.reconfigure(NameResolveConfig(type="memory"))


@pytest.fixture
def scheduler(context: RunContext) -> Iterator[AttachedScheduler]:
    made = AttachedScheduler(context)
    yield made
    made.close()


def test_attached_workers_are_found_and_called(scheduler: AttachedScheduler) -> None:
    ids = scheduler.create_workers(make_job("actor", 2))
    scheduler.get_workers("actor", timeout=10.0)
    for worker in ids:
        scheduler.make_engine(worker, ENGINE)
    assert [scheduler.call_engine(worker, "add", rank) for rank, worker in enumerate(ids)] == [0, 1]


def test_attached_training_role_shares_the_actors_workers(scheduler: AttachedScheduler) -> None:
    scheduler.create_workers(make_job("actor", 2))
    job = make_job("ref", 2)
    job.scheduling_strategy = SchedulingStrategy(type="colocation", target="actor", fork=True)
    assert scheduler.create_workers(job) == ["actor/0", "actor/1"]


@pytest.mark.parametrize(
    ("role", "count", "error", "text"),
    [
        ("rollout", 2, WorkerConfigurationError, "wants 2 workers and the launcher started 1"),
        ("ref", 2, WorkerCreationError, "Create the target's workers first"),
    ],
)
def test_attached_job_that_does_not_fit_is_refused(
    scheduler: AttachedScheduler, role: str, count: int, error: Any, text: str
) -> None:
    with pytest.raises(error, match=text):
        scheduler.create_workers(make_job(role, count))


def test_attached_worker_cannot_be_restarted(scheduler: AttachedScheduler) -> None:
    scheduler.create_workers(make_job("actor", 2))
    with pytest.raises(SchedulerError, match="belongs to a launcher"):
        scheduler.restart_worker("actor/1")


def test_attached_close_releases_the_other_ranks_and_ends_the_launch(context: RunContext) -> None:
    key = released_key(context.identity.run_id)
    scheduler = AttachedScheduler(context)
    with pytest.raises(NameEntryNotFoundError):
        name_resolve.get(key)
    scheduler.close()
    assert name_resolve.get(key) == "1"
    assert context.token_path.exists()
    with pytest.raises(SchedulerError, match="one trainer"):
        AttachedScheduler(context)


def test_attached_malformed_worker_counts_name_the_variable(
    context: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AREAL_SPMD_WORKERS", "actor")
    with pytest.raises(ValueError, match="AREAL_SPMD_WORKERS='actor'"):
        AttachedScheduler(context)
    assert context.identity.run_id not in attached._used
