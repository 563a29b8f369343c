"""The beginning of a run: what is made, and what is refused before anything is loaded."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest

from areal.api.cli_args import SFTConfig
from areal.api.config.cluster import ClusterSpecConfig, NameResolveConfig, SchedulerConfig
from areal.infra.run_context import RunContext, StorageError
from areal.utils import name_resolve, names
from areal.utils.errors import ConfigError


@pytest.fixture(autouse=True)
def _names_in_memory_again() -> Any:
    yield
    name_resolve.reconfigure(NameResolveConfig(type="memory"))


def make_config(root: Path, scheduler: dict[str, Any] | None = None, **store: Any) -> SFTConfig:
    store = {"type": "nfs", "nfs_record_root": str(root / "names"), **store}
    return SFTConfig(
        experiment_name="exp",
        trial_name="trial",
        cluster=ClusterSpecConfig(
            fileroot=str(root / "files"), n_gpus_per_node=3, name_resolve=NameResolveConfig(**store)
        ),
        scheduler=SchedulerConfig(type="local", **(scheduler or {})),
    )


def test_from_config_new_run_takes_settings_and_makes_private_token(tmp_path: Path) -> None:
    settings = {"startup_timeout_s": 7.0, "heartbeat_interval_s": 0.5, "heartbeat_timeout_s": 4.0, "host": "127.0.0.2"}

    context = RunContext.from_config(make_config(tmp_path, settings))

    assert {name: getattr(context, name) for name in settings} == settings
    assert (context.experiment_name, context.trial_name, context.n_gpus_per_node) == ("exp", "trial", 3)
    assert context.log_dir.is_dir()
    assert context.log_dir.is_relative_to(tmp_path / "files" / "logs")
    assert context.token_path.read_text() == context.identity.token
    assert stat.S_IMODE(context.token_path.stat().st_mode) == 0o600


def test_from_config_twice_gives_two_runs_with_different_secrets(tmp_path: Path) -> None:
    first, second = (RunContext.from_config(make_config(tmp_path)) for _ in range(2))

    assert first.identity.run_id != second.identity.run_id
    assert first.identity.token != second.identity.token
    assert first.token_path != second.token_path


def test_close_removes_the_token_only(tmp_path: Path) -> None:
    first, second = (RunContext.from_config(make_config(tmp_path)) for _ in range(2))

    first.close()
    first.close()

    assert not first.token_path.exists()
    assert second.token_path.exists()


def test_from_config_left_keys_of_the_trial_are_cleared_others_stay(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    name_resolve.reconfigure(config.cluster.name_resolve)
    left, other = names.worker("exp", "trial", "actor", 0), names.worker("exp", "other", "actor", 0)
    name_resolve.add(left, "127.0.0.1:1", delete_on_exit=False)
    name_resolve.add(other, "127.0.0.1:2", delete_on_exit=False)

    RunContext.from_config(config)

    assert name_resolve.find_subtree("") == [other]


def test_from_config_fileroot_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "files").write_text("a file, not a directory")

    with pytest.raises(StorageError, match=r"cluster\.fileroot='.*files' cannot be written.*Name a directory"):
        RunContext.from_config(make_config(tmp_path))


def test_from_config_store_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "names").write_text("a file, not a directory")

    with pytest.raises(StorageError, match=r"cluster\.name_resolve\.nfs_record_root='.*names' cannot be used"):
        RunContext.from_config(make_config(tmp_path))


def test_from_config_memory_names_with_worker_processes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"name_resolve\.type='memory'.*scheduler\.type='local'.*'nfs'"):
        RunContext.from_config(make_config(tmp_path, type="memory"))


def test_scheduler_config_timeout_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"heartbeat_timeout_s=0.*> 0"):
        SchedulerConfig(heartbeat_timeout_s=0)
