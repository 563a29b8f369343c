"""Publishing to workers by every route: what arrives, and what holds when something fails at any moment."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from areal.engine.core.remote_weights import RemotePublisher
from areal.engine.core.weight_transfer import TransferSettings, open_route
from areal.infra.weight_update import WeightUpdater
from areal.utils.errors import ConfigError, WeightSyncError
from tests.fakes import tiny_model
from tests.weight_fakes import ModelEngine, Rollout, Trainer, Worker

MODES = ("shm", "xccl", "disk")
PROMPT = [5, 6, 7]


class Run:
    """A trainer, ``count`` workers, and the sequence between them."""

    def __init__(self, root: Path, mode: str, count: int = 1, *, late: bool = False, **model: Any) -> None:
        self.arguments = {**model}
        dtype = self.arguments.pop("dtype", torch.float32)
        self.worker_dtype = self.arguments.pop("worker_dtype", "float32")
        self.engine = ModelEngine(tiny_model(seed=1, **self.arguments), dtype)
        self.trainer = Trainer(self.engine)
        self.made: list[Worker] = []
        rollout: Any = Rollout({f"rollout/{i}": self.worker() for i in range(count)})
        self.rollout = rollout
        settings = TransferSettings(bucket_bytes=4096, timeout_s=20.0, directory=str(root))
        self.publisher = RemotePublisher(
            self.trainer,
            self.rollout,
            mode=mode,
            transfer_while_paused=late,
            settings=settings,  # type: ignore[arg-type]
        )
        self.updater = WeightUpdater(self.publisher, [self.rollout], [])

    def worker(self) -> Worker:
        self.made.append(Worker(tiny_model(seed=0, **self.arguments), self.worker_dtype))
        return self.made[-1]

    @property
    def first(self) -> Worker:
        worker: Worker = self.rollout.workers["rollout/0"]
        return worker

    def assert_serves(self, version: int, *workers: Worker, atol: float = 1e-3) -> None:
        """Workers sample with the trainer's current weights, as ``version``."""
        for worker in workers or tuple(self.rollout.workers.values()):
            tokens, logprobs, versions = worker.sample(PROMPT)
            assert versions == [version] * len(tokens)
            assert logprobs == pytest.approx(self.engine.logprobs(PROMPT + tokens, len(PROMPT)), abs=atol)

    def close(self) -> None:
        self.publisher.close()
        self.trainer.weights.close()
        for worker in self.made:
            worker.sampler.stop()


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Any]:
    made: list[Run] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def build(mode: str, count: int = 1, **settings: Any) -> Run:
        made.append(Run(tmp_path, mode, count, **settings))
        return made[-1]

    yield build
    for run in made:
        run.close()
    torch.set_num_threads(threads)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_update_two_workers_sample_with_the_trainers_weights(runs: Any, mode: str, late: bool) -> None:
    run = runs(mode, 2, late=late)
    before = run.first.sample(PROMPT)
    for version in range(3):
        run.engine.train(version)
        run.updater.update(version)
        run.assert_serves(version)
        after = run.first.sample(PROMPT)
        assert max(abs(a - b) for a, b in zip(before[1], after[1], strict=True)) > 1e-3
        before = after


@pytest.mark.parametrize("mode", MODES)
def test_update_receivers_are_told_its_limit(runs: Any, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = runs(mode)
    real, limits = run.first.sampler.stage_source, []

    def stage(source: Any, version: int) -> Any:
        limits.append(source.timeout_s)
        return real(source, version)

    monkeypatch.setattr(run.first.sampler, "stage_source", stage)
    run.updater.update(1)
    assert limits == [20.0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "model",
    [
        {"tie_word_embeddings": False},
        {"arch": "qwen3"},
        {"dtype": torch.bfloat16},  # float32 sampler
        {"worker_dtype": "bfloat16"},  # float32 trainer
        {"dtype": torch.bfloat16, "worker_dtype": "bfloat16", "tie_word_embeddings": False},
    ],
    ids=["untied", "qwen3", "bf16-to-fp32", "fp32-to-bf16", "bf16"],
)
def test_update_every_kind_of_model_arrives(runs: Any, mode: str, model: dict[str, Any]) -> None:
    run = runs(mode, 1, **model)
    run.engine.train(0)
    if run.engine.dtype == torch.bfloat16:  # what bf16 leaves of the weights, on both sides
        run.engine.model.bfloat16().float()
    run.updater.update(1)
    run.assert_serves(1, atol=1e-3 if run.worker_dtype == "float32" else 0.15)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("method", ["publish_weights", "save_weights", "send_weights", "weight_specs"])
def test_update_failing_trainer_leaves_the_old_version(runs: Any, mode: str, method: str) -> None:
    def broken() -> None:
        raise OSError("no space left")

    run = runs(mode, 2)
    run.updater.update(0)
    old = run.first.sample(PROMPT)
    run.trainer.before[method] = broken
    run.engine.train(0)
    needed = {"shm": "publish_weights", "disk": "save_weights", "xccl": "send_weights"}[mode]
    if method == needed:
        with pytest.raises(WeightSyncError, match="old version stays") as caught:
            run.updater.update(1)
        assert "no space left" in str(caught.value.__cause__)
        assert run.first.sample(PROMPT) == old
        run.trainer.before.clear()
        run.updater.update(1)
    else:
        run.updater.update(1)
    run.assert_serves(1)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("step", ["transfer", "commit"])
def test_update_failing_worker_leaves_the_old_version_everywhere(runs: Any, mode: str, step: str, late: bool) -> None:
    run = runs(mode, 2, late=late)
    run.updater.update(0)
    old = run.first.sample(PROMPT)
    other = run.rollout.workers["rollout/1"]
    method = {"transfer": "receive_weights" if mode == "xccl" else "read_weights", "commit": "commit_weights"}[step]
    other.fails[method] = WeightSyncError("model.norm.weight is broken")
    run.engine.train(0)
    with pytest.raises(WeightSyncError, match="old version stays") as caught:
        run.updater.update(1)
    assert "model.norm.weight" in str(caught.value.__cause__)
    assert other.sample(PROMPT) == old
    if step == "commit" and mode == "xccl":  # the other one had switched, and v0 is gone: it is started again
        assert run.rollout.failed == ["rollout/0"]
    else:
        assert run.first.sample(PROMPT) == old
        other.fails.clear()
        run.updater.update(2)
        run.assert_serves(2)


@pytest.mark.parametrize("mode", MODES)
def test_update_corrupted_bytes_name_worker_and_parameter(runs: Any, mode: str) -> None:
    run = runs(mode, 2)
    run.updater.update(0)
    old = run.first.sample(PROMPT)
    sampler = run.rollout.workers["rollout/1"].sampler
    original = sampler.stage_weights

    def corrupted(pairs: Any, version: int, lasting: bool = False) -> Any:
        return original(((n, t + 1.0 if n == "model.norm.weight" else t) for n, t in pairs), version, lasting)

    sampler.stage_weights = corrupted
    with pytest.raises(WeightSyncError) as caught:
        run.updater.update(1)
    assert "rollout/1, rank 0: weights v1: model.norm.weight was sent as" in str(caught.value.__cause__)
    assert run.first.sample(PROMPT) == old


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("step", ["join", "transfer", "commit"])
def test_update_worker_that_dies_is_left_out_and_comes_back(runs: Any, mode: str, step: str) -> None:
    run = runs(mode, 2)
    run.updater.update(0)
    victim = run.rollout.workers["rollout/1"]
    receive = "receive_weights" if mode == "xccl" else "read_weights"
    method = {"join": "weight_ranks", "transfer": receive, "commit": "commit_weights"}[step]
    victim.dies[method] = victim.kill
    if step == "join":
        victim.kill()
    run.engine.train(0)
    run.updater.update(1)
    run.assert_serves(1, run.first)
    assert run.rollout.alive() == ["rollout/0"]
    run.rollout.return_worker("rollout/1", run.worker())
    run.assert_serves(1)
    run.engine.train(1)
    run.updater.update(2)
    run.assert_serves(2)


@pytest.mark.parametrize("mode", MODES)
def test_update_after_one_that_was_given_up_does_not_touch_the_version_in_service(runs: Any, mode: str) -> None:
    run = runs(mode, 2)
    run.updater.update(1)
    old = run.first.sample(PROMPT)
    receive = "receive_weights" if mode == "xccl" else "read_weights"
    for version in (2, 3):
        run.engine.train(version)
        run.first.fails[receive] = WeightSyncError("cannot")
        with pytest.raises(WeightSyncError):
            run.updater.update(version)
    run.first.fails.clear()
    assert run.first.sample(PROMPT) == old
    if mode != "xccl":
        run.rollout.workers["rollout/1"].kill()
        run.rollout.worker_failed("rollout/1")
        run.rollout.return_worker("rollout/1", run.worker())
        assert run.rollout.workers["rollout/1"].sample(PROMPT) == old


@pytest.mark.parametrize("mode", MODES)
def test_update_sampler_that_is_lost_counts_as_a_lost_worker(runs: Any, mode: str) -> None:
    run = runs(mode, 2)
    victim = run.rollout.workers["rollout/1"]
    victim.fails["receive_weights" if mode == "xccl" else "read_weights"] = WeightSyncError("server closed")
    victim.well = False
    run.updater.update(1)
    run.assert_serves(1, run.first)
    assert "rollout/1" in run.rollout.failed


@pytest.mark.parametrize("mode", MODES)
def test_update_without_any_worker_serves_those_that_come_later(runs: Any, mode: str) -> None:
    run = runs(mode, 1)
    run.updater.update(0)
    run.first.kill()
    run.rollout.member("rollout/0").alive = False
    run.engine.train(0)
    run.updater.update(1)
    run.rollout.return_worker("rollout/0", run.worker())
    run.assert_serves(1)


def test_update_by_broadcast_worker_back_after_a_step_waits_for_the_next_version(runs: Any) -> None:
    run = runs("xccl", 2)
    run.updater.update(0)
    run.rollout.workers["rollout/1"].kill()
    run.rollout.worker_failed("rollout/1")
    run.engine.train(0)  # v0 is nowhere any more
    back = run.worker()
    thread = threading.Thread(target=run.rollout.return_worker, args=("rollout/1", back))
    thread.start()
    time.sleep(0.5)
    assert thread.is_alive()
    run.updater.update(1)
    thread.join(10)
    assert not thread.is_alive()
    run.assert_serves(1)


def test_update_by_broadcast_worker_back_after_a_step_is_sent_nothing_that_it_could_not_take_back(runs: Any) -> None:
    run = runs("xccl", 2)
    run.updater.update(0)
    route = run.publisher._route
    assert route.restore("rollout/0")
    run.first.log.clear()
    run.engine.train(0)
    assert not route.restore("rollout/0")
    assert run.first.log == []  # a server that applies at once would hold weights of no version


def test_update_that_is_interrupted_lets_returning_workers_go_on(runs: Any) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    run = runs("shm", 1)
    run.updater.update(0)
    run.trainer.before["publish_weights"] = interrupt
    with pytest.raises(KeyboardInterrupt):
        run.updater.update(1)
    run.rollout.worker_failed("rollout/0")
    thread = threading.Thread(target=run.rollout.return_worker, args=("rollout/0", run.worker()), daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()


def test_close_ends_the_turn_of_a_worker_that_waits_for_an_update_under_way(runs: Any) -> None:
    run = runs("shm", 1)
    run.publisher.stage(0)
    errors: list[Exception] = []

    def come_back() -> None:
        try:
            run.publisher.bring_up_to_date("rollout/0")
        except Exception as exc:  # noqa: BLE001 - looked at below
            errors.append(exc)

    thread = threading.Thread(target=come_back, daemon=True)
    thread.start()
    time.sleep(0.1)
    run.publisher.close()
    thread.join(5)
    assert not thread.is_alive()
    assert "closed" in str(errors[0])


@pytest.mark.parametrize("end", ["closed", "killed"])
def test_update_by_broadcast_worker_that_waits_does_not_wait_for_ever(runs: Any, end: str) -> None:
    run = runs("xccl", 2)
    run.updater.update(0)
    run.rollout.worker_failed("rollout/1")
    run.engine.train(0)
    back = run.worker()
    errors: list[Exception] = []

    def come_back() -> None:
        try:
            run.rollout.return_worker("rollout/1", back)
        except Exception as exc:  # noqa: BLE001 - looked at below
            errors.append(exc)

    thread = threading.Thread(target=come_back)
    thread.start()
    time.sleep(0.5)
    if end == "closed":
        run.publisher.close()
    else:
        back.kill()
    thread.join(10)
    assert not thread.is_alive()
    assert bool(errors) == (end == "killed")


def test_update_by_directory_keeps_the_newest_one_only(runs: Any, tmp_path: Path) -> None:
    (tmp_path / "weight_update_v7").mkdir()  # of an earlier run
    (tmp_path / "weight_update_vital").mkdir()  # not ours
    run = runs("disk", 1)
    for version in range(3):
        run.updater.update(version)
        assert sorted(p.name for p in tmp_path.iterdir()) == [f"weight_update_v{version}", "weight_update_vital"]
    run.first.fails["read_weights"] = WeightSyncError("cannot read")
    with pytest.raises(WeightSyncError):
        run.updater.update(3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["weight_update_v2", "weight_update_vital"]


def test_update_by_directory_that_lacks_a_tensor_is_refused(runs: Any) -> None:
    run = runs("disk", 1)
    run.updater.update(0)
    old = run.first.sample(PROMPT)
    named = run.engine.named_full_tensors

    def incomplete() -> Any:
        return ((name, tensor) for name, tensor in named() if name != "model.norm.weight")

    run.engine.named_full_tensors = incomplete
    with pytest.raises(WeightSyncError) as caught:
        run.updater.update(1)
    assert "model.norm.weight" in str(caught.value.__cause__)
    assert run.first.sample(PROMPT) == old


@pytest.mark.parametrize("mode", MODES)
def test_update_from_two_threads_takes_turns(runs: Any, mode: str) -> None:
    run = runs(mode, 2)
    threads = [threading.Thread(target=run.updater.update, args=(version,)) for version in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for worker in run.rollout.workers.values():
        moves = [entry for entry in worker.log if entry in ("read_weights", "receive_weights", "commit_weights")]
        assert [entry == "commit_weights" for entry in moves] == [False, True] * 3
    assert {worker.get_version() for worker in run.rollout.workers.values()} <= {1, 2, 3}


def test_open_route_unknown_or_without_directory_is_refused(runs: Any) -> None:
    run = runs("shm")
    with pytest.raises(ConfigError, match="'awex' must be"):
        open_route("awex", run.trainer, run.publisher._workers, TransferSettings())
    with pytest.raises(ConfigError, match="needs a directory"):
        open_route("disk", run.trainer, run.publisher._workers, TransferSettings())
