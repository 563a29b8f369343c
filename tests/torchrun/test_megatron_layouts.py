"""Every Megatron layout against one process with transformers in float32: one right value for all of them.

The matrix is Archon's; see ``parity.py`` for what is compared. Without megatron-core nothing runs here.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from areal.engine.megatron_utils.names import EMBEDDING, HEAD, NameMap
from areal.engine.megatron_utils.shape import ModelShape
from tests.archon_fakes import hf_model
from tests.torchrun.live_group import LiveGroup
from tests.torchrun.parity import ONE_EMPTY, UNEVEN, Layout, OneProcess, Suite, slow_pairs

pytest.importorskip("megatron.core", reason="megatron-core is not installed; pip install 'areal[megatron]'")
from tests.torchrun import megatron_cells as cells  # noqa: E402 - needs megatron-core

# Three layers: pipeline stages of different lengths; four for two stages on each of two ranks.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {"num_hidden_layers": 3}),
    "qwen2_untied": ("qwen2_untied", {"num_hidden_layers": 3}),
    "qwen3": ("qwen3", {"num_hidden_layers": 4}),
    "llama_tied": ("llama_tied_linear", {"num_hidden_layers": 4}),
    "llama_yarn": ("llama_yarn", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe_mixed": ("qwen3_moe_mixed", {}),  # four layers, one of them with experts
}
EXPERTS = ("qwen3_moe", "qwen3_moe_mixed")
FOUR_LAYERS = ("qwen3", "llama_tied", "qwen3_moe_mixed")
DIAGONAL = [("sft", 1), ("ppo", 2), ("value", 3), ("ppo", 5)]


def _layout(backend: str, d: int = 1, model: int = 1, virtual: int = 1) -> Layout:
    return Layout(backend, d=d, model=model, engine="megatron", virtual=virtual)


D1, D2, T2, C2, P2 = (
    _layout("d1"), _layout("d2", d=2), _layout("t2", model=2), _layout("c2", model=2), _layout("p2", model=2),
)  # fmt: skip
P2V2 = _layout("p2", model=2, virtual=2)
E2, E2T1 = _layout("d2e2", d=2), _layout("(attn:t2|ffn:e2)", model=2)
D2T2, D2P2, P2T2 = _layout("d2t2", d=2, model=2), _layout("d2p2", d=2, model=2), _layout("p2t2", model=4)
E2P2 = _layout("d2p2e2", d=2, model=2)
TWO_RANKS = [D2, T2, C2, P2]
FOUR_RANKS = [D2T2, D2P2, P2T2, _layout("c2t2", model=4), _layout("d2c2", d=2, model=2), _layout("p2c2", model=4)]
FOUR_RANKS_EXPERTS = [
    E2P2,
    _layout("d4e2", d=4),
    _layout("(attn:d2t2|ffn:d2e2)", d=2, model=2),
    _layout("(attn:d2t2|ffn:e2t2)", d=2, model=2),
    _layout("(attn:d2c2|ffn:e4)", d=2, model=2),
    _layout("(attn:d4|ffn:e2t2)", d=4),  # experts are cut over ranks with different rows
]
IN_CI = [("d2t2", "qwen2"), ("d2p2", "qwen3"), ("p2t2", "llama_tied"), ("d2p2e2", "qwen3_moe_mixed")]


def _in_ci(*values: Any) -> Any:
    """A row of a table that is left out where time is short."""
    return pytest.param(*values, marks=[pytest.mark.slow, pytest.mark.ci])


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("megatron")
    for name, (family, settings) in MODELS.items():
        hf_model(family, **settings).save_pretrained(root / name)
    return {name: str(root / name) for name in MODELS}


@cache
def _names(path: str) -> NameMap:
    config = AutoConfig.from_pretrained(path)
    return NameMap(ModelShape.from_hf_config(config, is_critic=False, disable_dropout=False))


def _to_own(path: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Own tensors made of those of a transformers model, or of a checkpoint."""
    names = _names(path)
    plain = dict(tensors)
    for key, tensor in tensors.items():  # transformers has all experts of a layer in one tensor
        if key.endswith("experts.gate_up_proj"):
            for expert, matrix in enumerate(tensor):
                for part, half in zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True):
                    plain[key.replace("gate_up_proj", f"{expert}.{part}.weight")] = half
        elif key.endswith("experts.down_proj"):
            for expert, matrix in enumerate(tensor):
                plain[key.replace("down_proj", f"{expert}.down_proj.weight")] = matrix
    found = {}
    for name, shape in names.shapes.items():
        parts = [plain[key] for key in names.keys(name)]  # noqa: SIM118 - not a dict
        if len(parts) == 2:
            found[name] = torch.stack(parts)
        elif len(parts) == 3:
            groups = names.shape.n_kv_heads
            blocks = [part.view(groups, -1, names.shape.head_dim, *part.shape[1:]) for part in parts]
            found[name] = torch.cat(blocks, dim=1).reshape(shape)
        else:
            found[name] = parts[0]
    return found


SUITE = Suite(cells, to_own=_to_own, copies=lambda path: {}, steps=cells.STEPS)


@pytest.mark.parametrize("name", [n if n in ("qwen2", "qwen3_moe_mixed") else _in_ci(n) for n in MODELS])
def test_one_process_every_model_equals_transformers(model_dirs: dict[str, str], name: str, tmp_path: Path) -> None:
    SUITE.check(OneProcess(), model_dirs[name], D1, DIAGONAL, UNEVEN, out=tmp_path / "export")


IN_TURN = [name if name == "qwen2" else _in_ci(name) for name in MODELS]


@pytest.mark.parametrize("name", IN_TURN)
@pytest.mark.parametrize("layout", TWO_RANKS, ids=str)
def test_two_ranks_every_model_equals_one_process(
    two_ranks: LiveGroup, model_dirs: dict[str, str], layout: Layout, name: str, tmp_path: Path
) -> None:
    SUITE.check(two_ranks, model_dirs[name], layout, DIAGONAL, UNEVEN, out=tmp_path / "export")


@pytest.mark.parametrize("name", [n if n == "qwen3" else pytest.param(n, marks=pytest.mark.slow) for n in FOUR_LAYERS])
def test_two_ranks_interleaved_pipeline_equals_one_process(
    two_ranks: LiveGroup, model_dirs: dict[str, str], name: str, tmp_path: Path
) -> None:
    SUITE.check(two_ranks, model_dirs[name], P2V2, DIAGONAL, UNEVEN, out=tmp_path / "export")


@pytest.mark.parametrize(
    ("layout", "name"), [(E2, "qwen3_moe"), _in_ci(E2, "qwen3_moe_mixed"), *(_in_ci(E2T1, n) for n in EXPERTS)], ids=str
)
def test_two_ranks_spread_experts_equal_one_process(
    two_ranks: LiveGroup, model_dirs: dict[str, str], layout: Layout, name: str, tmp_path: Path
) -> None:
    SUITE.check(two_ranks, model_dirs[name], layout, DIAGONAL, UNEVEN, out=tmp_path / "export")


@pytest.mark.parametrize("layout", [D2, E2], ids=str)
def test_two_ranks_rank_without_rows_or_loss_equals_one_process(
    two_ranks: LiveGroup, model_dirs: dict[str, str], layout: Layout
) -> None:
    path = model_dirs["qwen2" if layout is D2 else "qwen3_moe"]
    SUITE.check(two_ranks, path, layout, [("sft", 1), ("ppo", 3)], ONE_EMPTY)
    SUITE.check(two_ranks, path, layout, [("ppo", 2)], UNEVEN, masked=(5, 6, 7))


@pytest.mark.parametrize("layout", TWO_RANKS[1:], ids=str)
def test_two_ranks_micro_batches_without_loss_equal_one_process(
    two_ranks: LiveGroup, model_dirs: dict[str, str], layout: Layout
) -> None:
    SUITE.check(two_ranks, model_dirs["qwen2"], layout, [("value", 5)], UNEVEN, masked=(1, 4, 5, 6, 7))


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize(
    "settings",
    [
        {"megatron": {"ddp": {"use_distributed_optimizer": False}}},
        {"megatron": {"ddp": {"overlap_grad_reduce": True}}},
        {"megatron": {"ddp": {"average_in_collective": True}}},
        {"mb_spec": {"max_tokens_per_mb": 13}},
        {"mb_spec": {"max_tokens_per_mb": 60}, "pad_to_maximum": True},
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": True, "megatron": {"recompute_granularity": "selective"}},
    ],
    ids=str,
)
@pytest.mark.parametrize("layout", [D2, T2, C2, P2V2], ids=str)
def test_two_ranks_settings_equal_one_process(
    two_ranks: LiveGroup, model_dirs: dict[str, str], layout: Layout, settings: dict[str, Any]
) -> None:
    SUITE.check(two_ranks, model_dirs["qwen3"], layout, [("ppo", 2)], UNEVEN, **settings)


def test_two_ranks_interleaved_pipeline_reduces_while_it_fills_up(
    two_ranks: LiveGroup, model_dirs: dict[str, str]
) -> None:
    """Three micro-batches are filled up to four; later, those without loss give the head a gradient of zero."""
    overlap = {"megatron": {"ddp": {"overlap_grad_reduce": True}}}
    SUITE.check(two_ranks, model_dirs["qwen3"], P2V2, [("ppo", 2), ("ppo", 3)], UNEVEN, **overlap)
    SUITE.check(two_ranks, model_dirs["qwen3"], P2V2, [("value", 5)], UNEVEN, masked=(1, 4, 5, 6, 7), **overlap)


@pytest.mark.slow
@pytest.mark.ci
def test_two_ranks_gathered_tokens_of_experts_equal_one_process(
    two_ranks: LiveGroup, model_dirs: dict[str, str]
) -> None:
    settings = {"megatron": {"moe_token_dispatcher_type": "allgather"}}
    SUITE.check(two_ranks, model_dirs["qwen3_moe"], T2, [("ppo", 2)], UNEVEN, **settings)


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


RESUMES = [
    (D2, P2, "qwen2"),
    (T2, P2V2, "qwen3"),
    (E2, P2, "qwen3_moe_mixed"),
    _in_ci(P2, D2, "qwen2"),
    _in_ci(P2V2, T2, "llama_tied"),
    _in_ci(C2, D1, "qwen2_untied"),
    _in_ci(E2T1, E2, "qwen3_moe"),
    _in_ci(T2, E2, "qwen3_moe"),
    _in_ci(D2T2, P2, "qwen2"),
    pytest.param(E2P2, T2, "qwen3_moe_mixed", marks=pytest.mark.slow),
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
    layouts = TWO_RANKS + ([E2] if name in EXPERTS else [])
    SUITE.check_fresh_weights(request, model_dirs[name], D1, layouts)


@pytest.mark.parametrize(
    ("layout", "name"), [(P2V2, "qwen3"), _in_ci(T2, "qwen3_moe"), _in_ci(E2, "qwen3_moe_mixed")], ids=str
)
def test_hf_export_is_read_again_by_its_layout(
    request: pytest.FixtureRequest, model_dirs: dict[str, str], layout: Layout, name: str, tmp_path: Path
) -> None:
    SUITE.check_reload(request, model_dirs[name], layout, tmp_path / "export")


@pytest.mark.parametrize("layout", [T2, P2V2], ids=str)
def test_two_ranks_next_engine_of_a_layout_makes_no_more_groups(
    two_ranks: LiveGroup, model_dirs: dict[str, str], layout: Layout
) -> None:
    for counts in two_ranks.run(cells.count_groups, path=model_dirs["qwen3"], engines=3, **layout.arguments):
        assert counts[0] == counts[2], "a group costs memory, threads and sockets for the life of the process"


def test_names_of_a_tied_model_have_its_matrix_once(model_dirs: dict[str, str]) -> None:
    names = _names(model_dirs["qwen2"])
    assert EMBEDDING in names.shapes
    assert HEAD not in names.shapes
