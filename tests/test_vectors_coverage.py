"""Every vector file is loaded by a test, or waits for the issue that builds its feature."""

from __future__ import annotations

import re
from pathlib import Path

from tests.vector_files import VECTOR_DIR, load_vector

# Vector -> topic of the later issue that brings the feature.
WAITING = {
    "reward_discount": "agents",
}


def _vector_names() -> set[str]:
    return {path.stem for path in VECTOR_DIR.glob("*.json")} - {"INDEX"}


def test_vectors_every_file_is_loaded_or_waits_for_a_named_issue():
    here = Path(__file__)
    sources = "\n".join(p.read_text() for p in here.parent.rglob("test_*.py") if p != here)

    loaded = {name for name in _vector_names() if re.search(rf"\b{name}\b", sources)}

    assert _vector_names() - loaded - WAITING.keys() == set()


def test_vectors_waiting_list_names_existing_files_only():
    assert WAITING.keys() <= _vector_names()


def test_vectors_every_indexed_file_exists():
    index = load_vector("INDEX")

    assert {entry["id"] for entry in index} - _vector_names() == set()
