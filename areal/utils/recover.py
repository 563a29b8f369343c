"""Recover points: everything a run needs to go on after a crash, in one directory that appears complete or not at all.

::

    {save root}/recover/globalstep{g}/          renamed to this name when every file is on the disk
        {engine name}/                          DCP shards: model, optimizer, schedule, RNG per rank, version
        recover_info/*.json                     step, counters, cursor, executor state; each file has a format version
    {save root}/recover_info                 -> the newest point's recover_info  (links for people)
    {save root}/{name}/recover_checkpoint    -> the newest point's {name}

The previous point is removed after the new one is complete. No file is pickled. The trainer calls ``dump`` once per
step and ``load`` once at the start; publishing the loaded weights to the samplers is the trainer's part.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from areal.api.io_struct import SaveLoadMeta, StepInfo
from areal.utils import fs, logging, ranks
from areal.utils.errors import ArealError, CheckpointError, RecoverInfoError
from areal.utils.manifest import write_manifest
from areal.utils.plain_json import decode, encode
from areal.utils.timeutil import EpochStepTimeFreqCtl, StepTracker

if TYPE_CHECKING:
    from areal.api.config.timers import RecoverConfig
    from areal.api.io_struct import FinetuneSpec
    from areal.utils.evaluator import Evaluator
    from areal.utils.saver import SavableEngine, Saver
    from areal.utils.stats_logger import StatsLogger

logger = logging.getLogger("RecoverHandler")

FORMAT = 1
INFO_DIR = "recover_info"
WITH_OPTIM = "with_optim"  # entry of checkpoint_info: whether the shards hold optimizer state
_ASIDE_TOKEN = "dumping"  # the same on every rank, so that all of them write into one directory
_POINT = re.compile(r"globalstep(\d+)")
_ACTIVE_MODES = ("on", "auto")

InValidRecoverInfo = RecoverInfoError  # the name of 1.x


class Stateful(Protocol):
    """A data loader, or anything else whose position is a plain value."""

    def state_dict(self) -> dict[str, Any]:
        """The position."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Go to a position."""
        ...


@dataclass
class RecoverInfo:
    """Where a run stood after a step.

    ``dataloader_info`` is a list with one state per rank; ``extra`` is what the caller added (executor state).
    """

    last_step_info: StepInfo
    saver_info: dict[str, Any] = field(default_factory=dict)
    evaluator_info: dict[str, Any] = field(default_factory=dict)
    stats_logger_info: dict[str, Any] = field(default_factory=dict)
    dataloader_info: list[Any] = field(default_factory=list)
    checkpoint_info: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    def dump(self, directory: fs.PathLike) -> None:
        """Write one JSON file per field into ``directory`` (created)."""
        root = Path(directory)
        root.mkdir(parents=True, exist_ok=True)
        for name, value in self._files().items():
            fs.atomic_write_json(root / f"{name}.json", {"format": FORMAT, "value": encode(value)})

    @classmethod
    def load(cls, directory: fs.PathLike) -> RecoverInfo:
        """Read what ``dump`` wrote.

        Raises:
            FileNotFoundError: there is no such directory.
            RecoverInfoError: a file is missing, damaged or of another format; the message names it.
        """
        root = Path(directory)
        if not root.is_dir():
            raise FileNotFoundError(f"no recover info at {root}")
        values: dict[str, Any] = {name: _read(root / f"{name}.json") for name in _FILES}
        try:
            step = StepInfo(**values.pop("step_info"))
        except TypeError as exc:
            raise RecoverInfoError(f"{root}/step_info.json: {exc}") from exc
        return cls(last_step_info=step, **values)

    def _files(self) -> dict[str, Any]:
        return {
            "step_info": asdict(self.last_step_info),
            **{name: getattr(self, name) for name in _FILES if name != "step_info"},
        }


_FILES = (
    "step_info",
    "saver_info",
    "evaluator_info",
    "stats_logger_info",
    "dataloader_info",
    "checkpoint_info",
    "extra",
)


class RecoverHandler:
    """Writes and reads the recover points of one trial.

    Args:
        config: ``mode`` (on and auto act; off and disabled do nothing), frequencies, ``no_save_optim``,
            ``no_load_optim``, paths.
        ft_spec: tells where an epoch ends.
        manifest: goes into every recover point, see ``utils.manifest``.
    """

    def __init__(
        self, config: RecoverConfig, ft_spec: FinetuneSpec, *, manifest: Mapping[str, Any] | None = None
    ) -> None:
        self.config = config
        self.ft_spec = ft_spec
        self.manifest = dict(manifest or {})
        self._tracker = StepTracker(EpochStepTimeFreqCtl(config.freq_epochs, config.freq_steps, config.freq_secs))

    @property
    def active(self) -> bool:
        """Whether the mode asks for recover points at all."""
        return self.config.mode in _ACTIVE_MODES

    def dump(  # noqa: PLR0913 - public signature
        self,
        engine: SavableEngine | Mapping[str, SavableEngine],
        step_info: StepInfo,
        saver: Saver,
        evaluator: Evaluator,
        stats_logger: StatsLogger,
        dataloader: Stateful | None = None,
        tokenizer: Any = None,
        processor: Any = None,
        base_model_path: str | None = None,
        *,
        extra: Mapping[str, Any] | None = None,
        force: bool = False,
    ) -> str | None:
        """Write a recover point if this step is due. Every rank calls.

        Args:
            engine: one engine (named ``default``) or ``{name: engine}``.
            step_info: the step that just ended.
            saver: its counters are kept.
            evaluator: its counters are kept.
            stats_logger: its counter is kept.
            dataloader: its cursor is kept, of every rank.
            tokenizer: handed to the engine.
            processor: handed to the engine.
            base_model_path: handed to the engine.
            extra: plain data of the caller, such as the executor's state; comes back in ``RecoverInfo.extra``.
            force: write now, due or not (before a planned stop), if the mode is on.

        Returns:
            The recover point's directory, or None when nothing was due.
        """
        if not self.active:
            return None
        due = self._tracker.due(step_info.epoch_step, step_info.global_step, step_info.steps_per_epoch)
        if not (due or force):
            return None
        saver.wait()  # a run that goes on from here would not write a checkpoint of the past again
        info = RecoverInfo(
            last_step_info=step_info,
            saver_info=saver.state_dict(),
            evaluator_info=evaluator.state_dict(),
            stats_logger_info=dict(stats_logger.state_dict()),
            dataloader_info=ranks.gather_json(encode(None if dataloader is None else dataloader.state_dict())),
            checkpoint_info={**self._tracker.state_dict(), WITH_OPTIM: not self.config.no_save_optim},
            extra=dict(extra or {}),
        )
        engines = engine if isinstance(engine, Mapping) else {"default": engine}
        meta = SaveLoadMeta(
            path="",
            weight_format="dcp",
            with_optim=not self.config.no_save_optim,
            tokenizer=tokenizer,
            processor=processor,
            base_model_path=base_model_path,
        )
        return self._write(engines, meta, info)

    def load(
        self,
        engine: SavableEngine | Mapping[str, SavableEngine],
        saver: Saver,
        evaluator: Evaluator,
        stats_logger: StatsLogger,
        dataloader: Stateful | None = None,
    ) -> RecoverInfo | None:
        """Bring everything back to the newest complete recover point. Every rank calls.

        Later rows of ``stats.jsonl`` are cut away. The caller goes on at ``info.last_step_info.next()``, gives
        ``info.extra`` back to whom it belongs, and publishes the weights as version ``last global step + 1``.

        Returns:
            What was loaded, or None when the mode is off or there is no recover point (a fresh start).

        Raises:
            RecoverInfoError: there is a recover point, but it cannot be used.
        """
        if not self.active:
            return None
        root = _points_root(self.config)
        if ranks.is_first_rank():
            _clean(root)
        ranks.barrier()
        points = recover_points(self.config)
        if not points:
            logger.warning("recover.mode=%s, but there is no recover point in %s: fresh start", self.config.mode, root)
            return None
        point = points[-1]
        info = RecoverInfo.load(point / INFO_DIR)
        with_optim = self._loads_optimizer(point, bool(info.checkpoint_info.get(WITH_OPTIM, True)))
        for name, one in engine.items() if isinstance(engine, Mapping) else [("default", engine)]:
            _load_engine(one, point / name, with_optim)
        saver.load_state_dict(info.saver_info)
        evaluator.load_state_dict(info.evaluator_info)
        evaluator.catch_up(info.last_step_info)
        stats_logger.load_state_dict(info.stats_logger_info)
        stats_logger.resume_after(info.last_step_info.global_step)
        self._tracker.load_state_dict(info.checkpoint_info)
        if dataloader is not None:
            dataloader.load_state_dict(_state_of_rank(info.dataloader_info))
        logger.info("resumed after step %d from %s", info.last_step_info.global_step, point)
        return info

    def _write(self, engines: Mapping[str, SavableEngine], meta: SaveLoadMeta, info: RecoverInfo) -> str:
        """Write aside, rename, then drop older points."""
        step = info.last_step_info.global_step
        target = _points_root(self.config) / f"globalstep{step}"
        aside = fs.aside_path(target, _ASIDE_TOKEN)
        first = ranks.is_first_rank()
        with ranks.together(f"recover point {target}", CheckpointError):
            if first:
                _clean(target.parent)
                for name in engines:
                    (aside / name).mkdir(parents=True)
        try:
            for name, one in engines.items():
                meta.path = str(aside / name)
                one.save(meta)
            with ranks.together(f"recover point {target} could not be written", CheckpointError):
                if first:
                    info.dump(aside / INFO_DIR)
                    write_manifest(aside, self.manifest, global_step=step)
                    fs.publish_directory(aside, target)
        except BaseException:
            if first:
                with suppress(OSError):  # the reason of the failure is worth more than this one
                    fs.remove_tree(aside)
            raise
        with ranks.together(f"recover points older than {target}", CheckpointError):
            if first:
                self._after_publish(target, list(engines))
                logger.info("recover point of step %d written to %s", step, target)
        return str(target)

    def _after_publish(self, target: Path, names: list[str]) -> None:
        """Point the well-known names at the new point and remove every other point."""
        save_root = target.parent.parent
        for link, inside in [(INFO_DIR, INFO_DIR), *((f"{name}/recover_checkpoint", name) for name in names)]:
            try:
                fs.replace_symlink(save_root / link, target / inside)
            except OSError as exc:
                logger.warning("cannot link %s to the newest recover point: %s", save_root / link, exc)
        for old in recover_points(self.config):
            if old != target:
                fs.retire_directory(old)

    def _loads_optimizer(self, point: Path, saved: bool) -> bool:
        """Whether to load optimizer state: unless told not to; a point without it is refused, unless expected."""
        if saved or self.config.no_save_optim or self.config.no_load_optim:
            return saved and not self.config.no_load_optim
        raise RecoverInfoError(
            f"{point} holds no optimizer state: it was written with recover.no_save_optim=true. Set "
            "recover.no_load_optim=true to go on with fresh optimizer state"
        )


def _load_engine(engine: SavableEngine, path: Path, with_optim: bool) -> None:
    if not path.is_dir():
        raise RecoverInfoError(f"{path.parent} has no checkpoint of engine {path.name!r}; was it added since?")
    engine.load(SaveLoadMeta(path=str(path), weight_format="dcp", with_optim=with_optim))


def recover_points(config: RecoverConfig) -> list[Path]:
    """Complete recover points of the trial, oldest first."""
    root = _points_root(config)
    found = (
        [(int(m[1]), entry) for entry in root.iterdir() if (m := _POINT.fullmatch(entry.name))] if root.is_dir() else []
    )
    return [entry for _, entry in sorted(found)]


def check_if_recover(config: RecoverConfig, run_id: int = 0) -> bool:
    """Whether a (re)started run will resume: the mode asks for it and the newest recover point can be read.

    Args:
        config: the ``recover`` section.
        run_id: how many times the launcher has started this run; a first run resumes an earlier one too.
    """
    if config.mode not in _ACTIVE_MODES:
        return False
    points = recover_points(config)
    if not points:
        return False
    try:
        info = RecoverInfo.load(points[-1] / INFO_DIR)
    except (FileNotFoundError, ArealError) as exc:
        logger.warning("run %d: recover point %s cannot be used: %s", run_id, points[-1], exc)
        return False
    return info.last_step_info.epoch >= 0


def _clean(root: Path) -> None:
    """Remove what a killed run left aside: half points, and links that did not get their names."""
    for directory in (root, root.parent):
        fs.clean_leftovers(directory)


def _points_root(config: RecoverConfig) -> Path:
    return fs.get_save_root(config.fileroot, config.experiment_name, config.trial_name) / "recover"


def _state_of_rank(states: list[Any]) -> dict[str, Any]:
    rank, n_ranks = ranks.global_rank(), len(states)
    if rank >= n_ranks and all(state == states[0] for state in states):
        rank = 0  # one cursor for everybody: it means the same with another number of ranks
    if rank >= n_ranks:
        raise RecoverInfoError(
            f"the recover point has loader states of {n_ranks} ranks, this is rank {rank}; "
            "resume with as many ranks as before"
        )
    state: dict[str, Any] = states[rank]
    return state


def _read(path: Path) -> Any:
    try:
        content = fs.read_json(path)
    except (OSError, ArealError) as exc:
        raise RecoverInfoError(f"recover info is incomplete: {exc}") from exc
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise RecoverInfoError(f"{path}: format {found!r}, this version reads {FORMAT}")
    return decode(content["value"])
