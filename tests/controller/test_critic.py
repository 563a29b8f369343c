"""A critic in worker processes of its own, or in those of the actor; the same numbers as inline."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from areal import PPOTrainer
from areal.api.alloc_mode import ParallelStrategy
from areal.api.cli_args import PPOActorConfig, PPOCriticConfig
from areal.api.config.scheduling import SchedulingStrategy
from areal.engine.fsdp_engine import FSDPEngine
from areal.infra.controller import train_controller
from areal.infra.controller.train_controller import CriticController, RoleSpec
from areal.infra.rpc.errors import TensorLostError
from areal.trainer.role_worker import PPOCriticWorker
from areal.utils import stats_tracker
from areal.utils.errors import EngineError
from tests.controller.runs import worker_config
from tests.fakes import tiny_model
from tests.test_ppo_actor import trajectories
from tests.trainer_runs import (
    WORKFLOW,
    checkpoints,
    record_rl,
    rl_config,
    rl_rows,
    stats_of,
    tiny_policy,
    weights,
    workflow_kwargs,
)


@pytest.fixture(autouse=True)
def _fresh_statistics():
    stats_tracker.export_all()
    yield
    stats_tracker.export_all()


class HungRank:
    """A scheduler of two critic ranks: in a collective rank 0 fails (load: if told so), and rank 1 never returns."""

    def __init__(self, failing: str, error: Exception) -> None:
        self.failing, self.error = failing, error
        self.calls: list[tuple[str, str]] = []
        self.over = threading.Event()

    def create_workers(self, job: Any) -> list[str]:
        return ["critic/0", "critic/1"]

    def call_engine(self, worker: str, method: str, *args: Any, engine_name: str) -> None:
        self.calls.append((worker, method))
        if method == self.failing and worker == "critic/0":
            raise self.error
        if method == "evaluate":
            self.over.wait(60)


@pytest.mark.parametrize(
    ("failing", "error", "dropped"),
    [("evaluate", EngineError("out of memory"), 0), ("load_answers", TensorLostError("worker gone"), 2)],
)
def test_evaluate_error_calls_no_rank_that_may_hang_in_a_collective(
    failing: str, error: Exception, dropped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_controller, "_SETTLE_S", 0.1)
    scheduler = HungRank(failing, error)
    spec = RoleSpec("critic", "x", "y", None, ParallelStrategy(data_parallel_size=2), [], SchedulingStrategy(), {})
    controller = CriticController(scheduler, spec)  # type: ignore[arg-type]
    controller._data_ranks, controller._data_size = [0, 1], 2
    try:
        with pytest.raises(type(error), match=str(error)):
            controller.evaluate(trajectories(n_groups=2), None)
        methods = [method for _, method in scheduler.calls]
    finally:
        scheduler.over.set()
        controller.destroy()

    assert methods.count("drop") == dropped
    assert methods.count("load_answers") == 2


def test_rank_evaluates_tables_whose_other_columns_differ(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    config = PPOCriticConfig(
        experiment_name="e", trial_name="t", backend="fsdp:d1", path=str(tmp_path), dtype="float32", is_critic=True
    )
    engine = FSDPEngine(config)
    engine.create_process_group()
    engine.initialize(None, None)
    worker, tables = PPOCriticWorker(config, engine), trajectories(n_groups=2)
    del tables[1]["logprobs"]
    tables[0]["note"] = torch.zeros(4)

    worker.load_answers(1, tables)
    worker.evaluate(1, PPOActorConfig(experiment_name="e", trial_name="t", backend="fsdp:d1", path="x"))

    trained = sum(int(table["loss_mask"].sum()) for table in tables)
    assert stats_tracker.export_all()["ppo_critic-eval/n_valid_tokens"] == trained
    engine.destroy()


SPEC = "[{cpu: 1, mem: 1, env_vars: {OMP_NUM_THREADS: '1'}}]"
ONE_THREAD = (f"critic.scheduling_spec={SPEC}", f"ref.scheduling_spec={SPEC}")


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Hugging Face directory of the initial policy."""
    return tiny_policy(tmp_path_factory.mktemp("policy"))


def _common(policy: str) -> tuple[str, ...]:
    return (
        "critic={optimizer: {lr: 1.0e-2, weight_decay: 0.0, warmup_steps_proportion: 0.0}}",
        "critic.ppo_n_minibatches=1",
        "actor.kl_ctl=0.1",
        f"ref.path={policy}",
        "actor.recompute_logprob=true",
        "actor.gae_lambda=0.9",
        "saver.freq_steps=3",
        "valid_dataset={path: arithmetic, type: rl, batch_size: 4, dataset_kwargs: {start: 100, size: 6}}",
        "evaluator.freq_steps=2",
    )


def _run(root: Path, config: Any) -> None:
    """To the end, with evaluation."""
    valid = rl_rows(rl_config(root, config.actor.path, "train_dataset.dataset_kwargs={start: 100, size: 6}"))
    record_rl(
        config,
        valid=valid,
        trainer_class=PPOTrainer,
        eval_workflow=WORKFLOW,
        eval_workflow_kwargs=workflow_kwargs(config),
    )


@pytest.fixture(scope="module")
def inline(tmp_path_factory: pytest.TempPathFactory, policy: str) -> Any:
    """The same run in one process."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("inline")
    config = rl_config(root, policy, "native.num_threads=1", *_common(policy))
    _run(root / "valid", config)
    return config


def _assert_same_run(config: Any, inline: Any) -> None:
    for mine, theirs in zip(stats_of(inline), stats_of(config), strict=True):
        for key in (
            "ppo_critic/critic_loss/avg",
            "ppo_critic/grad_norm",
            "ppo_critic/old_value/avg",
            "ppo_critic/n_valid_tokens",
            "ppo_actor/update/grad_norm",
            "ppo_actor/advantages/avg",
            "ppo_actor/kl_rewards/avg",
        ):
            assert theirs[key] == pytest.approx(mine[key], rel=1e-3, abs=1e-4), key
        assert theirs["timeperf/critic_train_step"] > 0
    mine, theirs = (stats_of(each)[1] for each in (inline, config))
    for key in ("critic_loss/avg", "explained_variance", "n_valid_tokens"):
        assert theirs[f"ppo_critic-eval/{key}"] == pytest.approx(mine[f"ppo_critic-eval/{key}"], rel=1e-3, abs=1e-4)
    for name in ("default", "critic"):
        one, other = (
            checkpoints(each)[-1].parent.parent / name / checkpoints(each)[-1].name for each in (inline, config)
        )
        expected, found = weights(one), weights(other)
        assert expected.keys() == found.keys()
        for key, tensor in expected.items():
            torch.testing.assert_close(found[key], tensor, rtol=0, atol=2e-4)


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize(
    ("actor", "critic"), [("fsdp:d2", "fsdp:d1"), ("fsdp:d1", "archon:d2")], ids=["d2-d1", "d1-archon_d2"]
)
def test_critic_on_ranks_of_its_own_equals_inline(
    inline: Any, policy: str, tmp_path: Path, actor: str, critic: str
) -> None:
    layouts = (f"actor.backend='{actor}'", f"critic.backend='{critic}'", "ref.backend='fsdp:d1'")
    leaving = ("enable_offload=true", "critic.offload=true", "ref.offload=true", "saver.mode=async")
    config = worker_config(tmp_path, policy, *_common(policy), *layouts, *leaving, *ONE_THREAD)

    _run(tmp_path / "valid", config)

    _assert_same_run(config, inline)
    assert stats_of(config)[1]["timeperf/critic_offload"] > 0


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("fork", ["true", "false"], ids=["same devices", "same processes"])
def test_critic_and_reference_beside_the_actor_equal_inline(
    inline: Any, policy: str, tmp_path: Path, fork: str
) -> None:
    placement = f"{{type: colocation, target: actor, fork: {fork}}}"
    beside = [f"{role}.scheduling_strategy={placement}" for role in ("critic", "ref")]
    config = worker_config(tmp_path, policy, *_common(policy), "actor.backend='fsdp:d2'", *beside)

    _run(tmp_path / "valid", config)

    _assert_same_run(config, inline)
