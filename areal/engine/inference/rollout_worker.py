"""The object that a rollout worker hosts: an inference engine, and the episodes of the rows that the controller sends.

    submit(orders) ─► episodes in the worker's loop ─► table kept in the store ─► report ─► collect()

Reports stay until the controller has acknowledged them, so a lost reply loses nothing. Weights are staged while
generation goes on and exchanged between two decode steps. Hosted as ``rollout/<i>``; called by
``areal.infra.controller.worker_pool``.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from areal.api.remote import remote
from areal.api.trajectory import Row
from areal.engine.inference.episode_sampler import EpisodeSampler
from areal.engine.inference.probe import ProbeReply, probe_sampler
from areal.engine.inference.weight_endpoint import WeightEndpoint
from areal.infra.controller.tables import store_table
from areal.infra.rollout.acceptance import resolve_accept_fn
from areal.infra.rollout.admission import admission_gate, admit_together
from areal.infra.rollout.dump import build_dumper
from areal.infra.rollout.groups import GroupResult, GroupRunner, GroupTask
from areal.infra.rollout.orders import GroupOrder, GroupReport, SampleFailure
from areal.infra.rollout.task_runner import AsyncTaskRunner
from areal.utils import logging, perf_tracer, stats_tracker
from areal.utils.dynamic_import import import_from_string

if TYPE_CHECKING:
    from areal.api.cli_args import InferenceEngineConfig, NativeConfig, PerfTracerConfig
    from areal.infra.rollout.recipe import WorkflowRecipe

logger = logging.getLogger("RolloutWorker")

_SETTLE_S, _POLL_S = 2.0, 0.05

NATIVE_SAMPLER = "areal.engine.inference.rollout_worker.native_sampler"


@dataclass
class RolloutSetup:
    """What a rollout worker is made of.

    Attributes:
        rollout, native: their config sections.
        model_path, tokenizer_path: Hugging Face directories.
        dtype: compute dtype of the embedded engine.
        run_seed: seed of the run.
        index: number of the worker.
        sampler: import path of ``(setup) -> sampler``.
        perf_tracer: tracing of this worker.
        arguments: further settings of the sampler.
    """

    rollout: InferenceEngineConfig
    native: NativeConfig
    model_path: str
    tokenizer_path: str
    dtype: str | None
    run_seed: int
    index: int = 0
    sampler: str = NATIVE_SAMPLER
    perf_tracer: PerfTracerConfig | None = None
    arguments: dict[str, Any] = field(default_factory=dict)


def native_sampler(setup: RolloutSetup) -> Any:
    """The embedded engine on the setup's model, started."""
    from areal.engine.native.engine import NativeEngine
    from areal.utils.hf_utils import load_hf_tokenizer

    tokenizer = load_hf_tokenizer(setup.tokenizer_path)
    sampler = NativeEngine(setup.native, setup.model_path, tokenizer=tokenizer, dtype=setup.dtype)
    sampler.start()
    return sampler


class RolloutWorker(WeightEndpoint):
    """Runs groups for a controller.

    Args:
        setup: see :class:`RolloutSetup`.
    """

    def __init__(self, setup: RolloutSetup) -> None:
        self.setup = setup
        if setup.perf_tracer is not None:
            perf_tracer.configure(setup.perf_tracer, rank=setup.index, role="rollout")
        self.sampler = import_from_string(setup.sampler)(setup)
        config = setup.rollout
        self._engine = EpisodeSampler(self.sampler)
        self._gate = admission_gate(self.sampler)
        self._groups = GroupRunner(self._engine, setup.run_seed, config.episode_timeout_s)
        tokenizer = getattr(self.sampler, "tokenizer", None)
        self._dumper = build_dumper(config, tokenizer, False, config.dump_dir)
        self._recipes: dict[int, tuple[Any, Any]] = {}
        self._outbox = _Outbox()
        self._known: set[int] = set()
        self._failure: BaseException | None = None
        self._runner = AsyncTaskRunner("episodes", self._fail)
        self._runner.initialize()
        self.sampler.on_failure = self._fail  # a server that died, say: the pool replaces this worker
        if self.sampler.failure is not None:  # it died before anybody listened
            self._fail(self.sampler.failure)

    # -- episodes ------------------------------------------------------------------------------------------------------

    @remote(concurrent=True, idempotent=True)
    def define(self, number: int, recipe: WorkflowRecipe, accept: Any) -> None:
        """Build the workflow of orders that carry ``number``; raises what building it raises."""
        if number not in self._recipes:
            self._recipes[number] = (recipe.build(), resolve_accept_fn(accept))

    @remote(concurrent=True, idempotent=True)
    def submit(self, orders: list[GroupOrder], together: bool) -> None:
        """Start groups; those that are known already are left alone. ``together``: the engine admits them as one."""
        fresh = [order for order in orders if order.key not in self._known]
        self._known.update(order.key for order in fresh)
        self._runner.call(self._start, fresh, together)

    @remote(concurrent=True, idempotent=True)
    async def collect(self, acknowledged: int, timeout_s: float) -> tuple[int, list[GroupReport]]:
        """Reports after number ``acknowledged`` and the number of the last one; waits for at least one, or the limit.

        Raises:
            RolloutStoppedError: the episodes' loop has died.
        """
        if self._failure is not None:
            raise self._failure
        return await self._outbox.after(acknowledged, timeout_s)

    def _start(self, orders: list[GroupOrder], together: bool) -> None:
        starts = [partial(self._launch, order) for order in orders]
        samples = sum(order.group_size for order in orders)
        if together and self._gate is not None and samples > 1:
            self._runner.start(admit_together(self._gate, starts, samples))
        else:
            for start in starts:
                start()

    def _launch(self, order: GroupOrder, on_request: Callable[[], None] | None = None) -> None:
        self._runner.start(self._run(order, on_request))

    async def _run(self, order: GroupOrder, on_request: Callable[[], None] | None) -> None:
        workflow, accept = self._recipes[order.recipe]
        task = GroupTask(
            order.task_id,
            order.data,
            workflow,
            accept,
            order.group_size,
            Row(order.epoch, order.position, order.index),
            order.group_id,
            order.from_loader,
            order.is_eval,
        )
        result = await self._groups.run(task, on_request)
        if self._dumper is not None and result.ref is not None:
            self._dumper.write(task.task_id, result.ref, result.status, task.is_eval)
        self._known.discard(order.key)
        self._outbox.put(_report(order, result))

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        self._outbox.wake()

    # -- weights -------------------------------------------------------------------------------------------------------

    @remote(concurrent=True)
    def is_well(self) -> bool:
        """Whether this worker can go on; a server that just broke off has a moment to say so."""
        deadline = time.monotonic() + _SETTLE_S
        while self._failure is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return self._failure is None

    @remote(concurrent=True)
    def pause(self) -> None:
        """Freeze the sampler between two steps."""
        self.sampler.pause()

    @remote(concurrent=True)
    def resume(self) -> None:
        """Undo one pause."""
        self.sampler.resume()

    @remote(concurrent=True, idempotent=True)
    def get_version(self) -> int:
        """Weight version of the next token."""
        return int(self.sampler.get_version())

    @remote(concurrent=True, idempotent=True)
    async def probe(self, prompt_ids: list[int], n: int, temperature: float = 1.0) -> ProbeReply:
        """Draw ``n`` tokens after a prompt, for the trainer to score; see ``areal.trainer.weight_probe``."""
        return await probe_sampler(self.sampler, prompt_ids, n, temperature)

    # -- service -------------------------------------------------------------------------------------------------------

    @remote(concurrent=True)
    def export_stats(self) -> dict[str, float]:
        """What workflows recorded since the last call."""
        return dict(stats_tracker.export_all())

    @remote(concurrent=True, idempotent=True)
    def save_perf_tracer(self, step: int | None = None) -> None:
        """Write this worker's trace."""
        perf_tracer.save(step=step)

    def status(self) -> dict[str, Any]:
        """For people: what is going on here."""
        return {"in_flight": len(self._known), "version": self.get_version(), "reports_kept": len(self._outbox)}

    def destroy(self) -> None:
        """Stop episodes and the sampler; finish the dumps. Safe to call twice."""
        self._runner.destroy(timeout_s=5.0)
        if self._dumper is not None:
            self._dumper.close()
        self.sampler.stop()


class _Outbox:
    """Numbered reports, kept until they are acknowledged; filled in one thread, read on another thread's loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reports: list[GroupReport] = []
        self._first = 1  # number of the oldest report kept
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def __len__(self) -> int:
        return len(self._reports)

    def put(self, report: GroupReport) -> None:
        """Add a report and wake who waits for one."""
        with self._lock:
            self._reports.append(report)
        self.wake()

    def wake(self) -> None:
        """Have waiting readers look again."""
        with self._lock:
            waiters, self._waiters = self._waiters, []
        for loop, event in waiters:
            loop.call_soon_threadsafe(event.set)

    async def after(self, acknowledged: int, timeout_s: float) -> tuple[int, list[GroupReport]]:
        """Forget reports up to ``acknowledged``; return the ones after it, waiting for the first."""
        event = asyncio.Event()
        with self._lock:
            done = max(0, acknowledged + 1 - self._first)
            del self._reports[:done]
            self._first += done
            if not self._reports:
                self._waiters.append((asyncio.get_running_loop(), event))
            else:
                event.set()
        try:
            async with asyncio.timeout(timeout_s):
                await event.wait()
        except TimeoutError:
            pass
        with self._lock:
            self._waiters = [waiter for waiter in self._waiters if waiter[1] is not event]
            return self._first + len(self._reports) - 1, list(self._reports)


def _report(order: GroupOrder, result: GroupResult) -> GroupReport:
    failures = [SampleFailure.of(end) for end in result.ends if end is not None]
    report = GroupReport(order.key, result.status, failures, len(result.ends) - len(failures), result.dropped)
    ref = result.ref
    if ref is not None and (result.status == "accepted"):
        report.shard = store_table(ref.data)
        report.lengths, report.rewards = ref.lengths, ref.rewards
        report.min_version, report.max_version = ref.min_version, ref.max_version
        report.columns = tuple(ref.data)
    return report
