"""A real SGLang server on the CPU against the suite of all servers. Needs AREAL_SGLANG_PYTHON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from areal.engine.core.weight_heads import ServerHeads
from areal.engine.inference.protocol import ServerCall
from areal.engine.sglang_remote import SGLangProtocol
from areal.utils.errors import WeightSyncError
from tests.fakes import tiny_model
from tests.servers.conftest import ServerFactory
from tests.servers.peer import LONGEST, MODEL, Peer, save_suite_model, suite_tokenizer
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


class Watched(SGLangProtocol):
    """Notes what servers are asked for; ``deaf`` ones never get what is sent to them, and do not mind."""

    def __init__(self) -> None:
        super().__init__()
        self.deaf = False
        self.asked: list[list[str]] = []

    def stage(self, source: Any, version: int) -> list[ServerCall]:
        return [] if self.deaf else super().stage(source, version)

    def read_heads(self, names: Sequence[str], replies: Sequence[Any]) -> ServerHeads:
        self.asked.append(list(names))
        return super().read_heads(names, replies)


def llama(seed: int) -> Any:
    """Of an architecture that SGLang can be asked about."""
    return tiny_model("llama", seed, tie_word_embeddings=False, **MODEL)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_update_server_that_still_has_the_old_weights_is_caught(
    tmp_path: Path, sglang_server: ServerFactory, dtype: str
) -> None:
    llama(0).save_pretrained(tmp_path / "v0")
    suite_tokenizer().save_pretrained(tmp_path / "v0")
    server = sglang_server(tmp_path / "v0", context_length=LONGEST, dtype=dtype)
    protocol = Watched()
    peer = Peer(protocol, server.address, False, tmp_path, llama)
    for mode in ("disk", "xccl"):
        peer.publish(mode, *peer.next_model())
    protocol.deaf = True
    with pytest.raises(WeightSyncError, match=r"model\.[a-z_0-9.]+ was sent with the first values"):
        peer.publish("disk", *peer.next_model())
    peer.close()
    assert [len(names) for names in protocol.asked] == [8, 8, 8]
