"""Blocks that every rank leaves the same way; several ranks: ``tests/torchrun/test_fsdp_reshard.py``."""

from __future__ import annotations

import pytest

from areal.utils import ranks
from areal.utils.errors import CheckpointError, DataError


def test_together_success_raises_nothing():
    with ranks.together("saving", CheckpointError):
        pass


def test_together_failure_becomes_the_named_error_with_its_cause():
    with (
        pytest.raises(CheckpointError, match="saving: OSError: disk full") as caught,
        ranks.together("saving", CheckpointError, alone=True),
    ):
        raise OSError("disk full")
    assert isinstance(caught.value.__cause__, OSError)


def test_together_our_own_error_is_kept():
    with pytest.raises(DataError, match="^bad row$"), ranks.together("saving", CheckpointError):
        raise DataError("bad row")


def test_together_failure_elsewhere_is_raised_here(monkeypatch):
    monkeypatch.setattr(ranks, "gather_json", lambda value, group=None: [value, "OSError: disk full"])
    with (
        pytest.raises(CheckpointError, match="saving: rank 1: OSError: disk full"),
        ranks.together("saving", CheckpointError),
    ):
        pass


def test_together_lost_rank_is_a_named_error(monkeypatch):
    def lost(value, group=None):
        raise RuntimeError("connection reset by peer")

    monkeypatch.setattr(ranks, "gather_json", lost)
    with (
        pytest.raises(CheckpointError, match="another rank is gone: connection reset"),
        ranks.together("saving", CheckpointError),
    ):
        pass
    with pytest.raises(CheckpointError, match="disk full"), ranks.together("saving", CheckpointError):
        raise OSError("disk full")
