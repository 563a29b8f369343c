"""The run that is struck: ``python -m tests.chaos.controller ROOT POLICY [key=value ...]``.

A short GRPO run that keeps a diary of its rows (``ROOT/diary.jsonl``) and says what it is doing now
(``ROOT/progress``). Started again with the same command it goes on, in the same diary. Every entry is one write, so a
kill cannot tear it::

    open   step, rows     the run was built and goes on at ``step`` with these books
    end    row, how       a row is about to end
    step   step, rows     a step was trained, and its weights are published
    point  step, rows     the books that the recover point of ``step`` holds, if it is completed
    done   rows           the books at the end
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from areal import PPOTrainer
from areal.api.trajectory import Row
from areal.trainer.hooks import RunHooks
from tests.controller.runs import worker_config
from tests.trainer_runs import WORKFLOW, rl_rows, workflow_kwargs

PROGRESS_BYTES = 64


class Diary:
    """Appends entries; see the module."""

    def __init__(self, root: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT
        self._file = os.open(root / "diary.jsonl", flags | os.O_APPEND, 0o644)
        self._progress = os.open(root / "progress", flags, 0o644)
        self.note("start", pid=os.getpid())
        self.show(None, "start")

    def note(self, event: str, **values: Any) -> None:
        """Write one entry."""
        os.write(self._file, (json.dumps({"event": event, **values}) + "\n").encode())

    def show(self, step: int | None, phase: str) -> None:
        """Say what the run is doing now."""
        text = f"{-1 if step is None else step} {phase}"
        os.pwrite(self._progress, text.ljust(PROGRESS_BYTES).encode(), 0)


def read_progress(root: Path) -> tuple[int, str]:
    """Step and phase that the run is in; step -1 before the first."""
    try:
        step, phase = (root / "progress").read_text().split()
    except (FileNotFoundError, ValueError):
        return -1, ""
    return int(step), phase


class DiaryTrainer(PPOTrainer):
    """Keeps the diary; built again (a train worker was lost) it goes on in it."""

    diary: Diary

    def _open(self) -> None:
        super()._open()
        executor = self.rollout.executor
        end, state_dict = executor.ledger.end, executor.state_dict

        def noted_end(row: Row, how: Any) -> None:
            self.diary.note("end", row=[row.epoch, row.position, row.index], how=how)
            end(row, how)

        def noted_state() -> dict[str, Any]:
            state: dict[str, Any] = state_dict()
            self.diary.note("point", step=self.hooks.global_step, rows=state["rows"])
            return state

        executor.ledger.end, executor.state_dict = noted_end, noted_state
        self.diary.note("open", step=self.start_step, rows=executor.ledger.state_dict())

    def _train_step(self, step: Any, *args: Any) -> Any:
        refs = super()._train_step(step, *args)
        rows = [[ref.row.epoch, ref.row.position, ref.row.index] for ref in refs]
        self.diary.note("step", step=step.global_step, rows=rows)
        return refs


def keep_progress(diary: Diary) -> None:
    """Have every phase of the run shown in its progress file."""
    original = RunHooks.show_phase

    def show_phase(self: RunHooks, name: str) -> None:
        diary.show(self.global_step, name)
        original(self, name)

    RunHooks.show_phase = show_phase  # type: ignore[method-assign]


def accept(table: dict[str, Any]) -> bool:
    """The filter of runs that have one: every fifth row is refused."""
    return int(table["row_id"][0]) % 5 != 0


def main(argv: list[str]) -> None:
    """Run to the end."""
    root, policy, *overrides = argv
    filtering = "filter=on" in overrides
    config = worker_config(Path(root), policy, *(item for item in overrides if not item.startswith("filter=")))
    DiaryTrainer.diary = Diary(Path(root))
    keep_progress(DiaryTrainer.diary)
    with DiaryTrainer(config, train_dataset=rl_rows(config)) as trainer:
        trainer.train(
            workflow=WORKFLOW,
            workflow_kwargs=workflow_kwargs(config),
            dynamic_filter_fn="tests.chaos.controller.accept" if filtering else None,
        )
        trainer.diary.note("done", rows=trainer.rollout.executor.ledger.state_dict())


if __name__ == "__main__":
    main(sys.argv[1:])
