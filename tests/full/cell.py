"""One cell of the nightly tier: what it is called, the function that runs it, and what that function is given.

A cell's function is ``run(context, **args) -> None``. It fills ``context.facts`` and calls ``context.expect`` for each
thing that must hold, so that a summary shows every violation and not the first one only. Exceptions fail the cell too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Cell:
    """A row of the table.

    Attributes:
        name: ``<kind>/<what>``, unique.
        kind: what ``--kinds`` selects by.
        function: import string of the function that runs it; only the cell's own process imports it.
        args: keyword arguments of that function.
        limit_s: wall seconds after which the cell's process is killed and the cell has failed.
    """

    name: str
    kind: str
    function: str
    args: Mapping[str, Any] = field(default_factory=dict)
    limit_s: float = 300.0


@dataclass
class CellContext:
    """What a cell's function works with.

    Attributes:
        work: empty directory of this cell.
        shared: directory of what several cells use, such as the warm start; made by the first that needs it.
        facts: numbers and names for the summary.
        failures: what did not hold.
    """

    work: Path
    shared: Path
    facts: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def expect(self, holds: bool, otherwise: str) -> bool:
        """Note ``otherwise`` as a failure unless ``holds``; returns ``holds``."""
        if not holds:
            self.failures.append(otherwise)
        return holds
