"""One sampled sequence per step, as text, so that every run can be read afterwards.

``samples.jsonl`` in the log directory; the full record of every trajectory is ``rollout.dump_to_file``. Written by the
hooks of an RL run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal.utils import logging
from areal.utils.errors import InfrastructureError

if TYPE_CHECKING:
    from areal.api.trajectory import TrajectoryRef

logger = logging.getLogger("Samples")

FILE_NAME = "samples.jsonl"


class SampleWriter:
    """Appends a line per step.

    Args:
        log_dir: directory of the file.
        tokenizer: decodes; None writes token ids.
    """

    def __init__(self, log_dir: Path, tokenizer: Any) -> None:
        self._path = log_dir / FILE_NAME
        self._tokenizer = tokenizer
        self._warned = False

    def write(self, global_step: int, refs: Sequence[TrajectoryRef]) -> None:
        """Record the first sequence of one trajectory; which one goes round with the steps.

        A file that cannot be written (a full disk) is warned about once and does not end the run, nor does a trajectory
        whose worker has died since it was trained.
        """
        if not refs:
            return
        try:
            line = self._line(global_step, refs[global_step % len(refs)])
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
        except (OSError, InfrastructureError) as exc:
            if not self._warned:
                logger.warning(f"samples cannot be written to {self._path}: {exc}; the run goes on without them")
            self._warned = True

    def _line(self, global_step: int, ref: TrajectoryRef) -> dict[str, Any]:
        ids = ref.data["input_ids"][0][ref.data["attention_mask"][0].bool()].tolist()
        generated = ref.data["loss_mask"][0][ref.data["attention_mask"][0].bool()].bool().tolist()
        start = generated.index(True) if True in generated else len(ids)
        return {
            "global_step": global_step,
            "epoch": ref.row.epoch,
            "row": ref.row.index,
            "versions": [ref.min_version, ref.max_version],
            "group_rewards": list(ref.rewards),
            "prompt": self._decode(ids[:start]),
            "completion": self._decode(ids[start:]),
        }

    def _decode(self, ids: list[int]) -> Any:
        return ids if self._tokenizer is None else self._tokenizer.decode(ids)
