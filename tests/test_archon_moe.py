"""Archon's mixture of experts against stored values, plain loops and transformers' block."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from areal.experimental.models.archon.base import ModelArgs
from areal.experimental.models.archon.moe.experts import (
    Experts,
    aligned_rows,
    expert_range,
    run_grouped,
    run_one_by_one,
)
from areal.experimental.models.archon.moe.layer import MoE, combine, sort_by_expert
from areal.experimental.models.archon.moe.router import Gate, Router, Routing, choose_experts
from areal.experimental.models.archon.moe.state_dict import is_expert_key, join_experts, split_experts
from areal.utils.errors import CheckpointError
from tests.vector_files import assert_equals_vector, load_vector

EXACT = {"rtol": 0.0, "atol": 0.0}
FLOAT32 = {"rtol": 1e-5, "atol": 1e-6}
BFLOAT16 = {"rtol": 2e-2, "atol": 2e-2}


def hf_config(**overrides: object) -> Qwen3MoeConfig:
    settings = {
        "hidden_size": 16,
        "moe_intermediate_size": 24,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 32,
    }
    return Qwen3MoeConfig(**{**settings, **overrides})


def same_block(config: Qwen3MoeConfig, seed: int = 0) -> tuple[Qwen3MoeSparseMoeBlock, MoE]:
    """transformers' block with random weights, and ours with the same ones."""
    config._experts_implementation = "eager"
    torch.manual_seed(seed)
    hf = Qwen3MoeSparseMoeBlock(config)
    for parameter in hf.parameters():
        nn.init.normal_(parameter, std=0.3)
    moe = MoE(ModelArgs.from_hf_config(config))
    fused = {f"model.layers.0.mlp.experts.{name}": x for name, x in hf.experts.state_dict().items()}
    experts = {name.removeprefix("layers.0.moe."): x for name, x in join_experts(fused).items()}
    moe.load_state_dict({"router.gate.weight": hf.gate.weight.detach(), **experts})
    return hf, moe


# -- router


ROUTINGS = {
    "softmax_norm": Routing(top_k=2, norm=True),
    "softmax_plain": Routing(top_k=2),
    "sigmoid_scaled": Routing(top_k=2, score="sigmoid", scale=2.5),
    "softmax_bias": Routing(top_k=2),
    "sigmoid_groups": Routing(top_k=2, score="sigmoid", num_groups=3, num_limited_groups=1),
}


@pytest.mark.parametrize("case", ROUTINGS)
def test_router_of_each_kind_matches_vector(case):
    vector = load_vector("moe_router")
    given, expected = vector["inputs"], vector["outputs"][case]
    logits = F.linear(torch.tensor(given["x"]), torch.tensor(given["gate_weight"]))
    bias = torch.tensor(given["bias_case"]) if case == "softmax_bias" else None

    scores, experts = choose_experts(logits, ROUTINGS[case], bias)

    ids, by_id = experts.sort(dim=-1)
    assert ids.tolist() == expected["expert_ids_sorted"]
    assert_equals_vector(scores.gather(-1, by_id), expected["scores_same_order"])
    assert sort_by_expert(experts, 6)[1].tolist() == expected["tokens_per_expert"]


def test_router_bias_changes_the_choice_but_no_gradient():
    logits = torch.randn(5, 4, requires_grad=True)
    bias = torch.tensor([9.0, 0.0, 0.0, 0.0])

    scores, experts = choose_experts(logits, Routing(top_k=1), bias)
    scores.sum().backward()

    assert experts.flatten().tolist() == [0] * 5
    torch.testing.assert_close(scores[:, 0], logits.softmax(-1)[:, 0], **EXACT)
    assert logits.grad is not None
    assert bool(logits.grad.any())


def test_router_of_bfloat16_tokens_computes_its_gate_in_float32():
    router = Router(32, 6, Routing(top_k=2), torch.float32).to(torch.bfloat16)
    tokens = torch.randn(7, 32, dtype=torch.bfloat16, requires_grad=True)
    weight = router.gate.weight.detach().float().requires_grad_()
    wide = tokens.detach().float().requires_grad_()
    expected = F.linear(wide, weight)
    upstream = torch.randn(7, 6)

    logits = router.gate(tokens)
    logits.backward(upstream)
    expected.backward(upstream)

    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(tokens.grad, wide.grad.bfloat16(), **EXACT)
    torch.testing.assert_close(router.gate.weight.grad, weight.grad.bfloat16(), **EXACT)
    assert router(tokens)[0].dtype == torch.float32


def test_gate_in_float32_keeps_no_wide_copy_of_its_inputs():
    gate = Gate(32, 6, torch.float32).to(torch.bfloat16)
    kept: list[torch.dtype] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.dtype)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        gate(torch.randn(7, 32, dtype=torch.bfloat16))

    assert kept == [torch.bfloat16, torch.bfloat16]


def test_gate_with_casts_gradients_match_finite_differences():
    gate = Gate(5, 3, torch.float64)  # its float32 weight is cast
    tokens = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)

    assert torch.autograd.gradcheck(gate, (tokens,))


def test_gate_without_a_dtype_computes_in_the_dtype_of_its_inputs():
    gate = Gate(8, 3, None).to(torch.bfloat16)

    assert gate(torch.randn(2, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16


# -- order of rows


def test_sort_by_expert_of_ties_keeps_token_order_and_counts_all():
    experts = torch.tensor([[4, 0], [0, 2], [4, 2], [0, 4]])

    order, counts = sort_by_expert(experts, 6)

    assert order.tolist() == [1, 2, 6, 3, 5, 0, 4, 7]
    assert counts.tolist() == [3, 0, 2, 0, 3, 0]
    torch.testing.assert_close(counts, torch.bincount(experts.flatten(), minlength=6), **EXACT)


def test_combine_equals_the_weighted_sum_of_each_token():
    experts = torch.tensor([[1, 0], [2, 1], [0, 2]])
    scores = torch.rand(3, 2)
    outputs = torch.randn(3, 2, 4)  # of token t at its j-th expert
    order, _ = sort_by_expert(experts, 3)

    combined = combine(outputs.flatten(0, 1)[order], order, scores)

    expected = scores[:, :1] * outputs[:, 0] + scores[:, 1:] * outputs[:, 1]
    torch.testing.assert_close(combined, expected, **FLOAT32)


def test_combine_of_bfloat16_outputs_sums_in_float32():
    outputs = torch.tensor([[256.0], [1.0], [1.0], [1.0]], dtype=torch.bfloat16)  # 256 + 1 is 256 in bfloat16

    combined = combine(outputs, torch.arange(4), torch.ones(1, 4))

    assert combined.dtype == torch.bfloat16
    assert combined.item() == torch.tensor(259.0).bfloat16().item() == 260.0


@pytest.mark.parametrize("name", ["moe_permute_indices", "moe_permute_empty_expert"])
def test_aligned_rows_seen_from_the_places_match_vector(name):
    vector = load_vector(name)
    counts = torch.tensor(vector["inputs"]["tokens_per_expert_group"])
    num_rows, expected = int(counts.sum()), vector["outputs"]

    place, sizes = aligned_rows(
        counts, vector["config"]["experts_per_rank"], num_rows, alignment=vector["config"]["alignment"]
    )

    arrived = torch.full((len(expected["permuted_indices"]),), -1).index_copy(0, place, torch.arange(num_rows))
    assert arrived.tolist() == expected["permuted_indices"]
    assert sizes.tolist() == expected["m_sizes"]
    assert sizes.cumsum(0).tolist() == expected["m_offsets"]


def test_aligned_rows_of_random_counts_are_grouped_and_aligned():
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        counts = torch.randint(0, 12, (3 * 5,), generator=generator)
        num_rows = int(counts.sum())
        expert = torch.arange(5).repeat(3).repeat_interleave(counts)

        place, sizes = aligned_rows(counts, 5, num_rows)

        ends = sizes.cumsum(0)
        assert len(place.unique()) == num_rows
        torch.testing.assert_close(torch.searchsorted(ends, place, right=True), expert, **EXACT)
        assert bool((sizes % 8 == 0).all())
        assert bool((sizes >= 8).all())
        assert int(ends[-1]) <= num_rows + 5 * 8
        for e in range(5):  # rows of one expert stay in the order of arrival
            assert bool((place[expert == e].diff() == 1).all())


# -- experts


def _weights(dtype: torch.dtype, device: str = "cpu", num_experts: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((num_experts, 32, 16), (num_experts, 16, 32), (num_experts, 32, 16))
    return tuple((torch.randn(s, generator=generator) * 0.3).to(device, dtype).requires_grad_() for s in shapes)


def _run_with_gradients(run, rows, counts, weights) -> list[Tensor]:
    rows = rows.detach().requires_grad_()
    out = run(rows, counts, *weights)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(4)).to(out)
    return [out.detach(), *torch.autograd.grad(out, (rows, *weights), upstream)]


def test_experts_one_by_one_equals_each_row_with_its_own_weights():
    counts = torch.tensor([3, 0, 1, 4, 0])
    weights = w1, w2, w3 = _weights(torch.float32)
    rows = torch.randn(8, 16)
    expert = torch.arange(5).repeat_interleave(counts)

    def row_by_row(rows, counts, w1, w2, w3):
        return torch.stack([w2[e] @ (F.silu(w1[e] @ x) * (w3[e] @ x)) for x, e in zip(rows, expert, strict=True)])

    found = _run_with_gradients(run_one_by_one, rows, counts, weights)

    for actual, expected in zip(found, _run_with_gradients(row_by_row, rows, counts, weights), strict=True):
        torch.testing.assert_close(actual, expected, **FLOAT32)
    for gradient in found[2:]:
        assert not gradient[[1, 4]].any()  # experts without rows


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "counts", [[3, 0, 1, 4, 0], [0, 0, 8, 0, 0], [8, 16, 8, 8, 8], [1, 1, 1, 1, 1], [0, 9, 0, 7, 33]]
)
def test_experts_grouped_equals_one_by_one_in_bfloat16(device, counts):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    weights = _weights(torch.bfloat16, device)
    rows = torch.randn(sum(counts), 16, generator=torch.Generator().manual_seed(5)).to(device, torch.bfloat16)
    counts = torch.tensor(counts, device=device)

    grouped = _run_with_gradients(run_grouped, rows, counts, weights)
    one_by_one = _run_with_gradients(run_one_by_one, rows, counts, weights)

    for actual, expected in zip(grouped, one_by_one, strict=True):
        torch.testing.assert_close(actual, expected, **BFLOAT16)


def test_experts_on_the_meta_device_take_no_memory():
    with torch.device("meta"):
        experts = Experts(128, 2048, 768)

    assert {name: tuple(p.shape) for name, p in experts.named_parameters()} == {
        "w1": (128, 768, 2048),
        "w2": (128, 2048, 768),
        "w3": (128, 768, 2048),
    }
    assert all(p.is_meta for p in experts.parameters())


def test_expert_range_of_strided_shards_matches_vector():
    vector = load_vector("moe_strided_shard_indices")
    strided, shard, dim = (vector["config"][key] for key in ("strided_degree", "shard_degree", "dim"))

    found = {
        f"strided{i}_shard{j}": expert_range(dim, shard=(j, shard), strided=(i, strided))
        for i in range(strided)
        for j in range(shard)
    }

    assert {key: [r.start, r.stop] for key, r in found.items()} == vector["outputs"]


def test_expert_range_of_plain_shards_is_contiguous():
    assert [expert_range(8, shard=(rank, 4)) for rank in range(4)] == [
        range(2),
        range(2, 4),
        range(4, 6),
        range(6, 8),
    ]
    with pytest.raises(ValueError, match="8 experts over 1 x 3 ranks: they must divide evenly"):
        expert_range(8, shard=(0, 3))


# -- the layer


@pytest.mark.parametrize("router_dtype", [torch.float32, None])
@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"norm_topk_prob": False},
        {"num_experts_per_tok": 1},
        {"num_experts_per_tok": 6},
        {"num_experts": 40, "num_experts_per_tok": 3},  # most experts see no token
    ],
    ids=str,
)
def test_moe_of_float32_equals_transformers_with_gradients(overrides, router_dtype):
    config = hf_config(**overrides)
    hf, moe = same_block(config)
    moe.router.gate.compute_dtype = router_dtype
    x = torch.randn(1, 11, 16)
    upstream = torch.randn(1, 11, 16)
    hf_x, own_x = x.clone().requires_grad_(), x.clone().requires_grad_()

    expected, actual = hf(hf_x), moe(own_x)
    expected.backward(upstream)
    actual.backward(upstream)

    torch.testing.assert_close(actual, expected, **FLOAT32)
    torch.testing.assert_close(own_x.grad, hf_x.grad, **FLOAT32)
    torch.testing.assert_close(moe.router.gate.weight.grad, hf.gate.weight.grad, **FLOAT32)
    w1_w3 = torch.cat((moe.experts.w1.grad, moe.experts.w3.grad), dim=1)
    torch.testing.assert_close(w1_w3, hf.experts.gate_up_proj.grad, **FLOAT32)
    torch.testing.assert_close(moe.experts.w2.grad, hf.experts.down_proj.grad, **FLOAT32)


def test_moe_of_bfloat16_is_close_to_float32():
    _, moe = same_block(hf_config(num_experts_per_tok=6))  # all experts: no choice can flip
    x = torch.randn(1, 11, 16).bfloat16()

    expected = moe(x.float())
    actual = moe.to(torch.bfloat16)(x)

    assert actual.dtype == torch.bfloat16
    assert F.cosine_similarity(actual.float().flatten(), expected.flatten(), dim=0) > 0.999


def test_moe_tokens_per_expert_adds_up_until_buffers_are_made_anew():
    _, moe = same_block(hf_config())
    x = torch.randn(1, 11, 16)
    once = torch.bincount(moe.router(x[0])[1].flatten(), minlength=6)

    moe(x)
    moe(x)

    torch.testing.assert_close(moe.tokens_per_expert, 2 * once, **EXACT)
    assert int(moe.tokens_per_expert.sum()) == 2 * 11 * 2
    assert "tokens_per_expert" not in moe.state_dict()
    moe.init_buffers("cpu")
    torch.testing.assert_close(moe.tokens_per_expert, torch.zeros(6, dtype=torch.int64), **EXACT)


def test_moe_built_on_the_meta_device_gives_the_same_after_loading():
    config = hf_config()
    _, moe = same_block(config)
    args = ModelArgs.from_hf_config(config)
    with torch.device("meta"):
        empty = MoE(args)
    x = torch.randn(1, 11, 16)

    empty.to_empty(device="cpu")
    empty.load_state_dict(moe.state_dict())
    empty.init_buffers("cpu")

    torch.testing.assert_close(empty(x), moe(x), **EXACT)
    torch.testing.assert_close(empty.tokens_per_expert, moe.tokens_per_expert, **EXACT)


def test_moe_of_dense_args_is_refused():
    args = replace(ModelArgs.from_hf_config(hf_config()), moe=None)

    with pytest.raises(ValueError, match=r"ModelArgs\.moe=None"):
        MoE(args)


# -- names


def test_split_experts_gives_one_view_for_each_expert():
    w2 = torch.randn(3, 4, 5)

    split = split_experts("layers.7.moe.experts.w2", w2)

    assert [key for key, _ in split] == [f"model.layers.7.mlp.experts.{e}.down_proj.weight" for e in range(3)]
    for expert, (_, matrix) in enumerate(split):
        torch.testing.assert_close(matrix, w2[expert], **EXACT)
        assert matrix.untyped_storage().data_ptr() == w2.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    "name", ["layers.7.moe.router.gate.weight", "layers.7.feed_forward.w1.weight", "norm.weight", "experts.w1"]
)
def test_split_experts_of_another_parameter_is_empty(name):
    assert split_experts(name, torch.zeros(2, 2)) == []


def test_join_experts_in_any_order_undoes_split():
    own = {f"layers.{i}.moe.experts.{w}": torch.randn(12, 3, 4) for i in (0, 3) for w in ("w1", "w2", "w3")}
    hf = [pair for name, tensor in own.items() for pair in split_experts(name, tensor)]
    assert all(is_expert_key(key) for key, _ in hf)

    joined = join_experts(dict(sorted(hf)), num_experts=12)  # expert 10 comes before expert 2

    assert joined.keys() == own.keys()
    for name, tensor in own.items():
        torch.testing.assert_close(joined[name], tensor, **EXACT)


def test_join_experts_of_fused_tensors_splits_gate_and_up():
    gate_up, down = torch.randn(3, 10, 4), torch.randn(3, 4, 5)
    prefix = "model.layers.1.mlp.experts"
    assert is_expert_key(f"{prefix}.gate_up_proj")

    joined = join_experts({f"{prefix}.gate_up_proj": gate_up, f"{prefix}.down_proj": down})

    torch.testing.assert_close(joined["layers.1.moe.experts.w1"], gate_up[:, :5], **EXACT)
    torch.testing.assert_close(joined["layers.1.moe.experts.w3"], gate_up[:, 5:], **EXACT)
    torch.testing.assert_close(joined["layers.1.moe.experts.w2"], down, **EXACT)


@pytest.mark.parametrize(("missing", "num_experts"), [("1.up_proj", None), ("3.up_proj", None), ("3.up_proj", 4)])
def test_join_experts_with_a_missing_expert_is_refused(missing, num_experts):
    own = {f"layers.0.moe.experts.{w}": torch.randn(4, 3, 4) for w in ("w1", "w2", "w3")}
    hf = dict(pair for name, tensor in own.items() for pair in split_experts(name, tensor))
    del hf[f"model.layers.0.mlp.experts.{missing}.weight"]

    with pytest.raises(CheckpointError, match=rf"w3: .* 3 experts of 4; missing: \[{missing[0]}\]"):
        join_experts(hf, num_experts)


def test_join_experts_with_too_many_experts_is_refused():
    hf = dict(split_experts("layers.0.moe.experts.w1", torch.randn(4, 3, 4)))

    with pytest.raises(CheckpointError, match="4 experts of 3"):
        join_experts(hf, num_experts=3)


@pytest.mark.parametrize(
    "key",
    [
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.shared_expert.gate_proj.weight",
        "model.layers.0.mlp.experts.0.gate_proj.weight_scale_inv",
    ],
)
def test_is_expert_key_of_other_tensors_is_false(key):
    assert not is_expert_key(key)
