"""The session tracer in a real run: one record per sample, with what it spent its time on and how it ended."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

from tests.trainer_runs import log_dir, rl_config, run_rl

SESSIONS = "perf_tracer={enabled: true, session_tracer: {enabled: true, flush_threshold: 4}}"


def nan_for_odd_lengths(prompt: str, completion: str, prompt_ids: Any, completion_ids: list[int], **row: Any) -> float:
    """Not a number for some samples."""
    return math.nan if sum(completion_ids) % 3 == 0 else float(len(completion_ids))


nan_for_odd_lengths.areal_inline = True  # type: ignore[attr-defined]


def keep_even_rows(table: dict[str, Any]) -> bool:
    """A filter that depends on the row alone."""
    return int(table["row_id"][0]) % 2 == 0


def test_every_sample_leaves_one_session_record(policy: str, tmp_path: Path) -> None:
    config = rl_config(tmp_path, policy, SESSIONS, "rollout.max_failure_share=1.0")
    stats = run_rl(config, reward_fn=nan_for_odd_lengths, dynamic_filter_fn=keep_even_rows)
    lines = (log_dir(config) / "session_tracer" / "master" / "sessions-r0.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    ended = Counter(record["status"] for record in records)
    assert len({record["session_id"] for record in records}) == len(records)
    dropped = sum(row.get("rollout/dropped/reward", 0) for row in stats)
    assert ended["accepted"] >= sum(row["ppo_actor/n_seqs"] for row in stats)
    assert ended["dropped"] >= dropped > 0
    assert ended["rejected"] > 0
    assert {record.get("reason") for record in records if record["status"] == "dropped"} == {"reward"}
    for record in records:
        if record["status"] in ("accepted", "rejected", "dropped"):
            assert record["role"] == "master"
            assert {"generate", "reward"} == set(record["phases"])
            assert 0 <= record["generate_s"] + record["reward_s"] <= record["total_s"] + 1e-3
    tasks = Counter(record["task_id"] for record in records)
    assert all(count % 4 == 0 for count in tasks.values())  # a retried row keeps its task
