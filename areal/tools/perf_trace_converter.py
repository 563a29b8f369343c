"""Makes one Chrome trace of the files that ``perf_tracer`` wrote, for chrome://tracing and ui.perfetto.dev.

``python -m areal.tools.perf_trace_converter INPUT [OUTPUT]``: INPUT is a ``.jsonl`` file, a directory that holds some
(such as ``<log dir>/perf_tracer``) or a glob; OUTPUT defaults to ``trace.json`` beside it. Each process of each file
becomes a process of the trace, so that ranks, roles and resumed runs never share rows. Times count from the start of
each process.
"""

from __future__ import annotations

import argparse
import glob
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from areal.utils.errors import DataError

Event = dict[str, Any]


def convert(files: Iterable[Path], display_time_unit: str = "ms") -> dict[str, Any]:
    """The Chrome trace of ``files``; process and thread ids are numbered anew.

    Raises:
        DataError: a line is no event; a torn last line, which a kill leaves, is left out.
    """
    processes: dict[tuple[Path, Any], int] = {}
    threads: dict[tuple[int, Any], int] = {}
    events: list[Event] = []
    for file in files:
        main = None
        for event in read_events(file):
            own = isinstance(event["pid"], int) and event["tid"] >= 0
            main = event["pid"] if own else main
            # the profiler's events may name processes of their own; they stay in the one that ran it
            pid = processes.setdefault((file, event["pid"] if own or main is None else main), len(processes) + 1)
            tid = threads.setdefault((pid, event["tid"]), len(threads) + 1)
            events.append({**event, "pid": pid, "tid": tid})
    return {"traceEvents": events, "displayTimeUnit": display_time_unit}


def read_events(file: Path) -> Iterator[Event]:
    """Events of one file, in its order."""
    lines = file.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            event = json.loads(line)
        except json.JSONDecodeError as exc:
            if number == len(lines):
                return
            raise DataError(f"{file}:{number}: not JSON: {exc}") from exc
        if not isinstance(event, dict) or not {"name", "ph", "pid", "tid"} <= event.keys():
            raise DataError(f"{file}:{number}: not a trace event (needs name, ph, pid, tid): {line[:80]}")
        yield event


def find_files(source: str) -> list[Path]:
    """The trace files that ``source`` (a file, a directory or a glob) names, sorted.

    Raises:
        DataError: there are none.
    """
    path = Path(source)
    found = path.rglob("traces-r*.jsonl") if path.is_dir() else map(Path, glob.glob(source, recursive=True))
    files = sorted(file for file in found if file.is_file())
    if not files:
        raise DataError(f"no trace files at {source!r}: give a .jsonl file, a directory with traces-r*.jsonl or a glob")
    return files


def main(argv: Sequence[str] | None = None) -> int:
    """Convert; prints the output's path. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m areal.tools.perf_trace_converter", description=__doc__)
    parser.add_argument("input", help="trace file, directory or glob")
    parser.add_argument("output", nargs="?", help="JSON file to write; default: trace.json beside the input")
    parser.add_argument("--display-time-unit", choices=("ms", "ns"), default="ms", help="unit that the viewer shows")
    args = parser.parse_args(argv)
    try:
        files = find_files(args.input)
        trace = convert(files, args.display_time_unit)
    except DataError as exc:
        sys.stderr.write(f"{exc}\n")
        return 2
    beside = Path(args.input) if Path(args.input).is_dir() else files[0].parent
    output = Path(args.output) if args.output else beside / "trace.json"
    output.write_text(json.dumps(trace), encoding="utf-8")
    sys.stdout.write(f"{output}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
