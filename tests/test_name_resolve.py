"""name_resolve: one contract for every backend, and switching between them."""

from __future__ import annotations

import threading

import pytest

from areal.api.config.cluster import NameResolveConfig
from areal.utils import name_resolve, names
from areal.utils.errors import NameEntryExistsError, NameEntryNotFoundError


@pytest.fixture(params=["memory", "nfs"])
def _backend(request, tmp_path):
    name_resolve.reconfigure(NameResolveConfig(type=request.param, nfs_record_root=str(tmp_path / "names")))
    yield
    name_resolve.reconfigure(NameResolveConfig(type="memory"))


pytestmark = pytest.mark.usefixtures("_backend")


def test_add_then_get_returns_the_text():
    name_resolve.add("a/b", "v")
    name_resolve.add("a/n", 3)
    assert (name_resolve.get("a/b"), name_resolve.get("/a/n/")) == ("v", "3")


def test_add_twice_needs_replace():
    name_resolve.add("a", "1")
    with pytest.raises(NameEntryExistsError, match="'a'"):
        name_resolve.add("a", "2")
    name_resolve.add("a", "2", replace=True)
    assert name_resolve.get("a") == "2"


def test_get_and_delete_of_a_missing_name_are_refused():
    with pytest.raises(NameEntryNotFoundError, match="nothing"):
        name_resolve.get("nothing")
    with pytest.raises(NameEntryNotFoundError, match="nothing"):
        name_resolve.delete("nothing")


def test_subtree_values_names_and_clearing():
    for name in ("r/b", "r/a", "r/a/deep", "rest"):
        name_resolve.add(name, name.upper())
    assert name_resolve.find_subtree("r") == ["r/a", "r/a/deep", "r/b"]
    assert name_resolve.get_subtree("r") == ["R/A", "R/A/DEEP", "R/B"]
    name_resolve.clear_subtree("r")
    name_resolve.clear_subtree("r")
    assert name_resolve.find_subtree("") == ["rest"]


def test_add_subentry_makes_random_children():
    children = {name_resolve.add_subentry("servers", f"h:{i}") for i in range(3)}
    assert len(children) == 3
    assert sorted(name_resolve.get_subtree("servers")) == ["h:0", "h:1", "h:2"]
    assert all(len(child.rpartition("/")[2]) == 8 for child in children)


def test_wait_returns_as_soon_as_the_name_is_there():
    threading.Timer(0.1, name_resolve.add, args=("late", "v")).start()
    assert name_resolve.wait("late", timeout=5, poll_frequency=0.02) == "v"


def test_wait_too_long_is_a_timeout_naming_the_key():
    with pytest.raises(TimeoutError, match="never"):
        name_resolve.wait("never", timeout=0.05, poll_frequency=0.01)


def test_watch_names_calls_back_once_when_all_are_gone():
    for name in ("w/1", "w/2"):
        name_resolve.add(name, "x")
    gone, calls = threading.Event(), []

    def call_back() -> None:
        calls.append(1)
        gone.set()

    name_resolve.watch_names(["w/1", "w/2"], call_back, poll_frequency=0.01, wait_timeout=1)
    name_resolve.delete("w/1")
    assert not gone.wait(0.1)
    name_resolve.delete("w/2")
    assert gone.wait(5)
    assert calls == [1]


def test_reset_deletes_own_entries_only():
    name_resolve.add("mine", "1")
    name_resolve.add("kept", "1", delete_on_exit=False)
    name_resolve.reset()
    assert name_resolve.find_subtree("") == ["kept"]


@pytest.mark.parametrize("name", ["", "/", "a//b", "../up", "a/./b"])
def test_bad_name_is_refused(name):
    with pytest.raises(ValueError, match="name"):
        name_resolve.add(name, "x")


def test_many_threads_add_one_name_exactly_one_wins():
    won, lost = [], []

    def work(value: int) -> None:
        try:
            name_resolve.add("race", str(value))
            won.append(value)
        except NameEntryExistsError:
            lost.append(value)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert len(lost) == 7
    assert name_resolve.get("race") == str(won[0])


def test_function_imported_before_reconfigure_uses_the_new_backend():
    from areal.utils.name_resolve import add, get

    name_resolve.reconfigure(NameResolveConfig(type="memory"))
    add("x", "1")
    assert get("x") == name_resolve.get("x") == "1"


@pytest.mark.parametrize("kind", ["redis", "etcd3", "ray"])
def test_backend_of_a_later_part_is_refused_by_name(kind):
    with pytest.raises(NotImplementedError, match=kind):
        name_resolve.reconfigure(NameResolveConfig(type=kind))


def test_nfs_entry_is_a_file_named_entry(tmp_path):
    config = NameResolveConfig(type="nfs", nfs_record_root=str(tmp_path / "files"))
    name_resolve.reconfigure(config)
    name_resolve.add("exp/worker", "host:1")
    assert (tmp_path / "files" / "exp" / "worker" / "ENTRY").read_text() == "host:1"
    name_resolve.delete("exp/worker")
    assert not list((tmp_path / "files").iterdir())


def test_names_have_the_documented_shape(monkeypatch):
    monkeypatch.setenv("LOGNAME", "u")
    monkeypatch.setenv("USER", "u")
    assert names.gen_servers("e", "t") == "u/e/t/gen_servers"
    assert names.update_weights_from_disk("e", "t", 3) == "u/e/t/update_weights_from_disk/3"
    assert names.worker("e", "t", "actor", 0) == "u/e/t/workers/actor/0"
    assert names.trial_registry("e", "t") == "trial_registry/u/e/t"
