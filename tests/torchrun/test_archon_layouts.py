"""Every Archon layout against one process with transformers in float32: the right value is the same number everywhere.

What is compared, and how, is in ``parity.py``.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from areal.experimental.models.archon.model_spec import get_model_spec
from areal.experimental.models.archon.state_dict import EMBEDDING, HEAD, StateDictAdapter
from tests.archon_fakes import hf_model
from tests.torchrun import archon_cells as cells
from tests.torchrun.live_group import LiveGroup
from tests.torchrun.parity import ONE_EMPTY, UNEVEN, Layout, OneProcess, Suite, slow_pairs

# Three layers: pipeline stages of different lengths, one of them without a layer where there are four.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {"num_hidden_layers": 3}),
    "qwen2_untied": ("qwen2_untied", {"num_hidden_layers": 3}),
    "qwen3": ("qwen3", {}),
    "llama_tied": ("llama_tied_linear", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe_mixed": ("qwen3_moe_mixed", {}),  # four layers, one of them with experts
}
EXPERTS = ("qwen3_moe", "qwen3_moe_mixed")
SCHEDULES = ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")
DIAGONAL = [("sft", 1), ("ppo", 2), ("value", 3), ("ppo", 5)]

PIPELINES = [Layout("p2", model=2, schedule=schedule) for schedule in SCHEDULES]
TWO_RANKS = [Layout("d2", d=2), Layout("t2", model=2), Layout("c2", model=2), *PIPELINES]
# Experts spread over ranks that hold different rows, slices of rows or shards; each expert whole, or cut.
TWO_RANKS_EXPERTS = [
    Layout("(attn:d2|ffn:e2)", d=2),
    Layout("(attn:c2|ffn:e2)", model=2),
    Layout("(attn:t2|ffn:e2)", model=2),
    Layout("(attn:t2|ffn:t2)", model=2),
]
FOUR_RANKS = [
    Layout("d4", d=4),
    Layout("d2t2", d=2, model=2),
    Layout("d2c2", d=2, model=2),
    Layout("c2t2", model=4),
    *(Layout("d2p2", d=2, model=2, schedule=schedule) for schedule in SCHEDULES),
    *(Layout("p2t2", model=4, schedule=schedule) for schedule in SCHEDULES),
    *(Layout("p2c2", model=4, schedule=schedule) for schedule in ("1F1B", "ZBVZeroBubble")),
]
FOUR_RANKS_EXPERTS = [
    Layout("(attn:d4|ffn:e4)", d=4),
    Layout("(attn:d4|ffn:d2e2)", d=4),
    Layout("(attn:d2t2|ffn:d2e2)", d=2, model=2),  # etp 1: the ranks of t share the tokens out
    Layout("(attn:d2t2|ffn:e4)", d=2, model=2),
    Layout("(attn:d2t2|ffn:e2t2)", d=2, model=2),  # etp = tp
    Layout("(attn:d2c2|ffn:e4)", d=2, model=2),
    Layout("(attn:d2c2|ffn:d2e2)", d=2, model=2),
    Layout("(attn:c2t2|ffn:e4)", model=4),
    Layout("(attn:c2t2|ffn:e2t2)", model=4),
    *(Layout("(attn:d2p2|ffn:p2e2)", d=2, model=2, schedule=schedule) for schedule in SCHEDULES),
    Layout("(attn:p2t2|ffn:p2e2)", model=4, schedule="1F1B"),
    Layout("(attn:p2t2|ffn:p2t2)", model=4, schedule="ZBVZeroBubble"),
    Layout("(attn:p2c2|ffn:p2e2)", model=4, schedule="Interleaved1F1B"),
]

IN_CI = [("d2t2", "qwen2"), ("c2t2", "qwen3"), ("p2t2-1F1B", "qwen2"), ("(attn:d2t2|ffn:e2t2)", "qwen3_moe")]


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("archon")
    for name, (family, settings) in MODELS.items():
        hf_model(family, **settings).save_pretrained(root / name)
    return {name: str(root / name) for name in MODELS}


@cache
def _adapter(path: str) -> StateDictAdapter:
    config = AutoConfig.from_pretrained(path)
    spec = get_model_spec(config.model_type)
    return spec.state_dict_adapter_class(spec.model_args_class.from_hf_config(config))


SUITE = Suite(
    cells,
    to_own=lambda path, tensors: _adapter(path).from_hf(tensors),
    copies=lambda path: {HEAD: EMBEDDING} if _adapter(path).args.tied else {},
)


@pytest.mark.parametrize("name", MODELS)
def test_one_process_every_model_equals_transformers(model_dirs: dict[str, str], name: str, tmp_path: Path) -> None:
    SUITE.check(OneProcess(), model_dirs[name], Layout("d1"), DIAGONAL, UNEVEN, out=tmp_path / "export")


# Layouts are the same code for every model: one with and one without experts stand for them where time is short.
IN_TURN = [
    name if name in ("qwen2", "qwen3_moe") else pytest.param(name, marks=[pytest.mark.slow, pytest.mark.ci])
    for name in MODELS
]


@pytest.mark.parametrize("name", IN_TURN)
@pytest.mark.parametrize("layout", TWO_RANKS, ids=str)
def test_two_ranks_every_model_equals_one_process(
    two_ranks: LiveGroup, model_dirs: dict[str, str], layout: Layout, name: str, tmp_path: Path
) -> None:
    SUITE.check(two_ranks, model_dirs[name], layout, DIAGONAL, UNEVEN, out=tmp_path / "export")


@pytest.mark.parametrize("name", IN_TURN[-2:])
@pytest.mark.parametrize("layout", TWO_RANKS_EXPERTS, ids=str)
def test_two_ranks_spread_experts_equal_one_process(
    two_ranks: LiveGroup, model_dirs: dict[str, str], layout: Layout, name: str, tmp_path: Path
) -> None:
    SUITE.check(two_ranks, model_dirs[name], layout, DIAGONAL, UNEVEN, out=tmp_path / "export")


@pytest.mark.parametrize("layout", [Layout("d2", d=2), Layout("(attn:d2|ffn:e2)", d=2)], ids=str)
def test_two_ranks_rank_without_rows_or_loss_equals_one_process(
    two_ranks: LiveGroup, model_dirs: dict[str, str], layout: Layout
) -> None:
    name = "qwen2" if layout.backend == "d2" else "qwen3_moe"
    SUITE.check(two_ranks, model_dirs[name], layout, [("sft", 1), ("ppo", 3)], ONE_EMPTY)
    SUITE.check(two_ranks, model_dirs[name], layout, [("ppo", 2)], UNEVEN, masked=(5, 6, 7))


@pytest.mark.parametrize("layout", TWO_RANKS[1:], ids=str)
def test_two_ranks_micro_batches_without_loss_equal_one_process(
    two_ranks: LiveGroup, model_dirs: dict[str, str], layout: Layout
) -> None:
    SUITE.check(two_ranks, model_dirs["qwen2"], layout, [("value", 5)], UNEVEN, masked=(1, 4, 5, 6, 7))


@pytest.mark.parametrize(
    "settings",
    [
        {"archon": {"attn_type": "sdpa"}},
        {"mb_spec": {"max_tokens_per_mb": 13}},
        {"mb_spec": {"max_tokens_per_mb": 60}, "pad_to_maximum": True},
        {"gradient_checkpointing": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("layout", [TWO_RANKS[1], TWO_RANKS[2], PIPELINES[1]], ids=str)
def test_two_ranks_settings_equal_one_process(
    two_ranks: LiveGroup, model_dirs: dict[str, str], layout: Layout, settings: dict[str, Any]
) -> None:
    SUITE.check(two_ranks, model_dirs["qwen3"], layout, [("ppo", 1)], UNEVEN, **settings)


@pytest.mark.parametrize(
    ("layout", "archon"),
    [
        (PIPELINES[0], {"pp_first_stage_less_layers": 0, "pp_last_stage_less_layers": 2}),  # three layers and one
        (PIPELINES[1], {"pp_layers_per_stage": 1}),  # three stages on each rank
        (PIPELINES[2], {"pp_first_stage_less_layers": 0, "pp_last_stage_less_layers": 0}),
    ],
    ids=str,
)
def test_two_ranks_other_pipeline_splits_equal_one_process(
    two_ranks: LiveGroup, model_dirs: dict[str, str], layout: Layout, archon: dict[str, Any]
) -> None:
    SUITE.check(two_ranks, model_dirs["qwen3_moe_mixed"], layout, [("ppo", 3)], UNEVEN, archon=archon)


@pytest.mark.parametrize(("layout", "name"), slow_pairs(FOUR_RANKS, MODELS, IN_CI), ids=str)
def test_four_ranks_every_model_equals_one_process(
    four_ranks: LiveGroup, model_dirs: dict[str, str], layout: Layout, name: str, tmp_path: Path
) -> None:
    cases = DIAGONAL if name in ("qwen2", "qwen3_moe") else DIAGONAL[1:3]
    SUITE.check(four_ranks, model_dirs[name], layout, cases, UNEVEN, out=tmp_path / "export")


@pytest.mark.parametrize(("layout", "name"), slow_pairs(FOUR_RANKS_EXPERTS, EXPERTS, IN_CI), ids=str)
def test_four_ranks_spread_experts_equal_one_process(
    four_ranks: LiveGroup, model_dirs: dict[str, str], layout: Layout, name: str, tmp_path: Path
) -> None:
    SUITE.check(four_ranks, model_dirs[name], layout, DIAGONAL, UNEVEN, out=tmp_path / "export")


@pytest.mark.slow
@pytest.mark.parametrize("layout", [x for x in FOUR_RANKS + FOUR_RANKS_EXPERTS if x.d > 1], ids=str)
def test_four_ranks_rank_without_rows_or_loss_equals_one_process(
    four_ranks: LiveGroup, model_dirs: dict[str, str], layout: Layout
) -> None:
    name = "qwen3_moe" if "ffn" in layout.backend else "qwen2"
    SUITE.check(four_ranks, model_dirs[name], layout, [("ppo", 2)], ONE_EMPTY)
    SUITE.check(four_ranks, model_dirs[name], layout, [("ppo", 2)], UNEVEN, masked=(5, 6, 7))


D2, E2, ZBV = TWO_RANKS[0], TWO_RANKS_EXPERTS[0], PIPELINES[3]
D2T2, D2P2 = FOUR_RANKS[1], FOUR_RANKS[4]
RESUMES = [
    (D2, PIPELINES[0], "qwen2"),
    (PIPELINES[1], D2, "qwen2_untied"),
    (ZBV, TWO_RANKS[1], "llama_tied"),
    (TWO_RANKS[1], PIPELINES[2], "qwen3"),
    (TWO_RANKS[2], ZBV, "qwen2"),
    (E2, PIPELINES[0], "qwen3_moe_mixed"),
    (TWO_RANKS_EXPERTS[3], E2, "qwen3_moe"),
    pytest.param(D2T2, PIPELINES[0], "qwen2", marks=[pytest.mark.slow, pytest.mark.ci]),
    *(
        pytest.param(*row, marks=pytest.mark.slow)
        for row in (
            (D2T2, PIPELINES[0], "qwen3_moe"),
            (D2P2, D2T2, "qwen2_untied"),
            (FOUR_RANKS_EXPERTS[4], PIPELINES[1], "qwen3_moe"),
            (PIPELINES[1], FOUR_RANKS_EXPERTS[3], "qwen3_moe"),
        )
    ),
]


@pytest.mark.parametrize(("first", "second", "name"), RESUMES, ids=str)
def test_recover_point_of_one_layout_continues_in_another(  # noqa: PLR0913 - one row of the table
    request: pytest.FixtureRequest,
    model_dirs: dict[str, str],
    first: Layout,
    second: Layout,
    name: str,
    tmp_path: Path,
) -> None:
    SUITE.check_recover_point(request, model_dirs[name], first, second, tmp_path / "point")


@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe_mixed"])
def test_init_from_scratch_gives_equal_weights_in_every_layout(
    request: pytest.FixtureRequest, model_dirs: dict[str, str], name: str
) -> None:
    layouts = TWO_RANKS + (TWO_RANKS_EXPERTS if name in EXPERTS else [])
    SUITE.check_fresh_weights(request, model_dirs[name], Layout("d1"), layouts)


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        (PIPELINES[3], "qwen2"),
        (TWO_RANKS[1], "qwen3_moe"),
        (TWO_RANKS[2], "llama_tied"),
        (E2, "qwen3_moe"),
        (TWO_RANKS_EXPERTS[3], "qwen3_moe_mixed"),
        pytest.param(D2T2, "qwen2", marks=pytest.mark.slow),
        pytest.param(FOUR_RANKS_EXPERTS[4], "qwen3_moe", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_hf_export_is_read_again_by_its_layout(
    request: pytest.FixtureRequest, model_dirs: dict[str, str], layout: Layout, name: str, tmp_path: Path
) -> None:
    SUITE.check_reload(request, model_dirs[name], layout, tmp_path / "export")


@pytest.mark.parametrize("layout", [TWO_RANKS[1], PIPELINES[0], ZBV], ids=str)
def test_two_ranks_next_engine_of_a_layout_makes_no_more_groups(
    two_ranks: LiveGroup, model_dirs: dict[str, str], layout: Layout
) -> None:
    for counts in two_ranks.run(cells.count_groups, path=model_dirs["qwen2"], engines=3, **layout.arguments):
        assert counts[0] == counts[2], "a group costs memory, threads and sockets for the life of the process"
