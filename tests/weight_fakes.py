"""Train ranks and rollout workers in one process, for the tests of weight updates: real engines, real transfers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from areal.api.cli_args import GenerationHyperparameters, NativeConfig
from areal.api.io_struct import ModelRequest, SaveLoadMeta
from areal.engine.core.weight_sender import WeightSender
from areal.engine.inference.weight_endpoint import WeightEndpoint
from areal.engine.native.engine import NativeEngine
from areal.trainer.role_worker import WeightDuties
from areal.utils.errors import InfrastructureError


class ModelEngine:
    """The part of a train engine that publishes: a whole Hugging Face model."""

    device = torch.device("cpu")

    def __init__(self, model: Any, dtype: torch.dtype = torch.float32) -> None:
        self.model, self.dtype = model, dtype

    def named_full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        tied = self.model.config.tie_word_embeddings
        for name, parameter in self.model.named_parameters():
            if not (tied and name == "lm_head.weight"):
                yield name, parameter.detach().to(self.dtype)

    def save(self, meta: SaveLoadMeta) -> None:
        from safetensors.torch import save_file

        path = Path(meta.path)
        path.mkdir(parents=True)
        save_file({name: tensor.contiguous() for name, tensor in self.named_full_tensors()}, path / "model.safetensors")
        self.model.config.save_pretrained(path)

    def train(self, seed: int) -> None:
        """Change every parameter."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))

    def logprobs(self, tokens: list[int], start: int) -> list[float]:
        """Of ``tokens[start:]`` under the current weights."""
        with torch.no_grad():
            logits = self.model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
        return [float(logits[i - 1, tokens[i]]) for i in range(start, len(tokens))]


class Trainer(WeightDuties):
    """One rank, and the calls of a ``RankGroup`` on it."""

    def __init__(self, engine: ModelEngine) -> None:
        self.engine = engine
        self.weights = WeightSender(engine, lambda: True)  # type: ignore[arg-type]
        self.before: dict[str, Callable[[], None]] = {}  # method -> what happens first

    def call(self, method: str, *args: Any) -> list[Any]:
        return [self.call_one(0, method, *args)]

    def call_one(self, rank: int, method: str, *args: Any) -> Any:
        assert rank == 0
        if (hook := self.before.get(method)) is not None:
            hook()
        return getattr(self, method)(*args)


class Worker(WeightEndpoint):
    """A rollout worker with a native engine; ``fails`` has methods that raise, ``dies`` those it does not survive."""

    def __init__(self, model: Any, dtype: str = "float32") -> None:
        self.sampler = NativeEngine(NativeConfig(max_running_requests=4), model, dtype=dtype)
        self.sampler.start()
        self.alive = self.well = True
        self.fails: dict[str, Exception] = {}
        self.dies: dict[str, Callable[[], None]] = {}
        self.log: list[str] = []

    def is_well(self) -> bool:
        return self.well

    def get_version(self) -> int:
        return int(self.sampler.get_version())

    def pause(self) -> None:
        self.sampler.pause()

    def resume(self) -> None:
        self.sampler.resume()

    def kill(self) -> None:
        """What the end of its process does."""
        self.alive = False
        for name in list(self.sampler._groups._members):
            self.sampler._groups.leave(name)

    def sample(self, prompt: list[int], count: int = 5) -> tuple[list[int], list[float], list[int]]:
        gconfig = GenerationHyperparameters(greedy=True, max_new_tokens=count, ignore_eos=True)
        reply = self.sampler.submit(ModelRequest(input_ids=prompt, gconfig=gconfig)).result(timeout=60)
        return reply.output_tokens, reply.output_logprobs, reply.output_versions


@dataclass
class Member:
    """One worker as the pool sees it."""

    worker_id: str
    life: int = 0
    alive: bool = True


class Rollout:
    """The part of a ``RolloutController`` that publishers use."""

    def __init__(self, workers: dict[str, Worker]) -> None:
        self.workers = workers
        self.pool = self
        self.members = [Member(name) for name in workers]
        self.failed: list[str] = []
        self.bring_up_to_date: Any = None
        self._lock = threading.Lock()

    def member(self, name: str) -> Member:
        return next(member for member in self.members if member.worker_id == name)

    def alive(self) -> list[str]:
        return [member.worker_id for member in self.members if member.alive]

    def worker_failed(self, worker_id: str) -> None:
        with self._lock:
            self.failed.append(worker_id)
            self.member(worker_id).alive = False

    def call(self, names: Iterable[str], method: str, *args: Any) -> dict[str, Any]:
        found = {}
        for name in list(names):
            try:
                found[name] = self.call_one(name, method, *args)
            except InfrastructureError:
                if self.workers[name].alive:
                    raise
                self.worker_failed(name)
        return found

    def call_one(self, name: str, method: str, *args: Any) -> Any:
        worker = self.workers[name]
        if method in worker.dies and worker.alive:
            threading.Thread(target=worker.dies[method]).start()
        if not worker.alive:
            raise InfrastructureError(f"{name} is dead")
        worker.log.append(method)
        if method in worker.fails:
            raise worker.fails[method]
        value = getattr(worker, method)(*args)
        if not worker.alive:
            raise InfrastructureError(f"{name} died")
        return value

    def pause(self) -> None:
        self.call(self.alive(), "pause")

    def resume(self) -> None:
        self.call(self.alive(), "resume")

    def return_worker(self, name: str, worker: Worker) -> None:
        """A new life of a worker: brought up to date, then in service."""
        self.workers[name] = worker
        self.member(name).life += 1
        self.bring_up_to_date(name)
        self.member(name).alive = True
