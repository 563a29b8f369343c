"""The table of cells: to add a scheduler, a backend or a layout, add rows here and a function that runs them."""

from __future__ import annotations

from tests.full.cell import Cell
from tests.full.presets import PRESETS

SEEDS = 20


def build_table(seeds: int = SEEDS) -> list[Cell]:
    """Every cell, in the order they run.

    Args:
        seeds: number of seeded chaos runs and of kill-while-saving runs, each.
    """
    return [
        Cell("tests/pytest", "tests", "tests.full.suite.run", limit_s=5400),
        Cell("accuracy/warm-start", "accuracy", "tests.full.accuracy.run_warm_start", limit_s=600),
        *(
            Cell(f"accuracy/{name}", "accuracy", "tests.full.accuracy.run_preset", {"preset": name}, limit_s=900)
            for name in PRESETS
        ),
        *(Cell(f"chaos/{k:02d}", "chaos", "tests.full.chaos.run", {"seed": k}, limit_s=300) for k in range(seeds)),
        *(Cell(f"kill/{k:02d}", "kill", "tests.full.kill.run", {"seed": k}, limit_s=300) for k in range(seeds)),
    ]
