"""Parallel dimensions of the Archon engine: sizes, refusals, meshes and groups on a fake process group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch.distributed as dist
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from areal.api.alloc_mode import ParallelStrategy
from areal.experimental.engine.archon_dims import ArchonParallelDims, expert_layout
from areal.experimental.models.archon.base import ModelArgs, MoEArgs
from areal.experimental.models.archon.expert_parallel import check_expert_parallel
from areal.models.rope import RopeArgs
from areal.utils.errors import ConfigError, EngineError
from tests.vector_files import load_vector

VECTOR = load_vector("parallel_dims")

LAYOUTS = [
    {"dp_shard": 1},
    {"dp_shard": 4},
    {"dp_shard": 2, "tp": 2, "cp": 2, "pp": 2},
    {"dp_shard": 3, "cp": 2, "tp": 2},
    {"dp_shard": 4, "ep": 2},
    {"dp_shard": 2, "cp": 2, "ep": 4, "pp": 2},
    {"dp_shard": 4, "tp": 2, "cp": 2, "ep": 4, "etp": 2},
    {"dp_shard": 2, "tp": 2, "cp": 2, "ep": 4, "pp": 2},
    {"dp_shard": 2, "tp": 2, "cp": 2, "ep": 8},
    {"dp_shard": 8, "cp": 2, "ep": 4, "tp": 2, "etp": 2, "pp": 2},
]


def make(**sizes: int) -> ArchonParallelDims:
    """Dimensions on the CPU; ``world_size`` as the sizes say unless given."""
    needed = sizes.get("dp_shard", 1) * sizes.get("cp", 1) * sizes.get("tp", 1) * sizes.get("pp", 1)
    return ArchonParallelDims(**{"world_size": needed, **sizes}, device_type="cpu")


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def ranks_by_place(dims: ArchonParallelDims) -> np.ndarray:
    """``[pp, dp, cp, tp]`` ranks, tp fastest."""
    return np.arange(dims.world_size).reshape(dims.pp, dims.dp_shard, dims.cp, dims.tp)


def expected_groups(dims: ArchonParallelDims, rank: int) -> dict[str, list[int]]:
    """Members of every group that holds ``rank``, by plain arithmetic."""
    ranks = ranks_by_place(dims)
    p, d, c, t = (int(i[0]) for i in np.where(ranks == rank))
    groups = {
        "pp": ranks[:, d, c, t],
        "cp": ranks[p, d, :, t],
        "tp": ranks[p, d, c, :],
        "dp": ranks[p, :, c, t],
        "dp_shard_cp": ranks[p, :, :, t],
        "dp_cp": ranks[p, :, :, t],
        "pp_cp_tp": ranks[:, d, :, :],
    }
    if dims.ep == 1:
        groups["dp_shard"] = groups["dp"]
    else:
        rows_in_ep = dims.ep // dims.cp // (dims.tp if dims.etp != dims.tp else 1)
        first = d - d % rows_in_ep
        cell = ranks[p, first : first + rows_in_ep]
        groups["ep"] = cell if dims.etp != dims.tp else cell[:, :, t]
        groups["dp_shard_in_ep"] = cell[:, c, t]
        groups["dp_shard_mod_ep"] = ranks[p, d % rows_in_ep :: rows_in_ep, c, t]
    return {name: members.flatten().tolist() for name, members in groups.items()}


@pytest.mark.parametrize("case", range(len(VECTOR["inputs"]["valid"])))
def test_dims_valid_sizes_match_vector(case):
    expected = VECTOR["outputs"]["valid"][case]

    dims = ArchonParallelDims(**VECTOR["inputs"]["valid"][case])

    assert dims.dp_shard == expected["dp_shard"]
    assert list(dims.mesh_sizes.items()) == list(expected["mesh"].items())
    assert dims.seq_len_divisor == expected["seq_len_divisor"]
    assert dims.fsdp_gradient_divide_factor == expected["grad_divide"]
    assert dims.context_and_model_parallel_size == expected["context_and_model_parallel_size"]


@pytest.mark.parametrize("case", range(len(VECTOR["inputs"]["invalid"])))
def test_dims_invalid_sizes_of_vector_are_refused(case):
    assert VECTOR["outputs"]["invalid"][case] == "ValueError"

    with pytest.raises(ValueError, match="must"):
        ArchonParallelDims(**VECTOR["inputs"]["invalid"][case])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"cp": 0}, r"cp=0 must be >= 1"),
        ({"tp": -2}, r"tp=-2 must be >= 1"),
        ({"pp": 0}, r"pp=0 must be >= 1"),
        ({"ep": 0}, r"ep=0 must be >= 1"),
        ({"etp": 0}, r"etp=0 must be >= 1"),
        ({"world_size": 0}, r"world_size=0 must be >= 1"),
        ({"dp_replicate": 2, "world_size": 2}, r"dp_replicate=2 must be 1"),
        ({"dp_shard": 0}, r"dp_shard=0, .*: dp_shard \* cp \* tp \* pp must equal world_size=1"),
        ({"dp_shard": 2, "tp": 2, "world_size": 8}, r"dp_shard=2, cp=1, tp=2, .* must equal world_size=8"),
        ({"tp": 3, "world_size": 8}, r"dp_shard=2, cp=1, tp=3, .* must equal world_size=8"),
        ({"tp": 4, "etp": 2, "world_size": 8}, r"etp=2 must be 1 or tp=4"),
        ({"etp": 2}, r"etp=2 must be 1 or tp=1"),
        (
            {"cp": 2, "ep": 3, "world_size": 6},
            r"ep=3 with dp_shard=3, cp=2, tp=1, etp=1: ep must be a multiple of cp=2",
        ),
        (
            {"cp": 2, "tp": 2, "ep": 8, "etp": 2, "world_size": 8},
            r"ep=8 with dp_shard=2, cp=2, tp=2, etp=2: ep must divide dp_shard \* cp=4",
        ),
        (
            {"cp": 2, "tp": 2, "ep": 2, "world_size": 8},
            r"ep=2 with dp_shard=2, cp=2, tp=2, etp=1: ep must be a multiple of cp \* tp=4",
        ),
        (
            {"tp": 2, "ep": 4, "world_size": 6},
            r"ep=4 with dp_shard=3, cp=1, tp=2, etp=1: ep must divide dp_shard \* cp \* tp=6",
        ),
    ],
)
def test_dims_refusal_names_key_value_and_rule(sizes, message):
    with pytest.raises(ConfigError, match=message):
        ArchonParallelDims(**sizes)


def test_dims_flags_of_sizes_above_one_are_set():
    flags = dict.fromkeys(("dp", "dp_shard", "dp_cp", "fsdp", "cp", "tp", "pp", "ep", "etp"), False)

    def enabled(dims: ArchonParallelDims) -> dict[str, bool]:
        return {name: getattr(dims, f"{name}_enabled") for name in flags}

    assert enabled(make()) == flags
    assert enabled(make(dp_shard=2)) == flags | dict.fromkeys(("dp", "dp_shard", "dp_cp", "fsdp"), True)
    assert enabled(make(cp=2)) == flags | dict.fromkeys(("dp_cp", "fsdp", "cp"), True)
    assert enabled(make(pp=2)) == flags | {"pp": True}
    assert enabled(make(tp=2)) == flags | {"tp": True}
    assert enabled(make(dp_shard=2, tp=2, ep=2, etp=2)) == dict.fromkeys(flags, True) | {
        "cp": False,
        "pp": False,
    }


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_dims_from_strategy_equals_the_sizes(sizes):
    names = {"dp_shard": "data", "cp": "context", "tp": "tensor", "pp": "pipeline", "ep": "expert"}
    strategy = ParallelStrategy(
        **{f"{names[name]}_parallel_size": size for name, size in sizes.items() if name in names},
        expert_tensor_parallel_size=sizes.get("etp", 1),
    )

    assert ArchonParallelDims.from_strategy(strategy, "cpu") == make(**sizes)


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_groups_of_every_name_hold_the_ranks_of_the_formulas(sizes):
    dims = make(**sizes)
    for rank in sorted({0, 1, dims.world_size // 2, dims.world_size - 2, dims.world_size - 1}):
        if not 0 <= rank < dims.world_size:
            continue
        with fake_world(rank, dims.world_size):
            expected = expected_groups(dims, rank)
            names = {*expected, "dp_shard_mod_ep", "dp_shard_in_ep", "ep"}

            groups = {name: dims.get_group(name) for name in names}

            found = {name: dist.get_process_group_ranks(group) for name, group in groups.items() if group is not None}
            assert found == expected, f"rank {rank}"


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_mesh_of_every_name_has_its_size_and_name(sizes):
    dims = make(**sizes)
    with fake_world(dims.world_size - 1, dims.world_size):
        expected = expected_groups(dims, dims.world_size - 1)

        for name, members in expected.items():
            mesh = dims.get_mesh(name)

            assert mesh is not None
            assert mesh.mesh_dim_names == (name,)
            assert mesh.mesh.flatten().tolist() == members


def test_mesh_of_experts_cut_over_tp_has_two_dimensions():
    dims = make(dp_shard=4, tp=2, cp=2, ep=4, etp=2)
    with fake_world(5, 16):
        mesh = dims.get_mesh("ep_tp")

        assert mesh is not None
        assert mesh.mesh_dim_names == ("ep", "tp")
        assert mesh.mesh.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert mesh.get_group("ep") is dims.get_group("ep")
        assert mesh.get_group("tp") is dims.get_group("tp")
        with pytest.raises(ValueError, match=r"'ep_tp' has dimensions \('ep', 'tp'\)"):
            dims.get_group("ep_tp")


@pytest.mark.parametrize(
    ("sizes", "absent"),
    [
        ({"dp_shard": 4, "tp": 2}, ["ep", "ep_tp", "dp_shard_mod_ep", "dp_shard_in_ep", "no_such_name"]),
        ({"dp_shard": 4, "tp": 2, "ep": 4}, ["ep_tp", "dp_shard", "no_such_name"]),
        ({"dp_shard": 4, "tp": 2, "ep": 4, "etp": 2}, ["dp_shard"]),
    ],
    ids=str,
)
def test_mesh_of_an_absent_name_is_none(sizes, absent):
    dims = make(**sizes)
    with fake_world(0, dims.world_size):
        assert [dims.get_mesh(name) for name in absent] == [None] * len(absent)
        assert [dims.get_group(name) for name in absent] == [None] * len(absent)


def test_group_of_a_dimension_of_one_rank_holds_this_rank():
    dims = make(dp_shard=2)
    with fake_world(1, 2):
        for name in ("pp", "cp", "tp", "pp_cp_tp"):
            assert dist.get_process_group_ranks(dims.get_group(name)) == [1]


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_heads_are_one_rank_for_each_row_set_and_each_stage_rank(sizes):
    dims = make(**sizes)
    data, pipeline = [], []
    for rank in range(dims.world_size):
        with fake_world(rank, dims.world_size):
            data += [rank] * dims.is_data_head
            pipeline += [rank] * dims.is_pipeline_head

    ranks = ranks_by_place(dims)
    assert data == ranks[0, :, 0, 0].tolist()
    assert pipeline == ranks[:, 0, 0, 0].tolist()


def test_meshes_of_equal_dims_are_shared_within_a_world_only():
    with fake_world(0, 4):
        first = make(dp_shard=2, tp=2).get_mesh("dp_shard_cp")
        again = make(dp_shard=2, tp=2).get_mesh("dp_shard_cp")
    with fake_world(0, 4):
        later = make(dp_shard=2, tp=2).get_mesh("dp_shard_cp")

    assert first is again
    assert later is not first


def test_mesh_without_a_matching_world_is_refused():
    dims = make(dp_shard=2, tp=2)
    with pytest.raises(EngineError, match="call create_process_group first"):
        dims.get_mesh("dp")
    with fake_world(0, 8), pytest.raises(EngineError, match=r"world_size=4, but torch.distributed has 8 ranks"):
        dims.get_group("tp")


@pytest.mark.parametrize(
    ("sizes", "strategy", "mesh", "w1_w3", "w2"),
    [
        ({"dp_shard": 2}, "replicate", None, (), ()),
        ({"dp_shard": 2, "tp": 2}, "tensor", "tp", (Shard(1),), (Shard(2),)),
        ({"dp_shard": 2, "tp": 2, "etp": 2}, "tensor", "tp", (Shard(1),), (Shard(2),)),
        ({"dp_shard": 2, "ep": 2}, "expert", "ep", (Shard(0),), (Shard(0),)),
        ({"dp_shard": 2, "tp": 2, "ep": 4}, "expert_token_split", "ep", (Shard(0),), (Shard(0),)),
        (
            {"dp_shard": 2, "tp": 2, "ep": 2, "etp": 2},
            "expert_tensor",
            "ep_tp",
            (Shard(0), Shard(1)),
            (Shard(0), Shard(2)),
        ),
    ],
    ids=str,
)
def test_expert_layout_of_each_row_of_the_table(sizes, strategy, mesh, w1_w3, w2):
    dims = make(**sizes)

    layout = expert_layout(dims)

    assert (layout.strategy, layout.mesh) == (strategy, mesh)
    assert (layout.w1_w3, layout.w2) == (w1_w3, w2)
    if mesh is not None:
        with fake_world(0, dims.world_size):
            found = dims.get_mesh(mesh)
            assert found is not None
            assert found.ndim == len(layout.w1_w3) == len(layout.w2)


@pytest.mark.parametrize(("width", "fits"), [(30, True), (32, False)])
def test_experts_that_are_cut_inside_need_a_width_that_divides(width: int, fits: bool) -> None:
    dims = ArchonParallelDims(dp_shard=10, ep=2, world_size=10, device_type="cpu")
    experts = MoEArgs(num_experts=4, top_k=2, hidden_dim=width)
    rope = RopeArgs.unscaled(8, 1e4)
    args = ModelArgs(dim=40, n_layers=1, n_heads=4, n_kv_heads=4, head_dim=10, vocab_size=8, hidden_dim=8, rope=rope)
    args = replace(args, moe=experts)

    if fits:
        check_expert_parallel(args, dims)
        return
    with pytest.raises(ConfigError, match=r"num_experts=4\) nor moe_intermediate_size=32 divides by 5"):
        check_expert_parallel(args, dims)
