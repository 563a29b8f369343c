"""What a chaos cell may inject, what each fault must count as, and the book of what was injected.

A fault is drawn per sample from (seed, epoch, row, sample): a row that is generated again meets the same faults, except
those that happen once.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field

OK = "ok"
# Fault -> the reason under which its sample is dropped; OK: the sample must survive it.
FAULTS = {
    "reward-raises": "reward",
    "reward-raises-strangely": "reward",
    "reward-none": "reward",
    "reward-nan": "reward",
    "reward-infinite": "reward",
    "reward-text": "reward",
    "reward-list": "reward",
    "reward-hangs": "reward",
    "reward-hangs-with-child": "reward",
    "reward-exits": "reward",
    "reward-killed": "reward",
    "reward-flaky": OK,
    "workflow-raises": "error",
    "workflow-exits": "error",
    "workflow-returns-none": "none",
    "workflow-returns-text": "error",
    "workflow-forgets-a-column": "error",
    "workflow-returns-nan-reward": "reward",
    "workflow-is-slow": OK,
    "workflow-hangs": "timeout",
    "workflow-ignores-cancellation": "timeout",
    "prompt-is-malformed": "error",
    "prompt-is-too-long": "error",
    "prompt-is-out-of-vocabulary": "error",
    "generation-is-aborted": "error",
    "connection-is-lost": "lost",
}
ONCE = ("connection-is-lost",)  # its group is generated again until it works
# Faults that take seconds: at most this many samples of a run meet them.
BUDGET = {
    "reward-hangs": 3,
    "reward-hangs-with-child": 2,
    "workflow-hangs": 1,
    "workflow-ignores-cancellation": 1,
    "reward-exits": 4,
    "reward-killed": 4,
    "connection-is-lost": 4,
}


@dataclass(frozen=True)
class Attempt:
    """Sample ``sample`` of the ``number``-th time that task ``task`` (row ``row`` of the data) ran."""

    task: int
    row: int
    sample: int
    number: int


class FaultPlan:
    """Draws faults and books how each attempt should end. Used in the rollout thread only.

    Args:
        seed: of the cell.
        faults: those that may happen.
        share: of samples that meet one.
        bad_rows: share of rows whose workflow raises for every sample.
    """

    def __init__(self, seed: int, faults: list[str], share: float, bad_rows: float) -> None:
        self._seed, self._faults, self._share, self._bad_rows = seed, faults, share, bad_rows
        self._spent: Counter[str] = Counter()
        self._calls: Counter[tuple[int, int]] = Counter()
        self._met: set[tuple[int, ...]] = set()
        self.outcomes: dict[Attempt, str] = {}
        self.injected: Counter[str] = Counter()
        self.surprises: list[str] = []

    def begin(self, task: int, row: int, sample: int) -> Attempt:
        """A sample starts; until told otherwise it ends well."""
        self._calls[task, sample] += 1
        attempt = Attempt(task, row, sample, self._calls[task, sample])
        self.outcomes[attempt] = OK
        return attempt

    def draw(self, epoch: int, row: int, sample: int) -> str:
        """The fault of a sample, or an empty string."""
        if random.Random(f"{self._seed}/{epoch}/{row}").random() < self._bad_rows:
            return "workflow-raises"
        rng = random.Random(f"{self._seed}/{epoch}/{row}/{sample}")
        if not self._faults or rng.random() >= self._share:
            return ""
        fault = rng.choice(self._faults)
        if fault in ONCE and (epoch, row, sample) in self._met:
            return ""
        self._met.add((epoch, row, sample))
        if self._spent[fault] >= BUDGET.get(fault, 10**9):
            return ""
        self._spent[fault] += 1
        return fault

    def inject(self, attempt: Attempt, fault: str) -> None:
        """``fault`` happens now."""
        self.injected[fault] += 1
        self.outcomes[attempt] = FAULTS[fault]


@dataclass
class Expected:
    """What the books of a run must say, from the outcomes of its samples."""

    dropped: Counter[str] = field(default_factory=Counter)
    groups: Counter[str] = field(default_factory=Counter)  # accepted, filtered, failed, lost, retried
    ended: Counter[str] = field(default_factory=Counter)  # rows: filtered, failed


def expected_counts(plan: FaultPlan, refuses: set[int], raises: set[int], max_row_retries: int) -> Expected:
    """Replay the executor's rules over the outcomes of every sample.

    Args:
        plan: after the run.
        refuses: rows that the filter refuses.
        raises: rows for which the filter raises.
        max_row_retries: as configured.
    """
    expected = Expected()
    samples: dict[tuple[int, int], list[str]] = defaultdict(list)
    rows: dict[int, int] = {}
    for attempt, outcome in plan.outcomes.items():
        samples[attempt.task, attempt.number].append(outcome)
        rows[attempt.task] = attempt.row
        if outcome != OK:
            expected.dropped[outcome] += 1
    failures: Counter[int] = Counter()
    for (task, _), outcomes in sorted(samples.items()):
        status = group_status(outcomes, rows[task], refuses, raises)
        expected.groups[status] += 1
        if status == "filtered":
            expected.ended["filtered"] += 1
        elif status == "failed":
            failures[task] += 1
            again = failures[task] <= max_row_retries
            expected.groups["retried"] += again
            expected.ended["failed"] += not again
    return expected


def group_status(outcomes: list[str], row: int, refuses: set[int], raises: set[int]) -> str:
    """How a group ends whose samples ended as ``outcomes``."""
    if "lost" in outcomes:
        return "lost"
    if OK not in outcomes:
        return "filtered" if set(outcomes) == {"none"} else "failed"
    if row in raises:
        return "failed"
    return "filtered" if row in refuses else "accepted"
