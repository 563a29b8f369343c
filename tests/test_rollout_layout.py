"""Which samplers a run gets: what is read of the config and the environment, and what is refused before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal.trainer import rollout_layout
from areal.trainer.rollout_layout import read_layout
from areal.utils.errors import ConfigError, UnsupportedFeatureError
from tests.controller.runs import worker_config


@pytest.fixture
def addresses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of external servers, as they are found."""
    found: list[str] = []
    monkeypatch.setattr(rollout_layout, "find_servers", lambda *_: found)
    return found


@pytest.mark.parametrize(
    ("backend", "setting", "named"),
    [
        ("vllm:d1", "gconfig.temperature=3.0", r"^gconfig with rollout.backend=vllm:d1: .*temperature=3.0.* 0.01 to 2"),
        ("vllm:d1", "gconfig.temperature=0.001", "temperature=0.001"),
        ("vllm:d1", "eval_gconfig={temperature: 3.0}", "^eval_gconfig with rollout.backend=vllm:d1"),
        ("sglang:d1", "gconfig.use_beam_search=true", "use_beam_search"),
    ],
)
def test_read_layout_generation_that_the_servers_cannot_honour_is_refused(
    backend: str, setting: str, named: str, addresses: list[str], tmp_path: Path
) -> None:
    config = worker_config(tmp_path, "nowhere", f"rollout.backend={backend}", setting)

    with pytest.raises(UnsupportedFeatureError, match=named):
        read_layout(config)


@pytest.mark.parametrize("backend", ["native:d1", "sglang:d1"])
def test_read_layout_temperature_that_only_vllm_bends_is_taken_by_others(
    backend: str, addresses: list[str], tmp_path: Path
) -> None:
    config = worker_config(tmp_path, "nowhere", f"rollout.backend={backend}", "gconfig.temperature=3.0")

    assert read_layout(config).backend == backend.partition(":")[0]


def test_read_layout_servers_that_cannot_be_shared_out_evenly_are_refused(addresses: list[str], tmp_path: Path) -> None:
    addresses += ["10.0.0.5:1", "10.0.0.6:1", "10.0.0.7:1"]
    config = worker_config(tmp_path, "nowhere", "rollout.backend=native:d2")

    with pytest.raises(ConfigError, match="3 servers by address .* give a multiple of d=2"):
        read_layout(config)


def test_server_arguments_name_the_token_file_of_external_servers(
    addresses: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AREAL_LLM_SERVER_TOKEN_FILE", str(tmp_path / "token"))
    config = worker_config(tmp_path, "nowhere", "rollout.backend=native:d1")
    addresses.append("10.0.0.5:1")

    external = rollout_layout._server_arguments(config, read_layout(config))["server"]
    addresses.clear()
    own = rollout_layout._server_arguments(config, read_layout(config))["server"]

    assert (external.token_file, own.token_file) == (str(tmp_path / "token"), "")
