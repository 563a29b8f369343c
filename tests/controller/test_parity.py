"""Three steps on every scheduler and store are the inline run: same rows, same tokens, same losses, same weights.

Real components: local processes, a two-node Ray, a two-node Slurm, Redis, etcd.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.components import ray_cluster, services, slurm
from tests.controller.runs import ONE_THREAD, TableTrainer, assert_same_groups, record_tables, worker_config
from tests.trainer_runs import checkpoints, rl_config, stats_of, tiny_policy, weights

LOSSES = ("ppo_actor/update/grad_norm", "ppo_actor/update/actor_loss/avg", "ppo_actor/task_reward/avg")
ON_CLUSTER = "cluster.n_gpus_per_node=4"


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Hugging Face directory of the initial policy."""
    return tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def inline(policy: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, TableTrainer]:
    """Config and (closed) trainer of the run that the others are compared with."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    config = rl_config(tmp_path_factory.mktemp("inline"), policy, "saver.freq_steps=3", "native.num_threads=1")
    trainer = record_tables(config)
    torch.set_num_threads(threads)
    return config, trainer


@contextlib.contextmanager
def surroundings(kind: str, root: Path) -> Iterator[tuple[str, ...]]:
    """What ``kind`` needs, running; gives the overrides that use it."""
    specs = ONE_THREAD
    if kind == "local":
        yield ("scheduler.type=local", *specs)
    elif kind == "redis":
        with services.redis_server(root) as address:
            yield ("scheduler.type=local", *specs, "cluster.name_resolve.type=redis", _address("redis", address))
    elif kind == "etcd3":
        with services.etcd_server(root) as address:
            yield ("scheduler.type=local", *specs, "cluster.name_resolve.type=etcd3", _address("etcd3", address))
    elif kind == "ray":
        services.require_module("ray")
        with ray_cluster.running_cluster():
            yield ("scheduler.type=ray", *specs, ON_CLUSTER)
    else:
        with slurm.running_cluster():
            yield ("scheduler.type=slurm", *specs, ON_CLUSTER)


def _address(store: str, address: Any) -> str:
    return f"cluster.name_resolve.{store}_addr={address}"


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("kind", ["local", "redis", "etcd3", "ray", "slurm"])
def test_three_steps_without_staleness_equal_inline(
    kind: str, policy: str, inline: tuple[Any, TableTrainer], tmp_path: Path
) -> None:
    inline_config, expected = inline
    (tmp_path / "component").mkdir()
    with surroundings(kind, tmp_path / "component") as overrides:
        config = worker_config(tmp_path / "run", policy, "saver.freq_steps=3", scheduler=overrides)
        found = record_tables(config)

    assert_same_groups(expected, found)
    for mine, theirs in zip(stats_of(inline_config), stats_of(config), strict=True):
        for key in LOSSES:
            assert mine[key] == pytest.approx(theirs[key], abs=1e-4), key
    one, other = weights(checkpoints(inline_config)[-1]), weights(checkpoints(config)[-1])
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=1e-5)
