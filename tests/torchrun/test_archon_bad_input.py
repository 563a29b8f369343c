"""What the Archon engine refuses: with key, value and rule, on every rank, before any weight is read.

The model directories hold a config and no weights, so an engine that came as far as loading would say something else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from areal.experimental.engine.archon_engine import ArchonEngine
from areal.utils.errors import CheckpointError, ConfigError
from tests.fakes import tiny_config
from tests.moe_fakes import tiny_moe
from tests.torchrun import archon_cells as cells
from tests.torchrun.live_group import LiveGroup

NARROW = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 24}
E2 = "(attn:d2|ffn:e2)"


def _config_only(path: Path, arch: str = "qwen2", **overrides: Any) -> str:
    config = tiny_moe(**overrides).config if arch == "qwen3_moe" else tiny_config(arch, **overrides)
    config.save_pretrained(path)
    return str(path)


def _build(path: str, **settings: Any) -> ArchonEngine:
    """An engine of one process."""
    return cells.build(path, settings.pop("backend", "archon:d1"), **settings)


def test_directory_without_weights_is_a_checkpoint_error(tmp_path: Path) -> None:
    """The others of this file are refused before that."""
    with pytest.raises(CheckpointError):
        _build(_config_only(tmp_path))


@pytest.mark.parametrize("model_type", ["mistral", "gemma3_text", "qwen3_5_text", "qwen3_5"])
def test_unsupported_model_type_lists_the_supported_ones_and_names_fsdp(tmp_path: Path, model_type: str) -> None:
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)

    with pytest.raises(ValueError, match=f"'{model_type}'") as caught:
        _build(str(tmp_path))

    for word in ("llama", "qwen2", "qwen3", "qwen3_moe", "FSDP"):
        assert word in str(caught.value)


@pytest.mark.parametrize("schedule", ["GPipe", "1f1b", ""])
def test_unknown_schedule_is_refused_by_its_section(tmp_path: Path, schedule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        cells.archon_engine(_config_only(tmp_path), "archon:d1", {"pp_schedule": schedule})

    for word in ("pp_schedule", f"{schedule}", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("backend", "ranks"),
    [("archon:d2", 2), ("archon:t2", 2), ("archon:p2", 2), ("archon:d2t2", 4), ("archon:(attn:d2c2|ffn:e4)", 4)],
)
def test_layout_of_more_ranks_than_the_job_has_names_both(tmp_path: Path, backend: str, ranks: int) -> None:
    with pytest.raises(ConfigError) as caught:
        _build(_config_only(tmp_path), backend=backend)

    for word in (backend, f"needs {ranks} processes", "this job has 1"):
        assert word in str(caught.value)


# Layout, model, sizes of the model, what the engine is given, words of the message.
REFUSALS: list[tuple[str, str, dict[str, Any], dict[str, Any], tuple[str, ...]]] = [
    ("t2", "qwen2", {"num_key_value_heads": 1}, {}, ("t2", "num_key_value_heads=1", "divide")),
    ("t2", "qwen2", NARROW, {}, ("t2", "num_attention_heads=3", "divide")),
    ("t2", "qwen2", {"vocab_size": 63}, {}, ("t2", "vocab_size=63", "divide")),
    ("t2", "qwen2", {"intermediate_size": 33}, {}, ("t2", "=33", "divide")),
    ("c2", "qwen2", NARROW, {}, ("c2", "num_attention_heads=3", "divide")),
    (
        "c2",
        "qwen2",
        {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48},
        {},
        ("c2", "num_key_value_heads=3"),
    ),
    (E2, "qwen3_moe", {"num_experts": 3}, {}, ("e2", "num_experts=3", "divide")),
    (E2, "qwen2", {}, {}, ("e2", "no experts")),
    ("t2", "qwen3_moe", {"moe_intermediate_size": 15}, {}, ("t", "moe_intermediate_size=15", "divide")),
    ("(attn:d2|ffn:t2)", "qwen3_moe", {}, {}, ("etp=2", "tp=1")),
    ("(attn:d2|ffn:e4)", "qwen3_moe", {}, {}, ("ffn", "4", "2")),
    ("(attn:p2|ffn:d2e1)", "qwen3_moe", {}, {}, ("4", "2")),
    ("d4", "qwen2", {}, {}, ("archon:d4", "needs 4 processes", "this job has 2")),
    ("d1", "qwen2", {}, {}, ("archon:d1", "needs 1 processes", "this job has 2")),
    (
        "p2",
        "qwen2",
        {"num_hidden_layers": 1},
        {"archon": {"pp_schedule": "Interleaved1F1B"}},
        ("4 pipeline stages", "1 layers", "at most 3"),
    ),
    (
        "p2",
        "qwen2",
        {"num_hidden_layers": 1},
        {"archon": {"pp_first_stage_less_layers": 0, "pp_last_stage_less_layers": 0, "pp_schedule": "1F1B"}},
        ("2 pipeline stages", "1 layers", "at most 1"),
    ),
    (
        "p2",
        "qwen2",
        {},
        {"archon": {"pp_last_stage_less_layers": 4, "pp_schedule": "1F1B"}},
        ("archon.pp_last_stage_less_layers=4", "must be <= 3"),
    ),
    (
        "p2",
        "qwen2",
        {"num_hidden_layers": 4},
        {"archon": {"pp_layers_per_stage": 1, "pp_schedule": "1F1B"}},
        ("archon.pp_layers_per_stage=1", "archon.pp_schedule=1F1B", "must have 1"),
    ),
    (
        "p2",
        "qwen2",
        {"num_hidden_layers": 4},
        {"archon": {"pp_layers_per_stage": 1, "pp_schedule": "ZBVZeroBubble"}},
        ("archon.pp_layers_per_stage=1", "archon.pp_schedule=ZBVZeroBubble", "must have 2"),
    ),
    ("p2", "qwen2", {}, {"late": {"pp_schedule": "GPipe"}}, ("archon.pp_schedule", "'GPipe'", "1F1B")),
]


def _words_of(row: Any) -> str:
    return str(row)[:40]


@pytest.mark.parametrize(("layout", "arch", "model", "settings", "words"), REFUSALS, ids=_words_of)
def test_two_ranks_impossible_layout_is_refused_on_every_rank(  # noqa: PLR0913 - one row of the table
    two_ranks: LiveGroup,
    tmp_path: Path,
    layout: str,
    arch: str,
    model: dict[str, Any],
    settings: dict[str, Any],
    words: tuple[str, ...],
) -> None:
    path = _config_only(tmp_path, arch, **model)

    for kind, message, is_value_error in two_ranks.run(
        cells.refusal, path=path, backend=f"archon:{layout}", **settings
    ):
        assert is_value_error, f"{kind}: {message or 'nothing was refused'}"
        for word in words:
            assert word in message


def test_two_ranks_after_a_refusal_the_same_ranks_train(two_ranks: LiveGroup, tmp_path: Path) -> None:
    path = _config_only(tmp_path, "qwen2", num_hidden_layers=1)
    settings = {"path": path, "backend": "archon:p2", "init_from_scratch": True}

    refused = two_ranks.run(cells.refusal, archon={"pp_schedule": "Interleaved1F1B"}, **settings)
    accepted = two_ranks.run(cells.refusal, archon={"pp_schedule": "1F1B"}, **settings)

    assert all(is_value_error for _, _, is_value_error in refused)
    assert accepted == [("", "", False)] * 2
