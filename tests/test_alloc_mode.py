"""Allocation strings: the 51 examples of the 1.x surface, and the backend ``native``."""

from __future__ import annotations

from typing import Any

import pytest

from areal.api import alloc_mode
from areal.api.alloc_mode import (
    AllocationType,
    AllocationValidationError,
    InvalidAllocationModeError,
    MegatronParallelStrategy,
    ModelAllocation,
    ParallelStrategy,
    _AllocationMode,
)
from areal.utils.errors import ArealError

COLOCATE, DECOUPLED, SERVERS = AllocationType.COLOCATE, AllocationType.DECOUPLED_TRAIN, AllocationType.LLM_SERVER_ONLY


def _part(backend: str, world: int, name: str | None = None, shares: Any = False, **sizes: int) -> dict[str, Any]:
    """Expected component; ``shares`` is False for devices of its own, else the role it shares (may be None)."""
    return {"backend": backend, "world": world, "name": name, "shares": shares, **sizes}


# (number in the spec, text, type or None when it is undefined, total devices, components)
PARSED = [
    (1, "sglang:d4p2t2", SERVERS, 16, [_part("sglang", 16, dp=4, tp=2, pp=2)]),
    (2, "sglang:d2+fsdp:d4", DECOUPLED, 6, [_part("sglang", 2), _part("fsdp", 4)]),
    (
        3,
        "sglang:d4p2t2+megatron:(attn:d2p2t2c2|ffn:d2p2t2e2)",
        DECOUPLED,
        32,
        [_part("sglang", 16), _part("megatron", 16, dp=2, tp=2, pp=2, cp=2, ep=2, etp=2, edp=2)],
    ),
    (4, "fsdp:d4", COLOCATE, 4, [_part("fsdp", 4, dp=4)]),
    (5, "fsdp:d4t2", COLOCATE, 8, [_part("fsdp", 8, dp=4, tp=2)]),
    (6, "fsdp:d4c2", COLOCATE, 8, [_part("fsdp", 8, dp=4, cp=2)]),
    (7, "fsdp:d4p1t1", COLOCATE, 4, [_part("fsdp", 4, dp=4, tp=1, pp=1)]),
    (8, "megatron:d2p2t1", COLOCATE, 4, [_part("megatron", 4, dp=2, pp=2)]),
    (9, "vllm:d2t4+megatron:d2p2t1", DECOUPLED, 12, [_part("vllm", 8), _part("megatron", 4)]),
    (
        10,
        "megatron:(attn:d4p2t2c2|ffn:d2p2t4e2)",
        COLOCATE,
        32,
        [_part("megatron", 32, dp=4, tp=2, pp=2, cp=2, ep=2, etp=4, edp=2)],
    ),
    (
        11,
        "megatron:attn:d4p2t2c2|ffn:d2p2t4e2",
        COLOCATE,
        32,
        [_part("megatron", 32, dp=4, tp=2, pp=2, cp=2, ep=2, etp=4, edp=2)],
    ),
    (12, "archon:(attn:d4c2|ffn:e8)", COLOCATE, 8, [_part("archon", 8, dp=4, cp=2, ep=8, etp=1, edp=1)]),
    (13, "archon:(attn:d4p2t2|ffn:e4t2)", COLOCATE, 16, [_part("archon", 16, dp=4, pp=2, ep=4, etp=2, edp=1)]),
    (14, "megatron:(attn:d1p12t4|ffn:d1p12e4)", COLOCATE, 48, [_part("megatron", 48, tp=4, pp=12, ep=4, etp=1)]),
    (15, "sglang[rollout]:d2+fsdp[actor]:d4", DECOUPLED, 6, [_part("sglang", 2, "rollout"), _part("fsdp", 4, "actor")]),
    (
        16,
        "sglang[rollout]:d2+fsdp[actor]:d4+fsdp[critic]:d4",
        None,
        10,
        [_part("sglang", 2, "rollout"), _part("fsdp", 4, "actor"), _part("fsdp", 4, "critic")],
    ),
    (
        17,
        "sglang[rollout]:d2+fsdp[actor]:d4|fsdp[critic]:d4",
        None,
        6,
        [_part("sglang", 2, "rollout"), _part("fsdp", 4, "actor"), _part("fsdp", 0, "critic", "actor")],
    ),
    (
        18,
        "vllm[rollout1]:d2t2 + fsdp[actor1]:d4 + vllm[rollout2]:d4 + fsdp[actor2]:d4",
        None,
        16,
        [_part("vllm", 4, "rollout1"), _part("fsdp", 4, "actor1"), _part("vllm", 4), _part("fsdp", 4)],
    ),
    (19, "fsdp:d4|fsdp[critic]:d4", None, 4, [_part("fsdp", 4), _part("fsdp", 0, "critic", None)]),
    (20, "fsdp[actor]:d4|fsdp[critic]:d2t2", None, 4, [_part("fsdp", 4, "actor"), _part("fsdp", 0, "critic", "actor")]),
    (
        21,
        "fsdp[a]:d4|fsdp[b]:d4|fsdp[c]:d4",
        None,
        4,
        [_part("fsdp", 4, "a"), _part("fsdp", 0, "b", "a"), _part("fsdp", 0, "c", "a")],
    ),
    (22, "sglang:d4|fsdp[actor]:d4", COLOCATE, 4, [_part("sglang", 4), _part("fsdp", 0, "actor", None)]),
    (23, "megatron:d4e4", COLOCATE, 4, [_part("megatron", 4, ep=4, edp=1)]),
    (24, "archon:d4e2", COLOCATE, 4, [_part("archon", 4, ep=2, edp=2)]),
    (25, "vllm:t2d2p2", SERVERS, 8, [_part("vllm", 8, dp=2, tp=2, pp=2)]),
    (26, " fsdp : d 4 t 2 ", COLOCATE, 8, [_part("fsdp", 8, dp=4, tp=2)]),
    (27, "fsdp:d4d2", COLOCATE, 2, [_part("fsdp", 2, dp=2)]),
    (28, "fsdp:(attn:d4|ffn:d4)", COLOCATE, 4, [_part("fsdp", 4, dp=4, ep=1)]),
    (29, "sglang:d2+sglang:d2", None, 4, [_part("sglang", 2), _part("sglang", 2)]),
    (30, "fsdp:d2+megatron:d4", None, 6, [_part("fsdp", 2), _part("megatron", 4)]),
    (31, "megatron:(attn:d2|ffn:d2", COLOCATE, 2, [_part("megatron", 2, dp=2)]),
]

REFUSED = [
    (32, "fsdp[actor]:d4|fsdp[critic]:d2", AllocationValidationError, "4 and 2"),
    (33, "sglang[r]:d4|fsdp:d4", AllocationValidationError, "must have names"),
    (34, "fsdp:d4|fsdp:d4", AllocationValidationError, "must have names"),
    (35, "fsdp:d4p2", AllocationValidationError, "fsdp"),
    (36, "fsdp:d2e2", AllocationValidationError, "fsdp"),
    (36, "fsdp:(attn:d4|ffn:d2e2)", AllocationValidationError, "fsdp"),
    (37, "megatron:d2e4", ValueError, "does not divide"),
    (38, "sglang:d2+fsdp[actor]:d4+fsdp:d4", AllocationValidationError, "must have names"),
    (39, "sglang[actor]:d2+fsdp[actor]:d4", AllocationValidationError, "duplicate name"),
    (40, "megatron:(attn:d2p2t1c4|ffn:d2p4t1e2)", AllocationValidationError, "pipeline sizes"),
    (40, "(attn:d2p2t1c4|ffn:d2p4t1e2)", AllocationValidationError, "pipeline sizes"),
    (41, "megatron:(attn:d4p2t1c1|ffn:d2p2t2e2)", InvalidAllocationModeError, "8 devices, ffn 16"),
    (41, "(attn:d4p2t1c1|ffn:d2p2t2e2)", InvalidAllocationModeError, "8 devices, ffn 16"),
    (42, "megatron:(attn:d3t2|ffn:e4)", AllocationValidationError, "cannot derive"),
    (43, "d1", AllocationValidationError, "backend missing"),
    (43, "d2p2t1", AllocationValidationError, "backend missing"),
    (43, "[actor]:d4", AllocationValidationError, "backend missing"),
    (43, "sglang:d4+d4", AllocationValidationError, "backend missing"),
    (43, "vllm:d4+[actor]:d4", AllocationValidationError, "backend missing"),
    (44, "attn:d4p2t2c2|ffn:d2p2t4e2", AllocationValidationError, "backend missing"),
    (44, "(attn:d4p2t2c2|ffn:d2p2t4e2)", AllocationValidationError, "backend missing"),
    (45, "sglang:d4c2", ValueError, "cannot read"),
    (45, "sglang:d4e2", ValueError, "cannot read"),
    (45, "megatron:d2t2v2", ValueError, "cannot read"),
    (46, "fsdp:d0", ValueError, "cannot read"),
    (46, "fsdp:d04", ValueError, "cannot read"),
    (46, "fsdp:", ValueError, "cannot read"),
    (46, "fsdp", ValueError, "cannot read"),
    (46, "", ValueError, "cannot read"),
    (47, "sglang.d4+fsdp.d4", ValueError, "colon"),
    (47, "SGLANG:d4", ValueError, "cannot read"),
    (47, "trt:d4", ValueError, "cannot read"),
    (47, "fsdp(actor):d4", ValueError, "cannot read"),
    (47, "fsdp[1a]:d4", ValueError, "cannot read"),
    (48, "megatron[actor]:(attn:d4p2t2c2|ffn:d2p2t4e2)", ValueError, "name cannot be combined"),
    (49, "megatron:(attn:d4e2|ffn:d2e2)", ValueError, "cannot read"),
]


def _type_or_none(mode: _AllocationMode) -> AllocationType | None:
    try:
        return mode.type_
    except AttributeError:
        return None


@pytest.mark.parametrize(
    ("number", "text", "kind", "total", "parts"), PARSED, ids=lambda v: v if isinstance(v, str) else ""
)
def test_allocation_mode_valid_text_gives_components(
    number: int, text: str, kind: AllocationType | None, total: int, parts: list[dict[str, Any]]
) -> None:
    mode = _AllocationMode.from_str(text)

    assert (_type_or_none(mode), mode.world_size, len(mode.allocations)) == (kind, total, len(parts)), number
    for found, expected in zip(mode.allocations, parts, strict=True):
        sizes = {key: value for key, value in expected.items() if key not in ("backend", "world", "name", "shares")}
        assert (found.backend, found.world_size) == (expected["backend"], expected["world"])
        assert {key: getattr(found.parallel, f"{key}_size") for key in sizes} == sizes
        if expected["name"]:
            assert found.name == expected["name"]
        shares = found.scheduling_strategy.target if found.scheduling_strategy.type == "colocation" else False
        assert shares == expected["shares"]


@pytest.mark.parametrize(("number", "text", "error", "message"), REFUSED, ids=lambda v: v if isinstance(v, str) else "")
def test_allocation_mode_bad_text_raises_naming_the_reason(
    number: int, text: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        _AllocationMode.from_str(text)

    assert isinstance(caught.value, (ArealError, ValueError)), number
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("text", "message"), [("sglang:d4+fsdp:d4", r"'\+'"), ("fsdp:d4|fsdp[c]:d4", "expected one component, found 2")]
)
def test_model_allocation_several_components_raises(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelAllocation.from_str(text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("megatron:d2p2t1", "megatron:d2p2"),
        ("megatron:(attn:d1p12t4|ffn:d1p12e4)", "megatron:p12t4e4"),
        ("fsdp:d1", "fsdp:d1"),
        ("fsdp[actor]:d4c2", "fsdp(actor):d4c2"),
        ("native:d1", "native:d1"),
    ],
)
def test_model_allocation_str_lists_sizes_above_one(text: str, shown: str) -> None:
    assert str(ModelAllocation.from_str(text)) == shown


def test_model_allocation_name_argument_replaces_parsed_name() -> None:
    allocation = ModelAllocation.from_str("fsdp[a]:d2", name="b")

    assert (allocation.name, allocation.scheduling_strategy.type) == ("b", "separation")


def test_native_backend_is_inference_on_one_device_per_replica() -> None:
    mode = _AllocationMode.from_str("native:d2+fsdp:d1")

    assert (mode.gen_backend, mode.train_backend, mode.gen_instance_size) == ("native", "fsdp", 1)
    with pytest.raises(AllocationValidationError, match="one device"):
        ModelAllocation.from_str("native:d1t2")
    with pytest.raises(ValueError, match="cannot read"):
        ModelAllocation.from_str("native:d1c2")


@pytest.mark.parametrize(("text", "name"), [("fsdp:d2+megatron:d4", "train"), ("sglang:d2+sglang:d2", "gen")])
def test_allocation_mode_ambiguous_property_raises(text: str, name: str) -> None:
    mode = _AllocationMode.from_str(text)

    with pytest.raises(AttributeError, match="ambiguous"):
        getattr(mode, name)


def test_allocation_mode_lookup_by_name_finds_component_or_raises() -> None:
    mode = _AllocationMode.from_str("sglang[rollout]:d2+fsdp[actor]:d4")

    assert mode["actor"].backend == "fsdp"
    with pytest.raises(KeyError, match="critic"):
        mode["critic"]


def test_allocation_mode_without_inference_has_no_gen() -> None:
    mode = _AllocationMode.from_str("fsdp:d4")

    assert (mode.gen, mode.gen_backend) == (None, None)
    with pytest.raises(AttributeError, match="no inference"):
        _ = mode.gen_instance_size


@pytest.mark.parametrize(
    ("strategy", "shown"),
    [
        (ParallelStrategy(tensor_parallel_size=2, data_parallel_size=4), "Parallel(tp=2,pp=1,dp=4)"),
        (ParallelStrategy(data_parallel_size=4, context_parallel_size=2), "Parallel(tp=1,pp=1,dp=4,cp=2)"),
        (
            ParallelStrategy(data_parallel_size=4, expert_parallel_size=2, expert_tensor_parallel_size=2),
            "Parallel(tp=1,pp=1,dp=4,ep=2,ep_tp=2)",
        ),
    ],
)
def test_parallel_strategy_str_shows_cp_and_ep_above_one(strategy: ParallelStrategy, shown: str) -> None:
    assert str(strategy) == shown


def test_data_rank_ranks_that_share_rows_have_the_same() -> None:
    layout = ParallelStrategy(
        tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=2, context_parallel_size=2
    )
    assert [layout.data_rank(rank) for rank in range(16)] == [0] * 4 + [1] * 4 + [0] * 4 + [1] * 4


def test_parallel_strategy_experts_that_do_not_divide_raise_assertion_and_value_error() -> None:
    for error in (AssertionError, ValueError):
        with pytest.raises(error, match="does not divide"):
            ParallelStrategy(data_parallel_size=2, expert_parallel_size=4)


def test_megatron_strategy_virtual_stages_need_a_pipeline() -> None:
    assert MegatronParallelStrategy(virtual_pipeline_parallel_size=0).virtual_pipeline_parallel_size == 1
    with pytest.raises(AllocationValidationError, match="pipeline"):
        MegatronParallelStrategy(virtual_pipeline_parallel_size=2)
    with_stages = MegatronParallelStrategy(pipeline_parallel_size=2, virtual_pipeline_parallel_size=2)
    without = MegatronParallelStrategy(pipeline_parallel_size=2)

    assert ParallelStrategy.parallelism_eq(with_stages, without)
    assert not MegatronParallelStrategy.parallelism_eq(with_stages, without)


def test_allocation_mode_old_name_raises_with_migration_hint() -> None:
    with pytest.raises(AttributeError, match="ModelAllocation.from_str"):
        _ = alloc_mode.AllocationMode
