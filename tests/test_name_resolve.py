"""name_resolve: switching between backends, names and the files of the shared directory.

What every backend must do is in tests/test_name_resolve_stores.py.
"""

from __future__ import annotations

import os
import socket
import sys
import time

import pytest

from areal.api.config.cluster import NameResolveConfig
from areal.utils import name_resolve, names
from areal.utils.errors import ConfigError, NameEntryNotFoundError, NetworkError


@pytest.fixture(autouse=True)
def _memory():
    yield
    name_resolve.reconfigure(NameResolveConfig(type="memory"))


def _use_files(root):
    name_resolve.reconfigure(NameResolveConfig(type="nfs", nfs_record_root=str(root)))


def test_function_imported_before_reconfigure_uses_the_new_backend():
    from areal.utils.name_resolve import add, get

    name_resolve.reconfigure(NameResolveConfig(type="memory"))
    add("x", "1")
    assert get("x") == name_resolve.get("x") == "1"


def test_reconfigure_unknown_type_is_refused_by_name():
    config = NameResolveConfig(type="memory")
    config.type = "zookeeper"
    with pytest.raises(NotImplementedError, match="zookeeper"):
        name_resolve.reconfigure(config)


@pytest.mark.parametrize(("kind", "module"), [("redis", "redis"), ("etcd3", "etcd3gw"), ("ray", "ray")])
def test_reconfigure_store_of_other_machines_contacts_nobody(kind, module, monkeypatch):
    asked = []
    for name in ("getaddrinfo", "create_connection"):
        monkeypatch.setattr(socket, name, lambda *args, **kwargs: asked.append(args))
    monkeypatch.setitem(sys.modules, module, None)  # whoever speaks to it imports this
    name_resolve.reconfigure(NameResolveConfig(type=kind, redis_addr="store.invalid:1", etcd3_addr="store.invalid:1"))
    assert asked == []


@pytest.mark.parametrize(("kind", "setting"), [("redis", "redis_addr"), ("etcd3", "etcd3_addr")])
@pytest.mark.parametrize("address", ["localhost", "localhost:", ":1", "localhost:http", "localhost:70000"])
def test_reconfigure_bad_address_names_the_setting(kind, setting, address):
    with pytest.raises(ConfigError, match=f"cluster.name_resolve.{setting}.*{address}"):
        name_resolve.reconfigure(NameResolveConfig(type=kind, **{setting: address}))


@pytest.mark.parametrize(("kind", "module", "extra"), [("redis", "redis", "redis"), ("etcd3", "etcd3gw", "etcd")])
def test_store_without_its_package_names_the_extra(monkeypatch, kind, module, extra):
    monkeypatch.setitem(__import__("sys").modules, module, None)
    monkeypatch.setitem(__import__("sys").modules, f"{module}.exceptions", None)
    name_resolve.reconfigure(NameResolveConfig(type=kind))
    with pytest.raises(ConfigError, match=rf"areal\[{extra}\]"):
        name_resolve.get("a")


def test_nfs_entry_is_a_file_named_entry(tmp_path):
    _use_files(tmp_path / "files")
    name_resolve.add("exp/worker", "host:1")
    assert (tmp_path / "files" / "exp" / "worker" / "ENTRY").read_text() == "host:1"
    name_resolve.delete("exp/worker")
    assert not list((tmp_path / "files").iterdir())


def test_nfs_entry_past_its_time_is_gone_with_its_directory(tmp_path):
    _use_files(tmp_path)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "ENTRY").write_text("host:1\0lease 5")
    assert name_resolve.get("old") == "host:1"
    os.utime(tmp_path / "old" / "ENTRY", (time.time() - 6,) * 2)
    with pytest.raises(NameEntryNotFoundError, match="old"):
        name_resolve.get("old")
    assert not list(tmp_path.iterdir())


def test_nfs_entry_past_its_time_does_not_block_a_new_owner(tmp_path):
    _use_files(tmp_path)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "ENTRY").write_text("host:1\0lease 5")
    os.utime(tmp_path / "old" / "ENTRY", (time.time() - 6,) * 2)
    name_resolve.add("old", "host:2")
    assert name_resolve.get("old") == "host:2"


def test_nfs_root_that_cannot_be_made_names_setting_and_remedy(tmp_path):
    (tmp_path / "file").touch()
    _use_files(tmp_path / "file" / "names")
    with pytest.raises(NetworkError, match=r"nfs_record_root=.*file/names.*make the directory"):
        name_resolve.add("a", "1")


def test_names_have_the_documented_shape(monkeypatch):
    monkeypatch.setenv("LOGNAME", "u")
    monkeypatch.setenv("USER", "u")
    assert names.gen_servers("e", "t") == "u/e/t/gen_servers"
    assert names.update_weights_from_disk("e", "t", 3) == "u/e/t/update_weights_from_disk/3"
    assert names.worker("e", "t", "actor", 0) == "u/e/t/workers/actor/0"
    assert names.trial_registry("e", "t") == "trial_registry/u/e/t"
