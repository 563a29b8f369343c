"""``StatsLogger``: the trainer commits each step's statistics once; this class spreads them. Only rank 0 acts."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from areal.utils import fs, logging
from areal.utils.errors import ConfigError
from areal.utils.ranks import is_first_rank
from areal.utils.stats_logger.backends import Tracker, build_trackers, close_all
from areal.utils.stats_logger.jsonl import FILE_NAME, StatsFile
from areal.utils.stats_reduction import COUNT_SUFFIX

if TYPE_CHECKING:
    from areal.api.io_struct import FinetuneSpec

logger = logging.getLogger("StatsLogger")
_TABLE_COLUMNS = 4


class StatsLogger:
    """Writes the statistics of a run to ``stats.jsonl``, TensorBoard, the log and the configured trackers.

    Args:
        config: the whole experiment config (its ``stats_logger`` section is read, all of it is attached to trackers).
        ft_spec: length of the run, for the progress line.
        table: log a line and a table of every commit; off while a console shows the main numbers.

    Raises:
        ValueError: ``config`` is the ``stats_logger`` section itself, or a path part is missing.
    """

    def __init__(self, config: Any, ft_spec: FinetuneSpec, *, table: bool = True) -> None:
        if not hasattr(config, "stats_logger"):
            raise ConfigError(
                f"StatsLogger takes the whole experiment config, not {type(config).__name__}: pass config, "
                "not config.stats_logger"
            )
        self.ft_spec = ft_spec
        self.table = table
        self._last_commit_step = -1
        self._start = time.monotonic()
        self._closed = False
        self._trackers: list[Tracker] = []
        self._file: StatsFile | None = None
        if is_first_rank():
            self.log_dir = fs.get_log_path(*_path_parts(config.stats_logger))
            self._file = StatsFile(self.log_dir / FILE_NAME)
            self._trackers = build_trackers(config.stats_logger, config, self.log_dir)

    def commit(
        self, epoch: int, step: int, global_step: int, data: Mapping[str, float] | Sequence[Mapping[str, float]]
    ) -> None:
        """Record one step.

        Args:
            epoch: from 0.
            step: within the epoch, from 0.
            global_step: of the run, from 0.
            data: statistics of the step, or of its parts (recorded at following log steps). ``*__count`` is left out.
        """
        if self._file is None:
            return
        parts = [data] if isinstance(data, Mapping) else list(data)
        first = max(global_step, self._last_commit_step + 1)
        if self.table:
            self._log_progress(epoch, step, global_step)
        for offset, part in enumerate(parts):
            stats = {key: float(value) for key, value in part.items() if not key.endswith(COUNT_SUFFIX)}
            log_step = first + offset
            where = {"epoch": epoch, "step": step, "global_step": global_step, "log_step": log_step}
            self._file.write({**where, "time": time.time(), "stats": stats})
            for tracker in self._trackers:
                tracker.log(log_step, stats)
            if self.table and stats:
                logger.info("step %d\n%s", log_step, tabulate_stats(stats))
        self._last_commit_step = first + max(len(parts), 1) - 1

    def state_dict(self) -> dict[str, int]:
        """``{"last_commit_step"}``."""
        return {"last_commit_step": self._last_commit_step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue after ``state["last_commit_step"]``."""
        self._last_commit_step = int(state["last_commit_step"])

    def resume_after(self, global_step: int) -> None:
        """Undo what ``stats.jsonl`` says about steps later than ``global_step``, the last one that still counts."""
        if self._file is not None and (n_cut := self._file.cut_after(global_step)):
            logger.info("cut %d rows after step %d from %s: those steps run again", n_cut, global_step, FILE_NAME)

    def close(self) -> None:
        """Flush and close every destination; safe to call twice."""
        if self._file is None or self._closed:
            return
        self._closed = True
        close_all(self._trackers)
        logger.info("training took %.1f s", time.monotonic() - self._start)

    @staticmethod
    def get_log_path(
        config: Any = None,
        experiment_name: str | None = None,
        trial_name: str | None = None,
        fileroot: str | None = None,
    ) -> str:
        """Log directory of a trial, created; from any section with the three names, or from the names themselves.

        Raises:
            ValueError: one of experiment_name, trial_name, fileroot is missing.
        """
        if isinstance(config, str):  # get_log_path(experiment_name, trial_name, fileroot)
            config, experiment_name, trial_name, fileroot = None, config, experiment_name, trial_name
        if config is not None:
            section = getattr(config, "stats_logger", config)
            return os.fspath(fs.get_log_path(*_path_parts(section)))
        return os.fspath(fs.get_log_path(fileroot or "", experiment_name or "", trial_name or ""))

    def _log_progress(self, epoch: int, step: int, global_step: int) -> None:
        spec = self.ft_spec
        logger.info(
            "epoch %d/%d, step %d/%d, train step %d/%d done",
            epoch + 1,
            spec.total_train_epochs,
            step + 1,
            spec.steps_per_epoch,
            global_step + 1,
            spec.total_train_steps,
        )


def tabulate_stats(data: Mapping[str, float], num_cols: int = _TABLE_COLUMNS, floatfmt: str = ".4e") -> str:
    """``key value`` cells in ``num_cols`` columns, filled from top to bottom, as aligned text."""
    cells = [(key, format(value, floatfmt)) for key, value in data.items()]
    if not cells:
        return ""
    n_rows = math.ceil(len(cells) / num_cols)
    columns = [cells[start : start + n_rows] for start in range(0, len(cells), n_rows)]
    widths = [(max(len(key) for key, _ in column), max(len(text) for _, text in column)) for column in columns]
    lines = []
    for row in range(n_rows):
        parts = [
            f"{column[row][0]:<{key_width}}  {column[row][1]:>{text_width}}"
            for column, (key_width, text_width) in zip(columns, widths, strict=True)
            if row < len(column)
        ]
        lines.append(" | ".join(parts))
    return "\n".join(lines)


def _path_parts(section: Any) -> tuple[str, str, str]:
    return section.fileroot, section.experiment_name, section.trial_name
