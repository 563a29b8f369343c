"""A weight update from a trainer to a native sampler in another process, against moving the same bytes bare.

    shm    publish (write, stage, compare, commit) against one memcpy of the same bytes
    xccl   publish by gloo against one gloo broadcast of the same bytes between the same two processes

A random float32 model of 135 M parameters. The first publish of each way (which allocates) is not counted. The sampler
draws a token after every publish: its first step brings large matrices into their layout, which is not part of the
publish and reported as ``first_step`` beside an ordinary ``step`` (the same request once more).
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as workers are started

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
import common

from areal.api.cli_args import NativeConfig
from areal.api.io_struct import GenerationHyperparameters, ModelRequest
from areal.engine.core.remote_weights import RemotePublisher
from areal.engine.core.weight_groups import enter_group, open_store
from areal.engine.core.weight_sender import WeightSender
from areal.engine.core.weight_sources import WeightGroup
from areal.engine.core.weight_transfer import TransferSettings
from areal.engine.inference.weight_endpoint import WeightEndpoint
from areal.trainer.role_worker import WeightDuties

MODELS: dict[str, dict[str, Any]] = {
    "135m": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152},
    "1m": {"hidden_size": 144, "intermediate_size": 384, "num_hidden_layers": 4, "vocab_size": 1024},
}
TIMEOUT_S = 120.0


def build_model(name: str) -> Any:
    """A Llama with random weights."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        **MODELS[name], num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True,
        max_position_embeddings=512,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


class Engine:
    """What a publisher needs of a train engine."""

    device = torch.device("cpu")

    def __init__(self, model: Any) -> None:
        self._pairs = [(name, p.detach()) for name, p in model.named_parameters() if name != "lm_head.weight"]

    def named_full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._pairs)

    @property
    def n_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for _, tensor in self._pairs)


class Trainer(WeightDuties):
    """One train rank, called directly."""

    def __init__(self, engine: Engine) -> None:
        self.weights = WeightSender(engine, lambda: True)  # type: ignore[arg-type]

    def call(self, method: str, *args: Any) -> list[Any]:
        return [self.call_one(0, method, *args)]

    def call_one(self, rank: int, method: str, *args: Any) -> Any:
        return getattr(self, method)(*args)


class SamplerSide(WeightEndpoint):
    """The sampler's process: a native engine, and the bare transfers to compare with."""

    def __init__(self, model: str, threads: int) -> None:
        from areal.engine.native.engine import NativeEngine

        torch.set_num_threads(threads)
        self.sampler = NativeEngine(NativeConfig(max_running_requests=8), build_model(model), dtype="float32")
        self.sampler.start()
        self._flat: Tensor | None = None
        self._member: Any = None

    def is_well(self) -> bool:
        return True

    def pause(self) -> None:
        self.sampler.pause()

    def resume(self) -> None:
        self.sampler.resume()

    def get_version(self) -> int:
        return int(self.sampler.get_version())

    def draw_token(self) -> float:
        """Seconds of a request for one token."""
        settings = GenerationHyperparameters(max_new_tokens=1, ignore_eos=True)
        began = time.perf_counter()
        self.sampler.submit(ModelRequest(input_ids=[1, 2, 3], gconfig=settings)).result()
        return time.perf_counter() - began

    def join_bare(self, group: WeightGroup, n_bytes: int) -> None:
        self._member = enter_group(group)
        self._flat = torch.zeros(n_bytes, dtype=torch.uint8)

    def receive_bare(self) -> None:
        assert self._flat is not None
        self._member.broadcast(self._flat).wait()


def serve(model: str, threads: int, pipe: Any) -> None:
    """The sampler's process: answers one call at a time."""
    side = SamplerSide(model, threads)
    pipe.send("ready")
    while (message := pipe.recv()) is not None:
        method, args = message
        try:
            pipe.send((True, getattr(side, method)(*args)))
        except Exception as exc:  # noqa: BLE001 - raised on the other side
            pipe.send((False, exc))
    side.sampler.stop()


class Sampler:
    """The sampler's process, and the part of a rollout controller that publishers use."""

    alive_names = ("rollout/0",)

    def __init__(self, model: str, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(model, threads, theirs))
        self._process.start()
        assert self._pipe.recv() == "ready"
        self.bring_up_to_date: Any = None
        self.pool = self
        self.members = [type("Member", (), {"worker_id": "rollout/0", "life": 0})]

    def alive(self) -> list[str]:
        return list(self.alive_names)

    def call(self, names: Iterable[str], method: str, *args: Any) -> dict[str, Any]:
        return {name: self.call_one(name, method, *args) for name in names}

    def call_one(self, name: str, method: str, *args: Any) -> Any:
        self.start(method, *args)
        return self.result()

    def start(self, method: str, *args: Any) -> None:
        self._pipe.send((method, args))

    def result(self) -> Any:
        ok, value = self._pipe.recv()
        if not ok:
            raise value
        return value

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join(30)


def timed(work: Callable[[], Any]) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def sides(
    engine: Engine, sampler: Sampler, modes: list[str], first_steps: list[float], steps: list[float]
) -> Mapping[str, Callable[[], float]]:
    """Every measured way, warmed up; the lists take the seconds of the steps after each publish."""
    rollout: Any = sampler
    found: dict[str, Callable[[], float]] = {}
    versions = iter(range(1, 1_000_000))
    for mode in modes:
        settings = TransferSettings(timeout_s=TIMEOUT_S)
        publisher = RemotePublisher(Trainer(engine), rollout, mode=mode, settings=settings)

        def publish(publisher: RemotePublisher = publisher) -> float:
            version = next(versions)
            began = time.perf_counter()
            publisher.stage(version)
            publisher.commit(version)
            seconds = time.perf_counter() - began
            first_steps.append(sampler.call_one("rollout/0", "draw_token"))
            steps.append(sampler.call_one("rollout/0", "draw_token"))
            return seconds

        for _ in range(6):  # both buffers of both sides, and memory that is used again
            publish()
        found[mode] = publish
    first_steps.clear()
    steps.clear()
    if "shm" in modes:
        source, target = (torch.zeros(engine.n_bytes, dtype=torch.uint8) for _ in range(2))
        found["memcpy"] = lambda: timed(lambda: target.copy_(source))
    if "xccl" in modes:
        found["broadcast"] = bare_broadcast(engine, sampler)
    return found


def bare_broadcast(engine: Engine, sampler: Sampler) -> Callable[[], float]:
    """One gloo broadcast of the same bytes to the sampler's process."""
    store = open_store("127.0.0.1", TIMEOUT_S)
    group = WeightGroup("bare", "127.0.0.1", store.port, 2, timeout_s=TIMEOUT_S)
    sampler.start(
        "join_bare", WeightGroup("bare", "127.0.0.1", store.port, 2, rank=1, timeout_s=TIMEOUT_S), engine.n_bytes
    )
    member = enter_group(group, store)
    sampler.result()
    flat = torch.zeros(engine.n_bytes, dtype=torch.uint8)

    def broadcast() -> None:
        sampler.start("receive_bare")
        member.broadcast(flat).wait()
        sampler.result()

    broadcast()
    return lambda: timed(broadcast)


def main() -> None:
    parser = common.arguments(__doc__ or "")
    parser.add_argument("--model", choices=list(MODELS), default="135m")
    parser.add_argument("--modes", nargs="+", default=["shm", "xccl"])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    engine = Engine(build_model(args.model))
    sampler = Sampler(args.model, args.threads)
    first_steps: list[float] = []
    steps: list[float] = []
    try:
        measured = common.alternate(sides(engine, sampler, args.modes, first_steps, steps), args.repeats)
    finally:
        sampler.close()
    bare = {"shm": "memcpy", "xccl": "broadcast"}
    result: dict[str, Any] = {
        "bytes": engine.n_bytes,
        "threads": args.threads,
        "seconds": {
            name: common.summary(values)
            for name, values in {**measured, "first_step": first_steps, "step": steps}.items()
        },
    }
    for mode in args.modes:
        result[f"{mode}/{bare[mode]}"] = common.ratio(measured[mode], measured[bare[mode]])
    common.emit("weight_sync", result, args.out)


if __name__ == "__main__":
    main()
