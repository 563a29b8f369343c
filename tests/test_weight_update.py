"""The one sequence around a weight update: order, failure, and that two updates take turns."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from areal.api.cli_args import GenerationHyperparameters, NativeConfig
from areal.api.io_struct import ModelRequest
from areal.engine.core.weight_sync import InProcessPublisher
from areal.engine.native.engine import NativeEngine
from areal.infra.weight_update import WeightUpdater
from areal.utils.errors import WeightSyncError
from tests.fakes import tiny_model


class Recorder:
    """Publisher, sampler and follower in one: writes down what it is asked, and fails where told."""

    def __init__(self, log: list[str], name: str, fails_at: str = "") -> None:
        self.log, self.name, self.fails_at = log, name, fails_at
        self.version = 0
        self.interrupted_at = ""

    def _note(self, what: str) -> None:
        self.log.append(f"{self.name}.{what}")
        if what == self.interrupted_at:
            raise KeyboardInterrupt
        if what == self.fails_at:
            raise OSError(f"{self.name} broke")

    def stage(self, version: int) -> None:
        self._note("stage")

    def commit(self, version: int) -> None:
        self._note("commit")

    def discard(self) -> None:
        self._note("discard")

    def pause(self) -> None:
        self._note("pause")

    def resume(self) -> None:
        self._note("resume")

    def set_version(self, version: int) -> None:
        self.version = version
        self._note("set_version")


def updater(log: list[str], fails_at: str = "", sampler_fails_at: str = "") -> WeightUpdater:
    samplers = [Recorder(log, "s1"), Recorder(log, "s2", sampler_fails_at)]
    followers = [Recorder(log, "executor"), Recorder(log, "engine")]
    return WeightUpdater(Recorder(log, "publisher", fails_at), samplers, followers)


def test_update_stages_first_then_pauses_commits_and_resumes() -> None:
    log: list[str] = []
    updater(log).update(1)
    assert log == [
        "publisher.stage",
        "s1.pause",
        "s2.pause",
        "publisher.commit",
        "executor.set_version",
        "engine.set_version",
        "s2.resume",
        "s1.resume",
    ]


@pytest.mark.parametrize(("publisher_fails", "sampler_fails"), [("stage", ""), ("commit", ""), ("", "pause")])
def test_update_that_fails_keeps_the_old_version_and_resumes(publisher_fails: str, sampler_fails: str) -> None:
    log: list[str] = []
    with pytest.raises(WeightSyncError, match="old version stays") as caught:
        updater(log, publisher_fails, sampler_fails).update(3)
    assert isinstance(caught.value.__cause__, OSError)
    assert "publisher.discard" in log
    assert not [entry for entry in log if "set_version" in entry]
    paused = [entry.split(".")[0] for entry in log if entry.endswith(".pause")]
    resumed = [entry.split(".")[0] for entry in log if entry.endswith(".resume")]
    assert set(resumed) == set(paused) - ({"s2"} if sampler_fails else set())


def test_update_after_a_failed_one_works() -> None:
    log: list[str] = []
    weights = updater(log, "stage")
    with pytest.raises(WeightSyncError):
        weights.update(1)
    weights.publisher.fails_at = ""  # type: ignore[attr-defined]
    log.clear()
    weights.update(1)
    assert log[-1] == "s1.resume"


def test_concurrent_updates_take_turns() -> None:
    log: list[str] = []
    weights = updater(log)
    original = weights.publisher.stage

    def slow(version: int) -> None:
        original(version)
        time.sleep(0.05)

    weights.publisher.stage = slow  # type: ignore[method-assign]
    threads = [threading.Thread(target=weights.update, args=(version,)) for version in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    size = len(log) // 3
    assert log[:size] == log[size : 2 * size] == log[2 * size :]


@pytest.fixture
def served() -> Any:
    """A running native engine, its model and a publisher of a trainer's model into it."""
    trainer_model = tiny_model(seed=1)
    engine = NativeEngine(NativeConfig(max_running_requests=4), tiny_model(seed=0), dtype="float32")
    engine.start()

    def tensors() -> Any:
        return ((name, p) for name, p in trainer_model.named_parameters() if name != "lm_head.weight")

    yield engine, trainer_model, InProcessPublisher(tensors, engine)
    engine.stop()


def greedy(engine: NativeEngine) -> tuple[list[int], list[float], list[int]]:
    gconfig = GenerationHyperparameters(greedy=True, max_new_tokens=5, ignore_eos=True)
    reply = engine.submit(ModelRequest(input_ids=[5, 6, 7], gconfig=gconfig)).result(timeout=60)
    return reply.output_tokens, reply.output_logprobs, reply.output_versions


def test_real_update_changes_what_is_sampled_and_its_version(served: Any) -> None:
    engine, trainer_model, publisher = served
    before = greedy(engine)
    WeightUpdater(publisher, [engine], []).update(4)
    after = greedy(engine)
    assert before[2] == [0] * 5
    assert after[2] == [4] * 5
    with torch.no_grad():
        logits = trainer_model(torch.tensor([[5, 6, 7]])).logits[0, -1].log_softmax(-1)
    assert after[0][0] == int(logits.argmax())
    assert after[1][0] == pytest.approx(float(logits.max()), abs=1e-4)


def test_real_update_with_corrupted_bytes_is_refused(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _, publisher = served
    before = greedy(engine)
    original = engine.stage_weights

    def corrupted(pairs: Any, version: int) -> Any:
        return original(((name, tensor + (name.endswith("norm.weight")) * 1.0) for name, tensor in pairs), version)

    monkeypatch.setattr(engine, "stage_weights", corrupted)
    with pytest.raises(WeightSyncError, match="not published") as caught:
        WeightUpdater(publisher, [engine], []).update(1)
    assert "was sent as" in str(caught.value.__cause__)
    assert greedy(engine) == before


def test_sampler_owns_its_copy_of_the_weights(served: Any) -> None:
    engine, trainer_model, publisher = served
    WeightUpdater(publisher, [engine], []).update(1)
    before = greedy(engine)
    with torch.no_grad():
        for parameter in trainer_model.parameters():
            parameter.add_(1.0)
    assert greedy(engine) == before


@pytest.mark.parametrize("step", ["stage", "commit"])
def test_update_that_is_interrupted_is_discarded_and_stays_an_interrupt(step: str) -> None:
    log: list[str] = []
    update = updater(log)
    update.publisher.interrupted_at = step  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        update.update(1)
    assert "publisher.discard" in log
    assert log.count("s1.pause") == log.count("s1.resume")


def test_update_whose_discard_fails_still_says_why_it_was_given_up() -> None:
    log: list[str] = []
    update = updater(log, fails_at="stage")

    def broken() -> None:
        raise ValueError("cannot discard")

    update.publisher.discard = broken  # type: ignore[method-assign]
    with pytest.raises(WeightSyncError) as caught:
        update.update(1)
    assert "publisher broke" in str(caught.value.__cause__)
