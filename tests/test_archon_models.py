"""Archon's models: the same numbers as transformers, for packed rows, every family and every way to build them."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from areal.engine.core.empty_model import materialize
from areal.experimental.models.archon.attention import PackedAttention
from areal.experimental.models.archon.base import ModelArgs, RMSNorm, apply_rope, rope_cache
from areal.experimental.models.archon.model_spec import get_model_spec
from areal.experimental.models.archon.state_dict import StateDictAdapter
from areal.models.rope import RopeArgs
from areal.utils.errors import ConfigError, UnsupportedFeatureError
from tests.archon_fakes import FAMILIES, LENGTHS, archon_model, hf_logits, hf_model, packed_row
from tests.fakes import tiny_config
from tests.vector_files import assert_equals_vector, load_vector

DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}


@pytest.mark.parametrize("attn_type", ["sdpa", "varlen"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_packed_sequences_equal_transformers(family: str, attn_type: str) -> None:
    hf = hf_model(family)
    row = packed_row()

    logits = archon_model(hf, attn_type=attn_type)(*row)

    assert logits.shape == (1, sum(LENGTHS), hf.config.vocab_size)
    torch.testing.assert_close(logits, hf_logits(hf, row[0]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_every_parameter_equal_transformers(family: str) -> None:
    hf = hf_model(family)
    model = archon_model(hf)
    row = packed_row()
    weight = torch.randn(sum(LENGTHS), hf.config.vocab_size, generator=torch.Generator().manual_seed(3))

    (model(*row).log_softmax(-1) * weight).sum().backward()
    (hf_logits(hf, row[0]).log_softmax(-1) * weight).sum().backward()

    expected = StateDictAdapter(model.args).from_hf({n: p.grad for n, p in hf.named_parameters()})
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        error = (parameter.grad - expected[name]).norm() / expected[name].norm()
        assert error < 1e-4, f"{name}: {error:.2e}"


def test_logits_with_empty_sequences_are_those_without() -> None:
    tokens, positions, cu_seqlens, longest = packed_row()
    with_empty = torch.cat([cu_seqlens[:2], cu_seqlens[1:], cu_seqlens[-1:]])
    hf = hf_model("qwen3")

    for attn_type in ("sdpa", "varlen"):
        model = archon_model(hf, attn_type=attn_type)
        expected = model(tokens, positions, cu_seqlens, longest)
        actual = model(tokens, positions, with_empty, longest)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


def test_logits_after_change_of_one_sequence_stay_in_the_others() -> None:
    tokens, positions, cu_seqlens, longest = packed_row()
    changed = tokens.clone()
    changed[0, 6] = 1 + tokens[0, 6] % 62
    model = archon_model(hf_model("qwen2"))

    before, after = (model(row, positions, cu_seqlens, longest) for row in (tokens, changed))

    others = [i for i in range(sum(LENGTHS)) if not 6 <= i < 23]
    torch.testing.assert_close(after[:, others], before[:, others], rtol=0, atol=1e-6)
    assert not torch.allclose(after[:, 6:23], before[:, 6:23])


def test_model_in_bfloat16_is_as_near_to_float32_as_transformers() -> None:
    row = packed_row()
    hf = hf_model("qwen3")
    exact = hf_logits(hf, row[0])
    model = archon_model(hf).to(torch.bfloat16)
    model.init_buffers("cpu")

    logits = model(*row)

    own_error = (logits.float() - exact).norm()
    hf_error = (hf_logits(hf.to(torch.bfloat16), row[0]).float() - exact).norm()
    assert logits.dtype == torch.bfloat16
    assert model.rope_cache.dtype == torch.float32
    assert own_error < 1.25 * hf_error


def test_critic_gives_one_value_per_token_from_the_last_hidden_states() -> None:
    hf = hf_model("qwen2")
    critic = archon_model(hf, is_critic=True)
    row = packed_row()
    hidden = torch.cat([hf.model(part).last_hidden_state for part in row[0].split(list(LENGTHS), 1)], 1)

    values = critic(*row)

    assert critic.output is None
    assert critic.score is not None
    torch.testing.assert_close(values, hidden @ critic.score.weight.t(), rtol=1e-5, atol=1e-5)


def test_args_of_a_tied_critic_have_no_tied_head() -> None:
    args = ModelArgs.from_hf_config(tiny_config("qwen2"), is_critic=True)

    assert args.is_critic
    assert not args.tied


@pytest.mark.parametrize(
    ("changes", "named"), [({"n_kv_heads": 3}, "n_kv_heads=3"), ({"is_critic": True}, "is_critic=True")]
)
def test_args_that_contradict_each_other_are_refused(changes: dict[str, Any], named: str) -> None:
    args = ModelArgs.from_hf_config(tiny_config("qwen2"))

    with pytest.raises(ConfigError, match=named):
        replace(args, **changes)


def test_pipeline_stages_together_equal_the_whole_model() -> None:
    model = archon_model(hf_model("qwen2_untied"))
    tokens, positions, cu_seqlens, longest = packed_row()
    first, middle, last = (copy.deepcopy(model) for _ in range(3))
    first.norm = first.output = None
    del first.layers["1"]
    middle.tok_embeddings = middle.norm = middle.output = None
    del middle.layers["0"]
    last.tok_embeddings, last.layers = None, nn.ModuleDict()

    x = tokens
    for stage in (first, middle, last):  # a schedule hands over slices of stacked micro-batches
        x = stage(x, positions, cu_seqlens[None], torch.tensor([longest]))

    torch.testing.assert_close(x, model(tokens, positions, cu_seqlens, longest), rtol=0, atol=0)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3_moe"])
def test_model_from_meta_device_equals_the_one_built_on_cpu(family: str) -> None:
    hf = hf_model(family)
    expected = archon_model(hf)
    row = packed_row()
    with torch.device("meta"):
        assert type(expected.args).from_hf_config(hf.config).rope == expected.args.rope
        model = type(expected)(expected.args)
    assert all(x.is_meta for x in (*model.parameters(), *model.buffers()))

    materialize(model, torch.device("cpu"))
    model.load_state_dict(StateDictAdapter(model.args).from_hf(hf.state_dict()))
    model.init_buffers("cpu")

    torch.testing.assert_close(model(*row), expected(*row), rtol=0, atol=0)
    assert (model.output.weight is model.tok_embeddings.weight) == model.args.tied


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_init_weights_fills_matrices_norms_and_biases(family: str) -> None:
    model = archon_model(hf_model(family), init_std=0.05)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)

    model.init_weights()

    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            assert 0.03 < parameter.std() < 0.07, name
        else:
            assert (parameter == (0 if name.endswith("bias") else 1)).all(), name
    assert model(*packed_row()).isfinite().all()


def test_model_with_experts_in_a_dense_family_is_refused() -> None:
    moe = ModelArgs.from_hf_config(hf_model("qwen3_moe").config)

    with pytest.raises(UnsupportedFeatureError, match="LlamaModel has no experts"):
        get_model_spec("llama").model_class(moe)


def test_rope_equals_vector() -> None:
    vector = load_vector("rope")
    x = torch.tensor(vector["inputs"]["x"])
    positions = torch.tensor(vector["inputs"]["positions"])
    head_dim, theta = vector["config"]["head_dim"], vector["config"]["base"]

    for kind, dim in (("full", head_dim), ("partial", head_dim // 2)):
        cache = rope_cache(RopeArgs.unscaled(dim, theta), 8)
        assert cache.shape == (8, 2 * dim)
        assert_equals_vector(cache[1], vector["outputs"][f"cache_row1_{kind}"])
        assert_equals_vector(apply_rope(x, cache[positions]), vector["outputs"][kind])


def test_rope_cache_grows_for_a_sequence_longer_than_it() -> None:
    hf = hf_model("qwen2")
    row = packed_row()
    model = archon_model(hf, max_seq_len=4)

    torch.testing.assert_close(model(*row), hf_logits(hf, row[0]), rtol=1e-5, atol=1e-5)
    assert model.rope_cache.shape == (max(LENGTHS), 2 * model.args.head_dim)


def test_rms_norm_of_bfloat16_is_rounded_once_before_the_weight() -> None:
    x = (torch.randn(3, 8, generator=torch.Generator().manual_seed(0)) * 3).to(torch.bfloat16)
    norm = RMSNorm(8, 1e-6).to(torch.bfloat16)
    nn.init.uniform_(norm.weight)

    wide = x.double()
    expected = norm.weight * (wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()).to(torch.bfloat16)

    torch.testing.assert_close(norm(x), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("arch", "overrides", "named"),
    [
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type='dynamic'",
        ),
        ("llama", {"mlp_bias": True}, "mlp_bias=True"),
        ("llama", {"attention_bias": True}, "attention_bias=True"),
        ("qwen3", {"attention_bias": True}, "attention_bias=True"),
        ("qwen2", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("qwen2", {"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "sliding_window=8"),
    ],
)
def test_args_of_a_config_with_unsupported_option_name_it_and_fsdp(
    arch: str, overrides: dict[str, Any], named: str
) -> None:
    config = tiny_config(arch, **overrides)

    with pytest.raises(UnsupportedFeatureError, match="FSDP") as caught:
        ModelArgs.from_hf_config(config)

    assert named in str(caught.value)


def test_args_with_windows_on_no_layer_are_accepted() -> None:
    config = tiny_config("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=2)

    assert ModelArgs.from_hf_config(config).n_layers == 2


def test_args_of_moe_config_have_its_fields() -> None:
    config = hf_model("qwen3_moe_mixed", norm_topk_prob=False).config

    args = get_model_spec("qwen3_moe").model_args_class.from_hf_config(config)

    assert args.moe is not None
    assert (args.moe.num_experts, args.moe.top_k, args.moe.hidden_dim, args.moe.norm_topk_prob) == (4, 2, 16, False)
    assert [args.has_experts(i) for i in range(4)] == [False, True, False, False]
    never = replace(args, moe=replace(args.moe, decoder_sparse_step=0))
    assert not any(never.has_experts(i) for i in range(4))


def _attend(attn_type: Any, device: str, dtype: torch.dtype) -> list[Tensor]:
    """Output of packed attention and gradients of its inputs, float32."""
    cu_seqlens = torch.tensor([0, 5, 5, 6, 40], dtype=torch.int32, device=device)
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(1, 40, heads, 16, generator=generator).to(device, dtype).requires_grad_() for heads in (4, 2, 2)
    ]
    out = PackedAttention(attn_type)(*inputs, cu_seqlens, 34)
    out.float().square().sum().backward()
    return [out.float(), *(x.grad.float() for x in inputs if x.grad is not None)]


def test_attention_without_mask_equals_dense_mask() -> None:
    for dense, varlen in zip(*(_attend(kind, "cpu", torch.float32) for kind in ("sdpa", "varlen")), strict=True):
        torch.testing.assert_close(varlen, dense, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_attention_of_flash_kernel_equals_dense_mask() -> None:
    for dense, flash in zip(*(_attend(kind, "cuda", torch.bfloat16) for kind in ("sdpa", "varlen")), strict=True):
        torch.testing.assert_close(flash, dense, rtol=2e-2, atol=2e-2)
