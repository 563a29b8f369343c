"""The sample of each step: what is written, and that a full disk does not end a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from areal.api.trajectory import Row, TrajectoryRef
from areal.trainer.samples import FILE_NAME, SampleWriter


def _ref(index: int) -> TrajectoryRef:
    table = {
        "input_ids": torch.tensor([[5, 6, 7, 0]]),
        "attention_mask": torch.tensor([[True, True, True, False]]),
        "loss_mask": torch.tensor([[0, 1, 1, 0]]),
    }
    row = Row(epoch=0, position=index, index=index)
    return TrajectoryRef(row, index, (3,), (1.0,), min_version=2, max_version=3, data=table)


def test_write_splits_prompt_and_completion_and_goes_round(tmp_path: Path) -> None:
    writer = SampleWriter(tmp_path, None)

    for step in (0, 1):
        writer.write(step, [_ref(10), _ref(11)])

    lines = [json.loads(line) for line in (tmp_path / FILE_NAME).read_text().splitlines()]
    assert [line["row"] for line in lines] == [10, 11]
    assert (lines[0]["prompt"], lines[0]["completion"], lines[0]["versions"]) == ([5], [6, 7], [2, 3])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full to stand for a full disk")
def test_write_to_a_full_disk_warns_once_and_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / FILE_NAME).symlink_to("/dev/full")
    writer = SampleWriter(tmp_path, None)

    for step in range(3):
        writer.write(step, [_ref(0)])

    assert sum("samples cannot be written" in record.getMessage() for record in caplog.records) == 1
