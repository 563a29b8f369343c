"""The 1.x path on two ranks, each with a remote engine of its own over the same server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.external_servers import external_servers
from tests.torchrun import script_cells, weight_cells
from tests.torchrun.live_group import LiveGroup

PROMPT = [5, 6, 7]


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        ("fsdp:d2", "disk"),
        ("fsdp:d2", "xccl"),
        pytest.param("megatron:p2", "disk", marks=[pytest.mark.slow, pytest.mark.ci]),
        pytest.param("megatron:t2", "xccl", marks=[pytest.mark.slow, pytest.mark.ci]),
    ],
)
def test_update_weights_of_a_script_on_two_ranks_server_generates_with_them(
    two_ranks: LiveGroup, model_dirs: dict[str, str], tmp_path: Path, backend: str, kind: str
) -> None:
    if backend.startswith("megatron"):
        pytest.importorskip("megatron.core", reason="megatron-core is not installed; pip install 'areal[megatron]'")
    path = model_dirs["untied"]
    way = {"kind": kind, "root": str(tmp_path)}
    two_ranks.run(weight_cells.open_trainer, path=path, backend=backend)
    try:
        with external_servers(1, path, tmp_path, "none") as (server,):
            two_ranks.run(script_cells.connect, address=server.address, path=path, **way)
            for version in (1, 2):
                two_ranks.run(script_cells.step, version=version, **way)
                for tokens, logprobs, versions in two_ranks.run(script_cells.sample, ids=PROMPT):
                    theirs = two_ranks.run(weight_cells.logprobs_of, tokens=PROMPT + tokens)[0][len(PROMPT) - 1 :]
                    assert logprobs == pytest.approx(theirs, abs=1e-3)
                    assert set(versions) == {version}
            two_ranks.run(script_cells.disconnect)
    finally:
        two_ranks.run(weight_cells.close_trainer)
