"""The manifest: what it holds, what changes its hashes, and that secrets stay out."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from areal.utils import manifest
from areal.utils.version import get_version_info, pkg_version


@dataclass
class Inner:
    """A section with secrets."""

    api_key: str = "hush"
    marked: str = field(default="hush", metadata={"secret": True})
    tokenizer_path: str = "plain"
    max_new_tokens: int = 5


@dataclass
class Config:
    """A small experiment config."""

    seed: int = 3
    lr: float = 1e-3
    inner: Inner = field(default_factory=Inner)
    headers: dict = field(default_factory=lambda: {"token": "hush"})


def test_build_manifest_is_json_with_versions_seeds_and_fingerprints(tmp_path):
    built = manifest.build_manifest(Config(), datasets={"train": [{"q": i} for i in range(5)], "valid": None})
    manifest.write_manifest(tmp_path, built, global_step=7)

    stored = json.loads((tmp_path / "manifest.json").read_text())

    assert stored["format"] == manifest.FORMAT
    assert stored["seeds"] == {"run": 3}
    assert stored["datasets"]["train"]["rows"] == 5
    assert list(stored["datasets"]) == ["train"]
    assert stored["libraries"]["torch"].startswith("2.")
    assert stored["areal"]["version"] == get_version_info().version
    assert stored["global_step"] == 7


def test_masked_config_hides_secrets_only():
    masked = manifest.masked_config(Config())
    assert "hush" not in json.dumps(masked)
    assert masked["inner"] == {"api_key": "***", "marked": "***", "tokenizer_path": "plain", "max_new_tokens": 5}


def test_config_hash_changes_with_a_setting_but_not_with_a_secret():
    base = manifest.config_hash(Config())
    assert manifest.config_hash(Config(lr=2e-3)) != base
    assert manifest.config_hash(Config(inner=Inner(api_key="other"))) == base


def test_dataset_fingerprint_sees_rows_and_length():
    rows = [{"q": str(i), "raw": bytes([i])} for i in range(200)]
    base = manifest.dataset_fingerprint(rows)
    assert manifest.dataset_fingerprint(list(rows)) == base
    assert manifest.dataset_fingerprint(rows[:-1]) != base
    assert manifest.dataset_fingerprint([{**rows[0], "q": "x"}, *rows[1:]]) != base


def test_dataset_fingerprint_of_objects_has_no_addresses():
    assert manifest.dataset_fingerprint([{"x": object()}]) == manifest.dataset_fingerprint([{"x": object()}])


def test_pkg_version_of_a_missing_package_is_none():
    assert pkg_version("no-such-package-of-ours") is None
    assert pkg_version("torch")
