"""Which server gets a request."""

from __future__ import annotations

from areal.engine.inference.http_client import ServerHttp
from areal.engine.inference.server_pool import Server, ServerPool
from tests.server_fakes import FakeProtocol, FakeServer, ask, begin, generate, sampling


def pool(count: int) -> ServerPool:
    return ServerPool([Server(ServerHttp(f"h{i}:1", 1.0, 1), i) for i in range(count)])


def test_pick_equal_servers_take_turns() -> None:
    servers = pool(3)
    assert [servers.pick(f"r{i}").position for i in range(6)] == [0, 1, 2, 0, 1, 2]


def test_pick_goes_where_least_is_in_flight() -> None:
    servers = pool(3)
    servers.servers[0].in_flight, servers.servers[1].in_flight, servers.servers[2].in_flight = 5, 1, 3
    assert servers.pick("a").position == 1


def test_pick_same_rid_stays_for_the_128_most_recent() -> None:
    servers = pool(2)
    home = servers.pick("mine")
    home.in_flight = 9
    for i in range(127):
        servers.pick(f"r{i}")
    assert servers.pick("mine") is home
    for i in range(128):
        servers.pick(f"s{i}")
    assert servers.pick("mine") is not home


def test_pick_unhealthy_server_gets_nothing_until_it_recovers() -> None:
    servers = pool(2)
    home = servers.pick("mine")
    servers.failed(home, OSError("gone"))
    moved = servers.pick("mine")
    assert moved is not home
    assert {servers.pick(f"r{i}") for i in range(4)} == {moved}
    servers.recovered(home)
    assert servers.pick("mine") is moved  # it has a new home
    assert home in {servers.pick(f"t{i}") for i in range(4)}


def test_pick_all_unhealthy_still_names_one() -> None:
    servers = pool(2)
    for server in servers.servers:
        servers.failed(server, OSError("gone"))
    assert servers.pick("a") in servers.servers
    assert servers.failures == 2
    servers.worked(servers.servers[0])
    assert (servers.failures, servers.failing_since) == (0, None)


def test_addresses_urls_and_plain_ones_are_the_same() -> None:
    assert ServerHttp("http://h:1/", 1.0, 1).base == ServerHttp("h:1", 1.0, 1).base == "http://h:1"
    assert ServerHttp("https://h:1", 1.0, 1).address == "h:1"


def test_agenerate_many_requests_are_spread_over_servers() -> None:
    servers = [FakeServer(token_s=0.005) for _ in range(3)]
    with sampling(*servers) as sampler:
        futures = [begin(sampler, ask(max_new_tokens=10)) for _ in range(12)]
        for future in futures:
            future.result(30)
        assert [server.in_flight for server in sampler._pool.servers] == [0, 0, 0]
    assert [len(server.calls()) for server in servers] == [4, 4, 4]


def test_agenerate_turns_of_one_conversation_go_to_one_server() -> None:
    servers = [FakeServer(), FakeServer()]
    with sampling(*servers) as sampler:
        for _ in range(4):
            generate(sampler, ask(max_new_tokens=2, rid="talk"))
    assert sorted(len(server.calls()) for server in servers) == [0, 4]


def test_agenerate_token_of_the_protocol_is_sent() -> None:
    server = FakeServer()
    with sampling(server, protocol=FakeProtocol(token="secret")) as sampler:
        generate(sampler, ask(max_new_tokens=2))
    assert set(server.authorizations) == {"Bearer secret"}
