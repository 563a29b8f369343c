"""Checks the diary of a run: along the lineage of recover points, every dispensed row has exactly one end."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Key = tuple[int, int]  # epoch and position of a row


@dataclass
class Lineage:
    """What counts in a diary: steps that a restart undid are gone.

    Attributes:
        steps: trained rows by step.
        ends: how each row ended.
        opened: steps at which the run went on, in order.
        finished: books at the end; None if it did not come to that.
        problems: what does not add up.
    """

    steps: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)
    ends: dict[Key, str] = field(default_factory=dict)
    opened: list[int] = field(default_factory=list)
    finished: dict[str, Any] | None = None
    problems: list[str] = field(default_factory=list)

    def trained(self) -> Counter[tuple[int, int]]:
        """Multiset of the trained rows, as (epoch, index)."""
        return Counter((epoch, index) for rows in self.steps.values() for epoch, _, index in rows)


def read_diary(path: Path) -> list[dict[str, Any]]:
    """The entries, oldest first."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def follow(entries: list[dict[str, Any]], rows_per_epoch: int) -> Lineage:
    """The lineage of a diary, with everything that is wrong with it."""
    found = Lineage()
    points: dict[int, dict[str, Any]] = {}
    for entry in entries:
        match entry["event"]:
            case "open":
                _go_back(found, entry["step"], entry["rows"], points.get(entry["step"] - 1), rows_per_epoch)
            case "end":
                epoch, position, _ = entry["row"]
                if (before := found.ends.get((epoch, position))) is not None:
                    found.problems.append(f"row {entry['row']} ended as {before}, and again as {entry['how']}")
                found.ends[epoch, position] = entry["how"]
            case "step":
                if entry["step"] in found.steps:
                    found.problems.append(f"step {entry['step']} was trained twice without a restart between")
                found.steps[entry["step"]] = [(e, p, i) for e, p, i in entry["rows"]]
            case "point":
                points[entry["step"]] = entry["rows"]
            case "done":
                found.finished = entry["rows"]
    _close(found, rows_per_epoch)
    return found


def _go_back(
    found: Lineage, step: int, books: dict[str, Any], point: dict[str, Any] | None, rows_per_epoch: int
) -> None:
    """A (re)start at ``step`` with ``books``: whatever came after its recover point did not happen."""
    found.opened.append(step)
    if step == 0:
        if _dispensed(books, rows_per_epoch) or books["open_rows"]:
            found.problems.append(f"a fresh start has books: {books}")
        found.steps, found.ends = {}, {}
        return
    if books != point:
        found.problems.append(f"resumed at step {step} with the books {books}; the recover point was given {point}")
    found.steps = {k: rows for k, rows in found.steps.items() if k < step}
    ended = _dispensed(books, rows_per_epoch) - {(epoch, position) for epoch, position, _ in books["open_rows"]}
    if unknown := ended - found.ends.keys():
        found.problems.append(f"the recover point of step {step - 1} has rows ended that never did: {sorted(unknown)}")
    found.ends = {key: how for key, how in found.ends.items() if key in ended}
    _compare_counts(found, books, f"in the recover point of step {step - 1}")


def _close(found: Lineage, rows_per_epoch: int) -> None:
    """The end of the run: no row is open, every dispensed one has its end, and every trained one is in a step."""
    if found.finished is None:
        found.problems.append("the diary has no end")
        return
    dispensed = _dispensed(found.finished, rows_per_epoch)
    if found.finished["open_rows"]:
        found.problems.append(f"rows without an end: {found.finished['open_rows']}")
    if dispensed != found.ends.keys():
        found.problems.append(f"dispensed, not ended or the reverse: {sorted(dispensed ^ found.ends.keys())}")
    _compare_counts(found, found.finished, "at the end")
    in_steps = Counter((epoch, position) for rows in found.steps.values() for epoch, position, _ in rows)
    trained = Counter(key for key, how in found.ends.items() if how == "trained")
    if in_steps != trained:
        found.problems.append(f"rows of steps {sorted(in_steps - trained)}, rows that ended as trained otherwise")


def _compare_counts(found: Lineage, books: dict[str, Any], when: str) -> None:
    counted = Counter(found.ends.values())
    if {how: counted[how] for how in books["counts"]} != books["counts"]:
        found.problems.append(f"{when}, rows ended as {dict(counted)}; the books say {books['counts']}")


def _dispensed(books: dict[str, Any], rows_per_epoch: int) -> set[Key]:
    """Rows before the cursor."""
    epoch, position = books["cursor"]["epoch"], books["cursor"]["position"]
    return {(e, p) for e in range(epoch) for p in range(rows_per_epoch)} | {(epoch, p) for p in range(position)}
