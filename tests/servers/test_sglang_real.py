"""A real SGLang server on the CPU against the suite of all servers. Needs AREAL_SGLANG_PYTHON."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from areal.engine.sglang_remote import SGLangProtocol
from tests.servers.conftest import ServerFactory
from tests.servers.peer import LONGEST, Peer, save_suite_model
from tests.servers.suite import ServerSuite

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def peer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, sglang_server: ServerFactory
) -> Iterator[Peer]:
    """One server per kind of head; its prefix cache is on."""
    directory = tmp_path_factory.mktemp("sglang")
    model = save_suite_model(directory / "v0", 0, request.param)
    server = sglang_server(model, context_length=LONGEST, disable_radix_cache=False)
    served = Peer(SGLangProtocol(), server.address, request.param, directory)
    yield served
    served.close()
    assert not served.failures


class TestSGLangServer(ServerSuite):
    """Everything."""
