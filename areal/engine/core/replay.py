"""Runs a captured step again and says whether it fails in the same way.

In: a directory that ``engine/core/failure_capture.py`` wrote. Out: a ``ReplayReport``. Called by ``areal replay``;
every rank of the captured layout must call.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from areal.api.config.convert import build
from areal.api.io_struct import FinetuneSpec, SaveLoadMeta
from areal.engine.core.distributed import group_rank, group_size
from areal.engine.core.failure_capture import StepFindings, StepProbe, TrainCall, locate_bad_tensors
from areal.engine.core.failure_files import (
    CONFIG_FILE,
    FAILURE_FILE,
    FORMAT_VERSION,
    MODEL_DIR,
    STATE_DIR,
    ReplayableLoss,
    decode_batch,
    rank_file,
)
from areal.utils import environ, network
from areal.utils.dynamic_import import import_from_string
from areal.utils.errors import CheckpointError, ConfigError

DEFAULT_TOLERANCE = 1e-4  # another CPU or another number of threads sums in another order


@dataclass
class Comparison:
    """One quantity, as captured and as it came out again."""

    name: str
    captured: Any
    replayed: Any
    same: bool


@dataclass
class ReplayReport:
    """What a replay showed.

    Attributes:
        reason: why the step was captured.
        comparisons: loss, gradient norm, first bad tensors, loss of each micro-batch of this rank.
        update_successful: whether the optimizer stepped this time.
    """

    reason: str
    comparisons: list[Comparison] = field(default_factory=list)
    update_successful: bool = False

    @property
    def reproduced(self) -> bool:
        """Whether every quantity is the same within the tolerance; two values that are not numbers are the same."""
        return all(item.same for item in self.comparisons)

    def lines(self) -> list[str]:
        """The report for people."""
        shown = [
            f"{'same     ' if c.same else 'DIFFERENT'}  {c.name}: captured {c.captured}, replayed {c.replayed}"
            for c in self.comparisons
        ]
        verdict = "reproduced" if self.reproduced else "NOT reproduced"
        step = "taken" if self.update_successful else "skipped, weights unchanged"
        return [f"captured because {self.reason}", *shown, f"optimizer step: {step}", verdict]

    def as_dict(self) -> dict[str, Any]:
        """The report for programs."""
        return {**asdict(self), "reproduced": self.reproduced}


def read_failure(directory: str | Path) -> dict[str, Any]:
    """``failure.json`` of a captured step.

    Raises:
        CheckpointError: the directory is no captured step of a format that this version reads.
    """
    file = Path(directory, FAILURE_FILE)
    try:
        document: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError) as exc:
        raise CheckpointError(f"{directory} is no captured step: {FAILURE_FILE} cannot be read ({exc})") from exc
    if document.get("format") != FORMAT_VERSION:
        raise CheckpointError(
            f"{directory}: captured step of format {document.get('format')}, this version reads {FORMAT_VERSION}"
        )
    return document


def replay_step(
    directory: str | Path,
    *,
    loss_fn: Callable[..., Any] | None = None,
    weight_fn: Callable[..., Any] | None = None,
    tolerance: float = DEFAULT_TOLERANCE,
) -> ReplayReport:
    """Restore the state of before the step, run it, and compare.

    Args:
        directory: a captured step.
        loss_fn, weight_fn: take the place of the captured ones; needed where those cannot be imported.
        tolerance: largest relative difference that counts as the same.

    Raises:
        CheckpointError: the directory is incomplete.
        ConfigError: another number of processes, or a loss that cannot be imported.
    """
    root, document = Path(directory), read_failure(directory)
    if environ.world_size() != document["world_size"]:
        raise ConfigError(
            f"{root} was captured on {document['world_size']} ranks, this job has {environ.world_size()}; "
            f"start it with: torchrun --nproc-per-node {document['world_size']} -m areal.cli replay {root}"
        )
    engine = _restore(root, document)
    try:
        call_loss = loss_fn or _callable(document["loss"], "--loss", engine.config)
        call_weight = weight_fn or _callable(document["weight"], "--weight", engine.config)
        share = _read_share(root / rank_file(group_rank(engine.groups.cpu)))
        recorder = _Recorder(engine)
        engine.loop.watcher = recorder
        engine.train(document["training"])
        batch = decode_batch(share["batch"])
        result = engine.train_batch(batch, call_loss, call_weight, token_mask=document["token_mask"])
        report = _compare(document, share["micro_losses"], recorder.findings, tolerance)
        report.update_successful = bool(result["update_successful"])
        _add_other_ranks(report, engine.groups.cpu)
        return report
    finally:
        engine.destroy()


def ranks_to_start(directory: str | Path) -> int:
    """Local processes that a replay needs and this process is not one of; 0 when it can run right here."""
    saved = int(read_failure(directory)["world_size"])
    return saved if saved > 1 and environ.world_size() == 1 else 0


def start_ranks(ranks: int, arguments: list[str]) -> int:
    """Run ``areal`` with ``arguments`` on that many local processes; returns the largest exit status."""
    port = network.find_free_port()
    common = {**environ.environ_copy(), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    common.setdefault("OMP_NUM_THREADS", "1")
    command = [sys.executable, "-m", "areal.cli", *arguments]
    processes = [
        subprocess.Popen(command, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(ranks)
    ]
    try:
        return max(abs(process.wait()) for process in processes)
    finally:
        for process in processes:
            process.kill()


class _Recorder:
    """Watches one step and keeps what it showed."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.findings = StepFindings(math.nan, math.nan)

    def start(self, call: TrainCall, total_weight: float) -> StepProbe:
        return StepProbe(self.engine.groups, total_weight, self._keep)

    def _keep(self, probe: StepProbe, findings: StepFindings) -> None:
        locate_bad_tensors(self.engine, findings)
        self.findings = findings


def _restore(root: Path, document: dict[str, Any]) -> Any:
    """The engine as it was before the step."""
    settings = json.loads((root / CONFIG_FILE).read_text())
    # The model comes from the recover point, so its path at the time need not exist any more.
    if not settings["use_lora"]:  # of adapters it holds nothing but them: their base is still read from its path
        settings |= {"path": str(root / MODEL_DIR), "init_from_scratch": True}
    settings["fsdp"]["memory_efficient_load"] = False
    settings["failure_capture"]["max_captures"] = 0
    settings["optimizer"]["max_nonfinite_steps"] = 2  # one such step is what we came to see
    config = build(import_from_string(document["config"]), settings)
    engine = import_from_string(document["engine"])(config)
    engine.create_process_group()
    steps = document["schedule_steps"]
    engine.initialize(None, FinetuneSpec(1, steps, 1) if steps else None)
    engine.load(SaveLoadMeta(str(root / STATE_DIR), "dcp", True))
    return engine


def _callable(described: dict[str, Any], option: str, config: Any) -> Callable[..., Any]:
    path = described["import"]
    if path is None:
        raise ConfigError(
            f"{described['name']} cannot be imported in another process; name a function that can: "
            f"{option} pkg.module.name"
        )
    target = import_from_string(path)
    if "arguments" in described:
        assert issubclass(target, ReplayableLoss)
        return target.for_replay(config, described["arguments"])
    function: Callable[..., Any] = target
    return function


def _read_share(file: Path) -> dict[str, Any]:
    try:
        share: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as exc:
        raise CheckpointError(f"{file} cannot be read ({exc}); the captured step is incomplete") from exc
    return share


def _compare(
    document: dict[str, Any], micro_losses: list[float], found: StepFindings, tolerance: float
) -> ReplayReport:
    before = document["findings"]
    pairs: list[tuple[str, Any, Any]] = [
        ("loss", before["loss"], found.loss),
        ("gradient norm", before["grad_norm"], found.grad_norm),
        ("first parameter that is not finite", before["first_bad_parameter"], found.first_bad_parameter),
        ("first gradient that is not finite", before["first_bad_gradient"], found.first_bad_gradient),
        ("micro-batches", len(micro_losses), len(found.micro_losses)),
    ]
    paired = zip(micro_losses, found.micro_losses, strict=False)
    pairs += [(f"loss of micro-batch {i}", a, b) for i, (a, b) in enumerate(paired)]
    comparisons = [Comparison(name, a, b, _same(a, b, tolerance)) for name, a, b in pairs]
    return ReplayReport(document["reason"], comparisons)


def _add_other_ranks(report: ReplayReport, group: dist.ProcessGroup | None) -> None:
    """Make the verdict that of all ranks: each compared the micro-batches of its own."""
    if group is None:
        return
    verdicts = [False] * group_size(group)
    dist.all_gather_object(verdicts, report.reproduced, group=group)
    different = [rank for rank, same in enumerate(verdicts) if not same]
    report.comparisons.append(Comparison("ranks that differ", [], different, not different))


def _same(a: Any, b: Any, tolerance: float) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        both_nan = math.isnan(a) and math.isnan(b)
        return both_nan or math.isclose(a, b, rel_tol=tolerance, abs_tol=1e-12)
    return bool(a == b)
