"""Atomic writes and paths; also the small helpers beside them (lock, registry, dynamic import, environment)."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from areal.utils import environ, fs
from areal.utils.dynamic_import import import_from_string
from areal.utils.lock import DistributedLock
from areal.utils.registry import Registry, lazy_exports


def test_atomic_write_replaces_and_leaves_nothing_aside(tmp_path):
    target = tmp_path / "a.json"
    fs.atomic_write_json(target, {"x": 1})
    fs.atomic_write_json(target, {"x": "ü"})
    assert fs.read_json(target) == {"x": "ü"}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_atomic_write_failing_keeps_the_old_content(tmp_path, monkeypatch):
    target = tmp_path / "a.txt"
    fs.atomic_write_text(target, "old")
    monkeypatch.setattr(fs.os, "replace", _raise_full)
    with pytest.raises(OSError, match="full"):
        fs.atomic_write_text(target, "new")
    assert target.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_atomic_write_secret_is_private_from_the_start(tmp_path):
    fs.atomic_write_bytes(tmp_path / "token", b"s", mode=0o600)
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600


def test_read_json_damaged_names_the_file(tmp_path):
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ValueError, match="bad.json"):
        fs.read_json(tmp_path / "bad.json")


def test_atomic_directory_appears_whole_or_not_at_all(tmp_path):
    target = tmp_path / "point"
    with pytest.raises(RuntimeError, match="boom"):
        _write_half_a_directory(target)
    assert not list(tmp_path.iterdir())

    for content in ("one", "two"):
        with fs.atomic_directory(target) as aside:
            (aside / "file").write_text(content)
            assert not target.exists() or content == "two"
    assert (target / "file").read_text() == "two"
    assert [p.name for p in tmp_path.iterdir()] == ["point"]


def test_clean_leftovers_removes_only_what_is_aside(tmp_path):
    fs.aside_path(tmp_path / "a").mkdir()
    fs.aside_path(tmp_path / "b").write_text("x")
    (tmp_path / "kept").mkdir()
    assert len(fs.clean_leftovers(tmp_path)) == 2
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]


def test_replace_symlink_moves_and_refuses_a_real_file(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        fs.replace_symlink(tmp_path / "newest", tmp_path / name)
        assert os.readlink(tmp_path / "newest") == name
    with pytest.raises(FileExistsError):
        fs.replace_symlink(tmp_path / "one", tmp_path / "two")


def test_log_path_is_created_and_a_missing_part_is_refused(tmp_path):
    path = fs.get_log_path(tmp_path, "exp", "trial")
    assert path == Path(tmp_path, "logs", environ.login_user(), "exp", "trial")
    assert path.is_dir()
    with pytest.raises(ValueError, match="experiment_name, trial_name"):
        fs.get_log_path(tmp_path, "???", "")


def _write_half_a_directory(target: Path) -> None:
    with fs.atomic_directory(target) as aside:
        (aside / "half").write_text("x")
        raise RuntimeError("boom")


def _raise_full(*_args: object) -> None:
    raise OSError("full")


# --- lock ------------------------------------------------------------------------------------------------------------
def test_distributed_lock_excludes_other_holders():
    torch = pytest.importorskip("torch")
    store = torch.distributed.HashStore()
    inside, most = [0], [0]

    def work() -> None:
        for _ in range(5):
            with DistributedLock("disk", backoff=0.001, store=store):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert most == [1]


def test_distributed_lock_held_by_another_times_out():
    torch = pytest.importorskip("torch")
    store = torch.distributed.HashStore()
    with DistributedLock("x", store=store), pytest.raises(TimeoutError, match="timeout_s"):
        DistributedLock("x", backoff=0.01, store=store, timeout_s=0.05).acquire()


# --- registry and dynamic import -----------------------------------------------------------------------------------
def test_import_from_string_finds_names():
    assert import_from_string("os.path.join") is os.path.join
    assert import_from_string("os:path.join") is os.path.join


@pytest.mark.parametrize(
    ("path", "error"), [("nodots", ValueError), ("no.such.module.Name", ImportError), ("os.nothing", AttributeError)]
)
def test_import_from_string_bad_path_is_refused(path, error):
    with pytest.raises(error):
        import_from_string(path)


def test_registry_imports_at_first_use_and_names_the_nearest():
    registry: Registry = Registry("joiner", {"posix": "os.path.join"})
    assert registry.get("posix") is os.path.join
    with pytest.raises(ValueError, match="did you mean 'posix'"):
        registry.get("posxi")


def test_registry_taken_name_needs_replace():
    registry: Registry = Registry("number")
    registry.register("one", 1)
    with pytest.raises(ValueError, match="already registered"):
        registry.register("one", 2)
    registry.register("one", 2, replace=True)
    assert registry.get("one") == 2
    assert "one" in registry
    assert list(registry) == ["one"]


def test_registry_decorator_returns_what_it_decorates():
    registry: Registry = Registry("fn")

    @registry.register("f")
    def f() -> int:
        return 3

    assert registry.get("f") is f


def test_lazy_exports_unknown_name_is_attribute_error():
    getter, _ = lazy_exports(__name__, {"joined": "os.path.join"})
    assert getter("joined") is os.path.join
    with pytest.raises(AttributeError, match="nothing"):
        getter("nothing")


# --- environment -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("text", "value"), [("1", True), ("TRUE", True), ("0", False), ("", False)])
def test_bool_env_var_values(monkeypatch, text, value):
    monkeypatch.setenv("AREAL_X", text)
    assert environ.get_bool_env_var("AREAL_X") is value


def test_int_env_not_a_number_names_the_variable(monkeypatch):
    monkeypatch.setenv("RANK", "zero")
    with pytest.raises(ValueError, match="RANK='zero'"):
        environ.rank()


def test_single_controller_unless_spmd(monkeypatch):
    monkeypatch.delenv("AREAL_SPMD_MODE", raising=False)
    assert environ.is_single_controller()
    monkeypatch.setenv("AREAL_SPMD_MODE", "1")
    assert not environ.is_single_controller()


def test_temporary_env_restores(monkeypatch):
    monkeypatch.setenv("AREAL_A", "old")
    with environ.temporary_env({"AREAL_A": None, "AREAL_B": "new"}):
        assert environ.get_env("AREAL_A") is None
        assert environ.get_env("AREAL_B") == "new"
    assert environ.get_env("AREAL_A") == "old"
    assert environ.get_env("AREAL_B") is None


@pytest.mark.parametrize("can_swap", [True, False])
def test_publish_directory_replaces_an_older_one_and_leaves_nothing(tmp_path, monkeypatch, can_swap):
    if not can_swap:  # a file system, or a system, without an exchange of names
        monkeypatch.setattr(fs, "_swap", lambda first, second: False)
    for content in ("old", "new"):
        aside = fs.aside_path(tmp_path / "out")
        aside.mkdir()
        (aside / content).write_text(content)
        fs.publish_directory(aside, tmp_path / "out")
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
    assert [entry.name for entry in (tmp_path / "out").iterdir()] == ["new"]
