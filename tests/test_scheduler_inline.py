"""The inline scheduler: hosts objects in this process, one rank per role."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from areal.api.scheduler_api import Job
from areal.infra.scheduler.inline import InlineScheduler
from areal.utils.errors import EngineError


class Hosted:
    """Notes its end in a list."""

    def __init__(self, name: str, ends: list[str] | None = None) -> None:
        self.name, self.ends = name, ends if ends is not None else []

    def greet(self, whom: str, mark: str = ".") -> str:
        return f"{self.name} greets {whom}{mark}"

    def destroy(self) -> None:
        self.ends.append(self.name)


@pytest.fixture
def scheduler() -> InlineScheduler:
    made = InlineScheduler()
    made.create_workers(Job(role="actor", replicas=1, tasks=[]))
    return made


def test_workers_of_a_role_is_one_rank_here(scheduler: InlineScheduler) -> None:
    (worker,) = scheduler.get_workers("actor")
    assert worker.id == "actor/0"
    assert worker.ip == "127.0.0.1"


def test_second_creation_of_a_role_is_refused(scheduler: InlineScheduler) -> None:
    with pytest.raises(EngineError, match="'actor' has workers already"):
        scheduler.create_workers(Job(role="actor", replicas=1, tasks=[]))


def test_several_replicas_are_refused_naming_the_scheduler_for_them() -> None:
    with pytest.raises(EngineError, match="scheduler.type=local"):
        InlineScheduler().create_workers(Job(role="actor", replicas=2, tasks=[]))


def test_unknown_worker_or_object_is_named(scheduler: InlineScheduler) -> None:
    with pytest.raises(EngineError, match="critic/0"):
        scheduler.get_workers("critic")
    with pytest.raises(EngineError, match="actor/1"):
        scheduler.host("actor/1", Hosted("x"))
    with pytest.raises(EngineError, match="no object 'actor/0'"):
        scheduler.call_engine("actor/0", "greet", "you")


def test_two_objects_of_a_worker_are_called_by_name(scheduler: InlineScheduler) -> None:
    scheduler.host("actor/0", Hosted("role"))
    scheduler.host("actor/0", Hosted("engine"), "actor/0.engine")
    assert scheduler.call_engine("actor/0", "greet", "you") == "role greets you."
    found = asyncio.run(scheduler.async_call_engine("actor/0", "greet", "you", mark="!", engine_name="actor/0.engine"))
    assert found == "engine greets you!"


@pytest.mark.parametrize("given", [Hosted, "tests.test_scheduler_inline.Hosted"])
def test_create_engine_takes_a_class_or_an_import_string(scheduler: InlineScheduler, given: Any) -> None:
    made = asyncio.run(scheduler.create_engine("actor/0", given, "made"))
    assert scheduler.call_engine("actor/0", "greet", "me") == "made greets me."
    assert type(made).__name__ == "Hosted"


def test_delete_workers_destroys_newest_first_and_twice_is_fine(scheduler: InlineScheduler) -> None:
    ends: list[str] = []
    scheduler.host("actor/0", Hosted("engine", ends), "actor/0.engine")
    scheduler.host("actor/0", Hosted("role", ends))
    scheduler.create_workers(Job(role="rollout", replicas=1, tasks=[]))
    scheduler.host("rollout/0", Hosted("sampler", ends))
    scheduler.delete_workers()
    scheduler.delete_workers()
    assert ends == ["sampler", "role", "engine"]


def test_delete_workers_of_one_role_leaves_the_others(scheduler: InlineScheduler) -> None:
    scheduler.create_workers(Job(role="ref", replicas=1, tasks=[]))
    scheduler.delete_workers("actor")
    assert scheduler.get_workers("ref")
    with pytest.raises(EngineError):
        scheduler.get_workers("actor")
