"""perf_trace_converter: files of several ranks and runs become one Chrome trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from areal.api.config.logging import PerfTracerConfig
from areal.tools.perf_trace_converter import convert, find_files, main
from areal.utils import fs, perf_tracer


@pytest.fixture
def traces(tmp_path):
    """Directory with the traces of two roles."""
    config = PerfTracerConfig(experiment_name="e", trial_name="t", fileroot=str(tmp_path), enabled=True)
    for rank, role in ((0, "master"), (1, "actor")):
        perf_tracer.configure(config, rank=rank, role=role)
        with perf_tracer.trace_scope("step", args={"global_step": 0}):
            pass
        perf_tracer.reset()
    return fs.get_log_path(tmp_path, "e", "t") / "perf_tracer"


def _pids(events: list[dict]) -> set[int]:
    return {event["pid"] for event in events}


def test_directory_becomes_one_valid_chrome_trace(traces, capsys):
    assert main([str(traces)]) == 0
    assert capsys.readouterr().out.strip() == str(traces / "trace.json")
    trace = json.loads((traces / "trace.json").read_text())
    assert trace["displayTimeUnit"] == "ms"
    assert all({"name", "ph", "pid", "tid"} <= event.keys() for event in trace["traceEvents"])
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {"[master] Rank 0, Process", "[actor] Rank 1, Process"}
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {(e["args"]["role"], e["pid"]) for e in spans} == {("master", 2), ("actor", 1)}  # one process, two roles
    for span in spans:  # the row's name is in the same process
        assert any(e["name"] == "thread_name" and e["tid"] == span["tid"] for e in trace["traceEvents"])


def test_processes_of_a_resumed_run_do_not_share_rows(tmp_path):
    file = tmp_path / "traces-r0.jsonl"
    spans = [{"name": "step", "ph": "X", "ts": 0, "dur": 1, "pid": pid, "tid": 7, "args": {}} for pid in (100, 200)]
    file.write_text("".join(json.dumps(span) + "\n" for span in spans))
    events = convert([file])["traceEvents"]
    assert _pids(events) == {1, 2}
    assert len({event["tid"] for event in events}) == 2


def test_profiler_events_stay_with_the_process_that_ran_it(tmp_path):
    file = tmp_path / "traces-r0.jsonl"
    events = [
        {"name": "train_step", "ph": "X", "ts": 0, "dur": 9, "pid": 100, "tid": 7, "args": {}},
        {"name": "aten::mm", "ph": "X", "ts": 1, "dur": 2, "pid": 100, "tid": -1},
        {"name": "PyTorch Profiler", "ph": "X", "ts": 1, "dur": 2, "pid": "Spans", "tid": -2},
    ]
    file.write_text("".join(json.dumps(event) + "\n" for event in events))
    converted = convert([file])["traceEvents"]
    assert _pids(converted) == {1}
    assert len({event["tid"] for event in converted}) == 3


def test_torn_last_line_is_left_out_and_a_broken_one_is_refused(tmp_path, capsys):
    file = tmp_path / "traces-r0.jsonl"
    line = json.dumps({"name": "step", "ph": "X", "ts": 0, "dur": 1, "pid": 1, "tid": 1})
    file.write_text(f"{line}\n" + line[:20])
    assert len(convert([file])["traceEvents"]) == 1
    file.write_text(f"{line[:20]}\n{line}\n")
    assert main([str(file)]) == 2
    assert f"{file}:1: not JSON" in capsys.readouterr().err
    file.write_text('{"name": "step"}\n')
    assert main([str(file)]) == 2
    assert "not a trace event" in capsys.readouterr().err


def test_files_by_glob_and_none_is_refused(traces, tmp_path, capsys):
    assert [file.parent.name for file in find_files(f"{traces}/*/*.jsonl")] == ["actor", "master"]
    assert main([str(traces / "master" / "traces-r0.jsonl"), str(tmp_path / "out.json")]) == 0
    assert _pids(json.loads(Path(tmp_path / "out.json").read_text())["traceEvents"]) == {1}
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "no trace files" in capsys.readouterr().err
