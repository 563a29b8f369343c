"""Capacity, the choice of a step's groups, and the bound they enforce together."""

from __future__ import annotations

import heapq
import json
import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.infra.rollout.staleness import StalenessManager, select_groups

VECTOR = json.loads((Path(__file__).parent / "vectors" / "staleness_capacity.json").read_text())


class Version:
    def __init__(self, value: int = 0) -> None:
        self.value = value

    def get_version(self) -> int:
        return self.value


def manager_at(mcr: int, bs: int, m: int, version: int, running: int, accepted: int) -> StalenessManager:
    manager = StalenessManager(Version(version), mcr, bs, m)
    for _ in range(accepted):
        manager.on_rollout_submitted()
        manager.on_rollout_accepted()
    for _ in range(running):
        manager.on_rollout_submitted()
    return manager


@pytest.mark.parametrize(
    ("mcr", "bs", "m", "version", "running", "accepted", "capacity"),
    [
        (10, 4, 2, 0, 0, 0, 10),
        (100, 32, 10, 0, 0, 0, 100),
        (100, 4, 2, 0, 0, 0, 12),
        (1000, 4, 2, 3, 0, 0, 24),
        (5, 2, 10, 0, 3, 0, 2),
        (100, 4, 0, 0, 4, 0, 0),
        (100, 4, 0, 1, 0, 4, 4),
    ],
)
def test_capacity_public_table_matches(mcr, bs, m, version, running, accepted, capacity):
    assert manager_at(mcr, bs, m, version, running, accepted).get_capacity() == capacity


def test_capacity_vector_matches():
    pairs = VECTOR["inputs"]["accepted_running"]
    managers = [manager_at(10, 4, 2, 3, running, accepted) for accepted, running in pairs]
    assert [m.get_capacity() for m in managers] == VECTOR["outputs"]["capacity"]
    assert managers[0].get_pending_limit() == VECTOR["outputs"]["pending_limit"]


@pytest.mark.parametrize("reported", [False, True])
def test_capacity_after_recovery_is_not_inflated_by_the_version_jump(reported):
    version = Version()
    manager = StalenessManager(version, 1000, 8, 2)
    if reported:
        manager.on_rollout_consumed(0)
    version.value = 50
    manager.on_version_recovered(50)
    assert manager.get_capacity() == 24


def test_capacity_with_reported_consumption_is_our_bound():
    manager = StalenessManager(Version(3), 100, 4, 1)
    manager.on_rollout_consumed(0)
    for _ in range(6):
        manager.on_rollout_submitted()
    for _ in range(3):
        manager.on_rollout_accepted()
    assert manager.get_capacity() == 8 - 3 - 3  # (eta + 1) * batch - running - (ready + in step)
    manager.on_rollout_consumed(2)
    assert manager.get_capacity() == 4
    manager.on_rollout_rejected()
    assert manager.get_capacity() == 5


def test_capacity_short_steps_count_with_their_own_size():
    manager = StalenessManager(Version(0), 100, 4, 1, step_size=lambda step: (4, 1)[step % 2])
    manager.on_rollout_consumed(0)
    assert manager.get_capacity() == 5


def test_get_stats_returns_a_copy():
    manager = manager_at(4, 2, 1, 0, 1, 1)
    stats = manager.get_stats()
    stats.accepted = 99
    assert manager.get_stats().accepted == 1
    assert (manager.get_stats().running, manager.get_stats().enqueued) == (1, -2)


def test_select_groups_takes_the_oldest_in_start_order():
    ready = [(5, 1), (2, 0), (4, 1), (3, 0)]
    assert select_groups(ready, {}, 1, 1, lambda _: 2) == [1, 3]


def test_select_groups_holds_the_step_for_a_group_due_now():
    ready = [(i, 1) for i in range(4, 8)]
    assert select_groups(ready, {0: 1}, 1, 1, lambda _: 4) is None


def test_select_groups_lets_a_straggler_be_overtaken_while_there_is_room_later():
    ready = [(i, 1) for i in range(4, 8)]
    assert select_groups(ready, {0: 1}, 1, 2, lambda _: 4) == [0, 1, 2, 3]
    # eight groups due by version 2 cannot all fit into step 2 of four rows
    assert select_groups(ready, {0: 8}, 1, 2, lambda _: 4) is None


class Simulation:
    """Discrete events: groups with heavy-tailed durations, a trainer that takes one second per step."""

    def __init__(self, eta: int, batch: int, seed: int, *, reject: float = 0.0, sizes=None, hold: bool = True) -> None:
        self.eta, self.batch, self.reject, self.hold = eta, batch, reject, hold
        self.rng = random.Random(seed)
        self.version = Version()
        self.manager = StalenessManager(self.version, 10**6, batch, eta, step_size=sizes)
        self.manager.on_rollout_consumed(0)
        self.now = 0.0
        self.events: list[tuple[float, int, int]] = []
        self.running: Counter[int] = Counter()
        self.ready: list[tuple[int, int]] = []
        self.sequence = 0
        self.lags: list[int] = []

    def start(self) -> None:
        while self.manager.get_capacity() > 0:
            self.manager.on_rollout_submitted()
            duration = min(0.3 * self.rng.paretovariate(1.1), 60.0)
            heapq.heappush(self.events, (self.now + duration, self.sequence, self.version.value))
            self.running[self.version.value] += 1
            self.sequence += 1

    def advance(self, until: float) -> None:
        while self.events and self.events[0][0] <= until:
            self.now, sequence, started = heapq.heappop(self.events)
            self.running[started] -= 1
            if self.rng.random() < self.reject:
                self.manager.on_rollout_rejected()
            else:
                self.manager.on_rollout_accepted()
                self.ready.append((sequence, started))
            self.start()
        self.now = max(self.now, until)

    def step(self) -> None:
        version, size = self.version.value, self.manager.rows_of(self.version.value)
        self.start()
        while True:
            running = {v: n for v, n in self.running.items() if n} if self.hold else {}
            chosen = select_groups(self.ready, running, version, self.eta, self.manager.rows_of)
            if chosen is not None:
                break
            self.advance(self.events[0][0])
        self.lags += [version - self.ready[i][1] for i in chosen]
        self.ready = [item for i, item in enumerate(self.ready) if i not in set(chosen)]
        self.advance(self.now + 1.0)
        self.version.value += 1
        self.manager.on_rollout_consumed(size)
        self.start()


@pytest.mark.parametrize("eta", [0, 1, 4])
def test_simulated_run_no_sample_exceeds_the_bound(eta):
    simulation = Simulation(eta, 16, seed=eta)
    for _ in range(300):
        simulation.step()
    assert len(simulation.lags) == 300 * 16
    assert max(simulation.lags) <= eta
    assert simulation.manager.get_stats().running == sum(simulation.running.values())


def test_simulated_run_capacity_alone_does_not_keep_the_bound():
    simulation = Simulation(1, 16, seed=1, hold=False)
    for _ in range(300):
        simulation.step()
    assert max(simulation.lags) > 1


def test_simulated_run_is_faster_with_more_staleness():
    times = []
    for eta in (0, 1, 4):
        simulation = Simulation(eta, 16, seed=7)
        for _ in range(300):
            simulation.step()
        times.append(simulation.now)
    assert times[0] / times[1] > 1.2
    assert times[0] / times[2] > 1.5


@settings(max_examples=60, deadline=None)
@given(
    eta=st.integers(0, 5),
    batch=st.integers(1, 9),
    seed=st.integers(0, 10**6),
    reject=st.sampled_from([0.0, 0.2, 0.6]),
    tail=st.integers(0, 8),
)
def test_simulated_run_any_sequence_keeps_the_bound(eta, batch, seed, reject, tail):
    short = min(tail, batch) or batch  # every third step is a short last step of an epoch
    simulation = Simulation(eta, batch, seed, reject=reject, sizes=lambda step: short if step % 3 == 2 else batch)
    for _ in range(25):
        simulation.step()
    assert max(simulation.lags) <= eta
    stats = simulation.manager.get_stats()
    assert stats.running + stats.accepted + stats.rejected == simulation.sequence
