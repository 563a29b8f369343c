"""AReaL's loggers: one line per event, ``(AReaL) YYYYMMDD-HH:MM:SS.mmm <Name> LEVEL: message``, coloured by name.

``getLogger("PascalName")`` is called by every module. All loggers are children of the logger ``areal``, which alone
owns the handlers, so Python's root logger and other libraries' loggers are left as they are::

    areal.FSDPEngine ─┐            ┌─ console (stderr, colours on a terminal)
    areal.PPOTrainer ─┴─► areal ───┼─ main.log, merged.log   (setup_file_logging)
                                   └─ relay to root handlers that are not a console (test capture, error trackers)
"""

from __future__ import annotations

import logging as std
import os
import sys
import threading
import time
from logging import CRITICAL, DEBUG, ERROR, INFO, WARNING, Logger
from typing import Literal, TextIO

from areal.utils import environ

__all__ = [
    "CRITICAL",
    "DEBUG",
    "ERROR",
    "INFO",
    "WARNING",
    "Logger",
    "close_file_logging",
    "getLogger",
    "set_level",
    "setup_file_logging",
]

LoggerType = Literal["plain", "benchmark", "colored", "system"]

_ROOT = "areal"
_PREFIX_WIDTH = 10  # characters of "[main]    " in merged.log
_RESET = "\033[0m"
_LEVEL_COLOURS = {WARNING: "\033[33m", ERROR: "\033[31m", CRITICAL: "\033[1;31m"}
_TYPE_COLOURS = {"plain": "", "benchmark": "\033[95m", "colored": "\033[36m", "system": "\033[94m"}
_CYAN, _GREEN, _BLUE, _MAGENTA, _WHITE = "\033[36m", "\033[32m", "\033[34m", "\033[35m", "\033[37m"

# Colour of each component; a name that is not here takes the longest entry contained in it ("[FSDPEngine Rank 0]").
LOGGER_COLOURS: dict[str, str] = {
    # data and episodes
    "Dataset": _GREEN,
    "Dataloader": _GREEN,
    "Reward": _GREEN,
    "Workflow": _GREEN,
    # rollout and inference
    "WorkflowExecutor": _CYAN,
    "Rollout": _CYAN,
    "Staleness": _CYAN,
    "NativeEngine": _CYAN,
    "RemoteInfEngine": _CYAN,
    "InfEngine": _CYAN,
    "ProcessPool": _CYAN,
    # training
    "FSDPEngine": _BLUE,
    "TrainEngine": _BLUE,
    "MegatronEngine": _BLUE,
    "ArchonEngine": _BLUE,
    "PPOActor": _BLUE,
    "WeightUpdate": _BLUE,
    # trainers and their hooks
    "Trainer": _MAGENTA,
    "Saver": _MAGENTA,
    "Evaluator": _MAGENTA,
    "Recover": _MAGENTA,
    "StatsLogger": _MAGENTA,
    "Console": _MAGENTA,
    # processes and services
    "Scheduler": _WHITE,
    "Launcher": _WHITE,
    "NameResolve": _WHITE,
    "PerfTracer": _WHITE,
    "Config": _WHITE,
}
_NOISY_HTTP_LOGGERS = ("httpx", "httpcore", "urllib3", "aiohttp.access", "uvicorn.access", "hpack")

_lock = threading.Lock()
_configured = False
_types: dict[str, LoggerType] = {}
_file_handlers: list[std.Handler] = []
_file_dir: str | None = None


def getLogger(name: str | None = None, type_: LoggerType | None = None, level: int | None = None) -> Logger:
    """The logger of one component.

    Args:
        name: PascalCase component name, or ``"[Component Rank 3]"`` per rank; None gives the parent of all.
        type_: colour family; None picks the colour by name. ``"plain"`` never colours.
        level: least severity of this logger; None follows the parent (INFO).
    """
    _configure()
    logger = std.getLogger(f"{_ROOT}.{name}" if name else _ROOT)
    if level is not None:
        logger.setLevel(level)
    if type_ is not None and name:
        _types[name] = type_
    return logger


def set_level(level: int | str) -> None:
    """Least severity of every logger that has no level of its own."""
    _configure()
    std.getLogger(_ROOT).setLevel(level)


def setup_file_logging(log_dir: str | os.PathLike[str], filename: str = "main.log") -> None:
    """Also write every record to ``log_dir/filename`` and, prefixed ``[main]``, to ``log_dir/merged.log``.

    Existing and future loggers are covered and each record is flushed. A process has one pair of files: repeating the
    call with the same directory does nothing, another directory moves the files there.
    """
    global _file_dir
    _configure()
    target = os.path.join(os.path.abspath(os.fspath(log_dir)), filename)
    with _lock:
        if _file_dir == target:
            return
        _detach_files()
        os.makedirs(os.path.dirname(target), exist_ok=True)
        prefix = f"[{os.path.splitext(filename)[0]}]".ljust(_PREFIX_WIDTH)
        merged = os.path.join(os.path.dirname(target), "merged.log")
        for path, line_prefix in ((target, ""), (merged, prefix)):
            handler = std.FileHandler(path, mode="a", encoding="utf-8")
            handler.setFormatter(_LineFormatter(prefix=line_prefix))
            std.getLogger(_ROOT).addHandler(handler)
            _file_handlers.append(handler)
        _file_dir = target


def close_file_logging() -> None:
    """Stop writing log files; safe to call when none are open."""
    with _lock:
        _detach_files()


class _LineFormatter(std.Formatter):
    """``(AReaL) <time> <Name> <LEVEL>: <message>``, each line with ``prefix``, coloured when ``colour`` is set."""

    def __init__(self, *, prefix: str = "", colour: bool = False) -> None:
        super().__init__()
        self.prefix = prefix
        self.colour = colour

    def format(self, record: std.LogRecord) -> str:
        name = record.name.removeprefix(f"{_ROOT}.")
        stamp = time.strftime("%Y%m%d-%H:%M:%S", time.localtime(record.created))
        head = f"(AReaL) {stamp}.{int(record.msecs):03d} {name} {record.levelname}: "
        text = head + record.getMessage()
        if record.exc_info and not record.exc_text:
            record.exc_text = self.formatException(record.exc_info)
        if record.exc_text:
            text = f"{text}\n{record.exc_text}"
        if record.stack_info:
            text = f"{text}\n{self.formatStack(record.stack_info)}"
        if self.prefix:
            text = self.prefix + text.replace("\n", "\n" + self.prefix)
        if self.colour:
            colour = _colour_of(name, record.levelno)
            text = f"{colour}{text}{_RESET}" if colour else text
        return text


class _ConsoleHandler(std.StreamHandler):  # type: ignore[type-arg]
    """Writes to whatever ``sys.stderr`` is now, so that test capture and live displays see every line."""

    def __init__(self) -> None:
        std.Handler.__init__(self)
        self._plain = _LineFormatter()
        self._coloured = _LineFormatter(colour=True)

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    def format(self, record: std.LogRecord) -> str:
        choice = environ.colour_choice()
        coloured = choice if choice is not None else bool(getattr(self.stream, "isatty", bool)())
        return (self._coloured if coloured else self._plain).format(record)


class _RootRelay(std.Handler):
    """Hands records to root handlers that are not a console, so that no line is printed twice."""

    def emit(self, record: std.LogRecord) -> None:
        for handler in std.getLogger().handlers:
            console = isinstance(handler, std.StreamHandler) and handler.stream in (
                sys.stderr,
                sys.stdout,
                sys.__stderr__,
                sys.__stdout__,
            )
            attached = handler in std.getLogger(_ROOT).handlers  # it sees the record anyway
            if not console and not attached and record.levelno >= handler.level:
                handler.handle(record)


def _configure() -> None:
    """Attach the handlers to the ``areal`` logger, once."""
    global _configured
    if _configured:
        return
    with _lock:
        if _configured:
            return
        parent = std.getLogger(_ROOT)
        parent.propagate = False
        if parent.level == std.NOTSET:
            parent.setLevel(INFO)
        parent.addHandler(_ConsoleHandler())
        parent.addHandler(_RootRelay())
        for name in _NOISY_HTTP_LOGGERS:
            library = std.getLogger(name)
            if library.level == std.NOTSET:
                library.setLevel(WARNING)
        _configured = True


def _detach_files() -> None:
    global _file_dir
    for handler in _file_handlers:
        std.getLogger(_ROOT).removeHandler(handler)
        handler.close()
    _file_handlers.clear()
    _file_dir = None


def _colour_of(name: str, level: int) -> str:
    """ANSI prefix of one line; warnings and errors keep their own colour whatever the component."""
    for threshold in (CRITICAL, ERROR, WARNING):
        if level >= threshold:
            return _LEVEL_COLOURS[threshold]
    if name in _types:
        return _TYPE_COLOURS[_types[name]]
    if name in LOGGER_COLOURS:
        return LOGGER_COLOURS[name]
    inside = [known for known in LOGGER_COLOURS if known in name]
    return LOGGER_COLOURS[max(inside, key=len)] if inside else ""
