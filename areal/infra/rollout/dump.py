"""Writes finished trajectories as JSON lines, one file per group, without holding up the loop.

``<dir>/{rollout|eval-rollout}/<newest version>/<task id>.jsonl``, one line per sequence: task_id, sample_idx, status,
epoch, row_id, seqlen, prompt_len, head_version, tail_version (oldest and newest version of its trained tokens, -1 if
none), reward, truncated, prompt, completion. The completion starts at the first trained token. Without a tokenizer the
token ids stand in ``prompt_ids`` and ``completion_ids`` instead of the texts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal.api.trajectory import TrajectoryRef
from areal.utils import logging
from areal.utils.fs import get_log_path

if TYPE_CHECKING:
    from areal.api.cli_args import InferenceEngineConfig

logger = logging.getLogger("Rollout")


class TrajectoryDumper:
    """Queues trajectories for one writer thread.

    Args:
        directory: root of the dumps; made when the first trajectory is written.
        tokenizer: anything with ``decode(ids) -> str``; None writes ids.
        scope: sub-directory of the tasks that are not evaluation.
    """

    def __init__(self, directory: str | os.PathLike[str], tokenizer: Any, scope: str = "rollout") -> None:
        self._directory = Path(directory)
        self._tokenizer = tokenizer
        self._scope = scope
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="trajectory-dump")
        self._warned = False

    def write(self, task_id: int, ref: TrajectoryRef, status: str, is_eval: bool) -> None:
        """Queue one group; returns at once."""
        self._writer.submit(self._write, task_id, ref, status, is_eval)

    def close(self) -> None:
        """Write what is queued and stop the thread."""
        self._writer.shutdown(wait=True)

    def _write(self, task_id: int, ref: TrajectoryRef, status: str, is_eval: bool) -> None:
        try:
            folder = self._directory / ("eval-rollout" if is_eval else self._scope) / str(ref.max_version)
            folder.mkdir(parents=True, exist_ok=True)
            lines = [json.dumps(line, ensure_ascii=False) for line in self._lines(task_id, ref, status)]
            (folder / f"{task_id}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        except Exception:  # noqa: BLE001 - a dump that fails must not end the run
            if not self._warned:
                logger.warning(f"trajectories cannot be written under {self._directory}", exc_info=True)
            self._warned = True

    def _lines(self, task_id: int, ref: TrajectoryRef, status: str) -> Iterator[dict[str, Any]]:
        table = ref.data
        for i, length in enumerate(ref.lengths):
            ids = table["input_ids"][i][table["attention_mask"][i].bool()].tolist()
            trained = self._column(table, "loss_mask", i)
            prompt_len = next((k for k, m in enumerate(trained or []) if m), length)
            versions = self._column(table, "versions", i) or []
            drawn = [v for v, m in zip(versions, trained or [], strict=False) if m]
            line: dict[str, Any] = {
                "task_id": task_id,
                "sample_idx": i,
                "status": status,
                "epoch": ref.row.epoch,
                "row_id": ref.row.index,
                "seqlen": length,
                "prompt_len": prompt_len,
                "head_version": min(drawn, default=-1),
                "tail_version": max(drawn, default=-1),
                "reward": ref.rewards[i] if ref.rewards else None,
                "truncated": bool(table["truncated"][i]),
            }
            yield line | self._texts(ids[:prompt_len], ids[prompt_len:])

    def _texts(self, prompt: list[int], completion: list[int]) -> dict[str, Any]:
        if self._tokenizer is None:
            return {"prompt_ids": prompt, "completion_ids": completion}
        decode = self._tokenizer.decode
        return {"prompt": decode(prompt), "completion": decode(completion)}

    @staticmethod
    def _column(table: dict[str, Any], key: str, i: int) -> list[int] | None:
        if key not in table:
            return None
        return table[key][i][table["attention_mask"][i].bool()].tolist()  # type: ignore[no-any-return]


def build_dumper(
    config: InferenceEngineConfig, tokenizer: Any, is_eval: bool, directory: str | os.PathLike[str] | None
) -> TrajectoryDumper | None:
    """The dumper that the settings ask for, or None.

    Raises:
        ValueError: ``rollout.dump_to_file`` is on, but the run's directory is not known.
    """
    if directory is None and config.dump_to_file:
        if not (config.fileroot and config.experiment_name and config.trial_name):
            raise ValueError(
                "rollout.dump_to_file needs rollout.fileroot, experiment_name and trial_name (or dump_dir)"
            )
        directory = get_log_path(config.fileroot, config.experiment_name, config.trial_name)
    if directory is None:
        return None
    return TrajectoryDumper(directory, tokenizer, "eval-rollout" if is_eval else "rollout")
