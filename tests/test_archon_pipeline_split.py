"""Pipeline stages of Archon models: modules by stage, stages by rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from areal.experimental.models.archon.pipeline_split import (
    SCHEDULES,
    count_stages,
    keep_modules,
    split_modules,
    stages_of_rank,
)
from areal.utils.errors import ConfigError
from tests.archon_fakes import archon_model, hf_model, packed_row
from tests.vector_files import load_vector

VECTOR = load_vector("pp_stage_split")


@pytest.mark.parametrize("case", range(len(VECTOR["inputs"]["cases"])))
def test_split_modules_of_each_case_matches_vector(case):
    given = VECTOR["inputs"]["cases"][case]

    stages = split_modules(
        given["num_stages"],
        given["num_layers"],
        first_less=given["first_less"],
        last_less=given["last_less"],
        is_critic=given["critic"],
    )

    assert stages == VECTOR["outputs"]["stages"][case]


@pytest.mark.parametrize("num_layers", [1, 2, 3, 7, 24])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("less", [(0, 0), (1, 1), (0, 2)])
def test_split_modules_all_stages_together_are_the_model_in_order(num_layers, num_stages, less):
    whole = split_modules(1, num_layers)[0]
    share = (num_layers + sum(less)) // num_stages
    if num_stages > 1 and (share == 0 or max(less) > share):
        with pytest.raises(ConfigError):
            split_modules(num_stages, num_layers, first_less=less[0], last_less=less[1])
        return

    stages = split_modules(num_stages, num_layers, first_less=less[0], last_less=less[1])

    assert len(stages) == num_stages
    assert sum(stages, []) == whole


@pytest.mark.parametrize(
    ("sizes", "less", "message"),
    [
        ((0, 4), (1, 1), "0 pipeline stages: there must be at least 1"),
        ((7, 4), (1, 1), "7 pipeline stages: 4 layers, .* allow at most 6"),
        ((2, 4), (6, 1), "pp_first_stage_less_layers=6 must be <= 5"),
        ((2, 4), (1, 6), "pp_last_stage_less_layers=6 must be <= 5"),
        ((2, 4), (-1, 1), "pp_first_stage_less_layers=-1 must be >= 0"),
        ((2, 4), (1, -1), "pp_last_stage_less_layers=-1 must be >= 0"),
    ],
)
def test_split_modules_too_few_layers_are_refused(sizes, less, message):
    with pytest.raises(ConfigError, match=message):
        split_modules(*sizes, first_less=less[0], last_less=less[1])


def test_split_modules_first_stage_may_be_the_embedding_alone():
    assert split_modules(2, 2, first_less=2, last_less=0) == [
        ["tok_embeddings"],
        ["layers.0", "layers.1", "norm", "output"],
    ]


@pytest.mark.parametrize(
    ("schedule", "stages"),
    [("1F1B", 4), ("Interleaved1F1B", 8), ("InterleavedZeroBubble", 8), ("ZBVZeroBubble", 8), ("DualPipeV", 8)],
)
def test_count_stages_without_a_wish_is_the_schedules_default(schedule, stages):
    assert count_stages(schedule, pp=4, num_layers=28) == stages


@pytest.mark.parametrize(
    ("schedule", "pp", "num_layers", "layers_per_stage", "stages"),
    [
        ("1F1B", 4, 28, 8, 4),  # 30 layers in stages of 8
        ("Interleaved1F1B", 2, 28, 5, 6),
        ("InterleavedZeroBubble", 4, 30, 4, 8),
        ("ZBVZeroBubble", 2, 6, 2, 4),
        ("DualPipeV", 2, 6, 2, 4),
    ],
)
def test_count_stages_of_layers_per_stage_is_rounded_up(schedule, pp, num_layers, layers_per_stage, stages):
    assert count_stages(schedule, pp, num_layers, layers_per_stage) == stages


@pytest.mark.parametrize(
    ("schedule", "layers_per_stage", "message"),
    [
        ("GPipe", None, "pp_schedule='GPipe' must be one of 1F1B, "),
        ("1F1B", 0, "pp_layers_per_stage=0 must be >= 1"),
        ("1F1B", 4, "pp_layers_per_stage=4 .* into 3 stages, which is not a multiple of p=2"),
        ("1F1B", 3, "into 4 stages, 2 for each of 2 ranks; archon.pp_schedule=1F1B must have 1"),
        ("Interleaved1F1B", 5, "into 2 stages, 1 for each of 2 ranks; .*Interleaved1F1B must have >= 2"),
        ("ZBVZeroBubble", 5, "into 2 stages, 1 for each of 2 ranks; .*ZBVZeroBubble must have 2"),
        ("ZBVZeroBubble", 1, "into 10 stages, 5 for each of 2 ranks; .*ZBVZeroBubble must have 2"),
    ],
)
def test_count_stages_the_schedule_cannot_run_is_refused(schedule, layers_per_stage, message):
    with pytest.raises(ConfigError, match=message):
        count_stages(schedule, pp=2, num_layers=8, layers_per_stage=layers_per_stage)


@pytest.mark.parametrize(
    ("schedule", "num_stages", "by_rank"),
    [
        ("1F1B", 3, [(0,), (1,), (2,)]),
        ("Interleaved1F1B", 6, [(0, 3), (1, 4), (2, 5)]),
        ("InterleavedZeroBubble", 9, [(0, 3, 6), (1, 4, 7), (2, 5, 8)]),
        ("ZBVZeroBubble", 6, [(0, 5), (1, 4), (2, 3)]),
        ("DualPipeV", 6, [(0, 5), (1, 4), (2, 3)]),
    ],
)
def test_stages_of_rank_go_round_or_down_and_up(schedule, num_stages, by_rank):
    assert [stages_of_rank(schedule, 3, num_stages, rank) for rank in range(3)] == by_rank


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pp", [1, 2, 3, 4])
def test_stages_of_rank_every_stage_has_one_rank(schedule, pp):
    num_stages = count_stages(schedule, pp, num_layers=28)

    held = [stage for rank in range(pp) for stage in stages_of_rank(schedule, pp, num_stages, rank)]

    assert sorted(held) == list(range(num_stages))


def test_stages_of_rank_uneven_stages_are_refused():
    with pytest.raises(ConfigError, match="5 pipeline stages are not a multiple of p=2"):
        stages_of_rank("Interleaved1F1B", 2, 5, 0)
    with pytest.raises(ConfigError, match="ZBVZeroBubble must have 4 stages for p=2, not 6"):
        stages_of_rank("ZBVZeroBubble", 2, 6, 0)


class Chain(nn.Module):
    """Stands for a model: the same child names, each child a linear map."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Linear(4, 4)
        self.layers = nn.ModuleDict({str(i): nn.Linear(4, 4) for i in range(num_layers)})
        self.norm = nn.Linear(4, 4)
        self.output = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in (self.tok_embeddings, *self.layers.values(), self.norm, self.output):
            x = x if module is None else module(x)
        return x


@pytest.mark.parametrize("num_stages", [1, 2, 3, 6])
def test_keep_modules_stages_in_a_row_compute_what_the_model_does(num_stages):
    model = Chain(4)
    x = torch.randn(3, 4)
    expected, names = model(x), [name for name, _ in model.named_parameters()]

    parts = [keep_modules(model, stage) for stage in split_modules(num_stages, 4)]
    for part in parts:
        x = part(x)

    torch.testing.assert_close(x, expected, rtol=0, atol=0)
    assert [name for part in parts for name, _ in part.named_parameters()] == names
    assert [name for name, _ in model.named_parameters()] == names


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe_mixed"])
@pytest.mark.parametrize("num_stages", [2, 4])
def test_keep_modules_of_an_archon_model_gives_stages_with_its_logits(family, num_stages):
    model = archon_model(hf_model(family, num_hidden_layers=4))
    tokens, positions, cu_seqlens, max_seqlen = packed_row()
    expected = model(tokens, positions, cu_seqlens, max_seqlen)

    x = tokens
    for stage in split_modules(num_stages, 4):
        x = keep_modules(model, stage)(x, positions, cu_seqlens, max_seqlen)

    torch.testing.assert_close(x, expected, rtol=0, atol=0)
