"""The table of cells: to add a scheduler, a backend or a layout, add rows here and a function that runs them."""

from __future__ import annotations

from tests.full.cell import Cell
from tests.full.presets import PAIR_PRESETS, PRESETS

SEEDS = 20
SCHEDULERS = ("local", "ray", "slurm")
# Of samplers: kind, or kind and weight_update_mode. Of trainers: kind and layout.
BACKENDS = ("native-disk", "native-xccl", "vllm", "vllm-xccl", "sglang", "archon-d2", "archon-p2", "megatron-p2")
# Test files that are cells of their own, so that one of them can be run and timed alone.
CHECKPOINT_TESTS = {
    "reshard": "tests/torchrun/test_fsdp_reshard.py",
    "kill-save": "tests/torchrun/test_kill_save.py",
}
OTHER_CELLS = (*CHECKPOINT_TESTS.values(), "tests/chaos/test_chaos_seeds.py")


def build_table(seeds: int = SEEDS) -> list[Cell]:
    """Every cell, in the order they run.

    Args:
        seeds: number of seeded chaos runs, of those that lose processes, and of kill-while-saving runs, each.
    """
    pytest_arguments = [f"--ignore={file}" for file in OTHER_CELLS]
    return [
        Cell("tests/pytest", "tests", "tests.full.suite.run", {"arguments": pytest_arguments}, limit_s=5400),
        *(
            Cell(f"checkpoint/{name}", "checkpoint", "tests.full.suite.run", {"arguments": [file]}, limit_s=1800)
            for name, file in CHECKPOINT_TESTS.items()
        ),
        Cell("accuracy/warm-start", "accuracy", "tests.full.accuracy.run_warm_start", limit_s=600),
        *(
            Cell(f"accuracy/{name}", "accuracy", "tests.full.accuracy.run_preset", {"preset": name}, limit_s=900)
            for name in PRESETS
        ),
        *(
            Cell(f"accuracy/{name}", "accuracy", "tests.full.preference.run", {"preset": name}, limit_s=600)
            for name in PAIR_PRESETS
        ),
        *(
            Cell(f"scheduler/{name}", "scheduler", "tests.full.schedulers.run", {"scheduler": name}, limit_s=1800)
            for name in SCHEDULERS
        ),
        *(
            Cell(f"backend/{name}", "backend", "tests.full.backends.run", {"backend": name}, limit_s=3600)
            for name in BACKENDS
        ),
        *(Cell(f"chaos/{k:02d}", "chaos", "tests.full.chaos.run", {"seed": k}, limit_s=300) for k in range(seeds)),
        *(
            Cell(f"chaos-workers/{k:02d}", "chaos-workers", "tests.chaos.seeds.run", {"seed": k}, limit_s=600)
            for k in range(seeds)
        ),
        *(Cell(f"kill/{k:02d}", "kill", "tests.full.kill.run", {"seed": k}, limit_s=300) for k in range(seeds)),
    ]
