"""name_resolve: one contract for every store, run against real Redis, etcd and Ray."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from areal.api.config.cluster import NameResolveConfig
from areal.utils import name_resolve
from areal.utils.errors import NameEntryExistsError, NameEntryNotFoundError, NetworkError
from tests.components import services

STORES = [
    "memory",
    "nfs",
    "redis",
    "etcd3",
    pytest.param("ray", marks=[pytest.mark.slow, pytest.mark.ci]),  # Ray takes 10 s to start
]
SHARED = STORES[1:]
_OWNER = """
import sys, time
from areal.api.config.cluster import NameResolveConfig
from areal.utils import name_resolve
name_resolve.reconfigure(NameResolveConfig(**dict(pair.split("=", 1) for pair in sys.argv[1:])))
name_resolve.add("owner/leased", "host:1", keepalive_ttl={ttl})
name_resolve.add("owner/lasting", "host:2")
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Settings of a store, which is started for the first test that asks for it."""
    running: dict[str, dict[str, str]] = {}
    with contextlib.ExitStack() as stack:

        def settings(kind: str) -> dict[str, str]:
            if kind not in running:
                running[kind] = _start(kind, tmp_path_factory.mktemp(kind), stack)
            return {"type": kind, **running[kind]}

        yield settings


def _start(kind, directory, stack) -> dict[str, str]:
    if kind == "nfs":
        return {"nfs_record_root": str(directory / "names")}
    if kind == "redis":
        services.require_module("redis")
        return {"redis_addr": stack.enter_context(services.redis_server(directory))}
    if kind == "etcd3":
        services.require_module("etcd3gw")
        return {"etcd3_addr": stack.enter_context(services.etcd_server(directory))}
    if kind == "ray":
        services.require_module("ray")
        from tests.components.ray_cluster import running_cluster

        stack.enter_context(running_cluster())
    return {}


def _ttl_s(settings) -> float:
    """A short time to live; etcd knows none below 2 s."""
    return 2.0 if settings["type"] == "etcd3" else 1.0


def _use(settings) -> None:
    name_resolve.reconfigure(NameResolveConfig(**settings))
    for name in name_resolve.find_subtree(""):
        name_resolve.delete(name)


@pytest.fixture(params=STORES)
def store(request, start):
    """An empty store, in use; gives its settings."""
    settings = start(request.param)
    _use(settings)
    yield settings
    name_resolve.reconfigure(NameResolveConfig(type="memory"))


@pytest.fixture(params=SHARED)
def shared(request, start):
    """Same, of those that several processes share."""
    settings = start(request.param)
    _use(settings)
    yield settings
    name_resolve.reconfigure(NameResolveConfig(type="memory"))


def _other_client(settings) -> name_resolve.NameStore:
    """A second connection, as another process has it."""
    return name_resolve.NameStore(name_resolve.make_backend(NameResolveConfig(**settings)))


def _gone_after(name: str, limit_s: float) -> float:
    """Seconds until ``name`` is gone."""
    began = time.monotonic()
    while name in name_resolve.find_subtree(""):
        assert time.monotonic() - began < limit_s, f"{name} is still there after {limit_s} s"
        time.sleep(0.05)
    return time.monotonic() - began


def test_add_then_get_returns_the_text(store):
    name_resolve.add("a/b", "v")
    name_resolve.add("a/n", 3)
    name_resolve.add("a/empty", "")
    name_resolve.add("a/ü", "first\nsecond ü\r\n")
    assert (name_resolve.get("a/b"), name_resolve.get("/a/n/"), name_resolve.get("a/empty")) == ("v", "3", "")
    assert name_resolve.get("a/ü") == "first\nsecond ü\r\n"


def test_add_twice_needs_replace(store):
    name_resolve.add("a", "1")
    with pytest.raises(NameEntryExistsError, match="'a'"):
        name_resolve.add("a", "2")
    name_resolve.add("a", "2", replace=True)
    assert name_resolve.get("a") == "2"


def test_add_leased_twice_needs_replace_and_keeps_the_first(store):
    name_resolve.add("a", "1")
    with pytest.raises(NameEntryExistsError, match="'a'"):
        name_resolve.add("a", "2", keepalive_ttl=_ttl_s(store))
    assert name_resolve.get("a") == "1"


def test_get_and_delete_of_a_missing_name_are_refused(store):
    with pytest.raises(NameEntryNotFoundError, match="nothing"):
        name_resolve.get("nothing")
    with pytest.raises(NameEntryNotFoundError, match="nothing"):
        name_resolve.delete("nothing")


def test_delete_removes_one_name_only(store):
    name_resolve.add("a", "1")
    name_resolve.add("a/b", "2", keepalive_ttl=_ttl_s(store))
    name_resolve.delete("a")
    assert name_resolve.find_subtree("") == ["a/b"]
    name_resolve.delete("a/b")
    assert name_resolve.find_subtree("") == []


def test_subtree_values_names_and_clearing(store):
    for name in ("r/b", "r/a", "r/a/deep", "r", "rest"):
        name_resolve.add(name, name.upper())
    assert name_resolve.find_subtree("r") == ["r", "r/a", "r/a/deep", "r/b"]
    assert name_resolve.get_subtree("r") == ["R", "R/A", "R/A/DEEP", "R/B"]
    name_resolve.clear_subtree("r")
    name_resolve.clear_subtree("r")
    assert name_resolve.find_subtree("") == ["rest"]


def test_clear_subtree_without_a_root_is_refused(store):
    name_resolve.add("a", "1")
    with pytest.raises(ValueError, match="name"):
        name_resolve.clear_subtree("/")
    assert name_resolve.get("a") == "1"


def test_clear_subtree_of_one_trial_leaves_its_neighbours(store):
    neighbours = ["u/exp/trial10/w", "u/exp/trial", "u/exp2/trial1/w", "u/e[x]p/trial1/w", "v/exp/trial1/w"]
    for name in ("u/exp/trial1", "u/exp/trial1/w/0", *neighbours):
        name_resolve.add(name, "x")
    for pattern in ("u/*", "u/e?p", "u/e[x]p/trial", "u/ex", "u/exp/trial1*"):
        name_resolve.clear_subtree(pattern)
    assert name_resolve.find_subtree("u/exp/trial1") == ["u/exp/trial1", "u/exp/trial1/w/0"]
    name_resolve.clear_subtree("u/exp/trial1")
    assert name_resolve.find_subtree("") == sorted(neighbours)


def test_add_subentry_makes_random_children(store):
    children = {name_resolve.add_subentry("servers", f"h:{i}") for i in range(3)}
    assert len(children) == 3
    assert sorted(name_resolve.get_subtree("servers")) == ["h:0", "h:1", "h:2"]
    assert all(len(child.rpartition("/")[2]) == 8 for child in children)


def test_wait_returns_as_soon_as_the_name_is_there(store):
    threading.Timer(0.1, name_resolve.add, args=("late", "v")).start()
    assert name_resolve.wait("late", timeout=5, poll_frequency=0.02) == "v"


def test_wait_too_long_is_a_timeout_naming_the_key(store):
    with pytest.raises(TimeoutError, match="never"):
        name_resolve.wait("never", timeout=0.05, poll_frequency=0.01)


def test_watch_names_calls_back_once_when_all_are_gone(store):
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
    assert gone.wait(30)
    assert calls == [1]


def test_reset_deletes_own_entries_only(store):
    name_resolve.add("mine", "1")
    name_resolve.add("leased", "1", keepalive_ttl=_ttl_s(store))
    name_resolve.add("kept", "1", delete_on_exit=False)
    name_resolve.reset()
    assert name_resolve.find_subtree("") == ["kept"]


def test_reset_leaves_what_another_process_has_replaced(shared):
    name_resolve.add("worker", "old:1", keepalive_ttl=_ttl_s(shared))
    other = _other_client(shared)
    other.add("worker", "new:1", replace=True)
    name_resolve.reset()
    assert name_resolve.get("worker") == "new:1"
    other.close()
    assert name_resolve.find_subtree("") == []


def test_two_runs_on_one_store_do_not_touch_each_other(shared):
    other = _other_client(shared)
    name_resolve.add("u/exp/trial1/workers/actor/0", "a:1")
    other.add("u/exp/trial10/workers/actor/0", "b:1")
    name_resolve.clear_subtree("u/exp/trial1")
    name_resolve.reset()
    assert other.get_subtree("u/exp") == ["b:1"]
    other.close()


def test_forked_child_does_not_delete_its_parents_entries(shared):
    name_resolve.add("parent", "1", keepalive_ttl=_ttl_s(shared))
    child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(BaseException):
            if shared["type"] != "ray":  # Ray's connections do not survive a fork
                assert name_resolve.get("parent") == "1"
                name_resolve.add("child", "2", keepalive_ttl=60)
            name_resolve.reset()
            status = 0
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert name_resolve.find_subtree("") == ["parent"]


def test_leased_entry_of_a_live_owner_stays(store):
    ttl_s = _ttl_s(store)
    name_resolve.add("alive", "1", keepalive_ttl=ttl_s)
    name_resolve.add("freed", "1", keepalive_ttl=ttl_s)
    name_resolve.add("freed", "2", replace=True)  # no longer leased
    time.sleep(ttl_s * 1.75)
    assert (name_resolve.get("alive"), name_resolve.get("freed")) == ("1", "2")


@pytest.mark.parametrize("ttl", [0, -1, float("nan"), float("inf")])
def test_time_to_live_that_is_not_positive_is_refused(store, ttl):
    with pytest.raises(ValueError, match="keepalive_ttl"):
        name_resolve.add("a", "1", keepalive_ttl=ttl)
    assert name_resolve.find_subtree("") == []


def test_leased_entry_deleted_by_another_process_stays_away(shared):
    name_resolve.add("a", "1", keepalive_ttl=_ttl_s(shared))
    other = _other_client(shared)
    other.clear_subtree("a")
    time.sleep(_ttl_s(shared) * 1.25)
    assert name_resolve.find_subtree("") == []
    other.close()


def test_killed_owner_loses_leased_entries_only(shared):
    command = [
        sys.executable,
        "-c",
        _OWNER.format(ttl=_ttl_s(shared)),
        *(f"{key}={value}" for key, value in shared.items()),
    ]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout.readline() == "ready\n"
        time.sleep(_ttl_s(shared) * 1.25)
        assert name_resolve.find_subtree("") == ["owner/lasting", "owner/leased"]
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        owner.stdout.close()
    assert _gone_after("owner/leased", _ttl_s(shared) + 20.0) > 0.1 * _ttl_s(shared)
    assert name_resolve.find_subtree("") == ["owner/lasting"]
    name_resolve.add("owner/leased", "host:3")
    assert name_resolve.get("owner/leased") == "host:3"


@pytest.mark.parametrize("name", ["", "/", "a//b", "../up", "a/./b"])
def test_bad_name_is_refused(store, name):
    with pytest.raises(ValueError, match="name"):
        name_resolve.add(name, "x")


def test_many_threads_add_one_name_exactly_one_wins(store):
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


@pytest.fixture(params=["refuses", "silent"])
def dead_address(request):
    """Where nobody listens, or somebody who never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if request.param == "silent":
            listener.listen(8)
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize(("kind", "setting"), [("redis", "redis_addr"), ("etcd3", "etcd3_addr")])
def test_unreachable_store_is_an_error_within_seconds(dead_address, kind, setting):
    services.require_module({"redis": "redis", "etcd3": "etcd3gw"}[kind])
    name_resolve.reconfigure(NameResolveConfig(type=kind, **{setting: dead_address}))
    began = time.monotonic()
    with pytest.raises(NetworkError, match=f"name_resolve.type={kind}.*{setting}={dead_address}.*start it there"):
        name_resolve.wait("a", timeout=60)
    assert time.monotonic() - began < 30  # not the 60 s of the wait
    name_resolve.reconfigure(NameResolveConfig(type="memory"))


@pytest.mark.slow
@pytest.mark.ci
def test_ray_actor_that_ended_gets_the_leased_entries_of_live_owners_again(start):
    name_resolve.reconfigure(NameResolveConfig(**start("ray")))
    name_resolve.add("leased", "host:1", keepalive_ttl=0.6)
    import ray

    ray.kill(ray.get_actor("ray_kv_store", namespace="areal"))
    time.sleep(0.5)
    assert name_resolve.wait("leased", timeout=30, poll_frequency=0.05) == "host:1"
    name_resolve.reconfigure(NameResolveConfig(type="memory"))


def test_unreachable_ray_is_an_error_within_seconds(tmp_path):
    services.require_module("ray")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        script = (
            "from areal.api.config.cluster import NameResolveConfig\n"
            "from areal.utils import errors, name_resolve\n"
            "import ray\n"
            "name_resolve.reconfigure(NameResolveConfig(type='ray'))\n"
            "try:\n"
            "    name_resolve.get('a')\n"
            "except errors.NetworkError as exc:\n"
            "    print(exc)\n"
        )
        environment = {**os.environ, "RAY_ADDRESS": address}
        done = subprocess.run(  # Ray itself would try for a minute
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=50
        )
    assert done.returncode == 0, done.stderr
    assert "cluster.name_resolve.type=ray" in done.stdout
    assert address in done.stdout
    assert "ray start --head" in done.stdout


def test_store_that_comes_back_gets_the_leased_entries_of_live_owners_again(tmp_path):
    services.require_module("redis")
    with services.redis_server(tmp_path) as address:
        name_resolve.reconfigure(NameResolveConfig(type="redis", redis_addr=address))
        name_resolve.add("leased", "host:1", keepalive_ttl=0.6)
    time.sleep(1)  # longer than the lease
    with services.redis_server(tmp_path, port=int(address.rpartition(":")[2])):
        assert name_resolve.wait("leased", timeout=30, poll_frequency=0.05) == "host:1"
        name_resolve.reconfigure(NameResolveConfig(type="memory"))
