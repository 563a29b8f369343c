"""Every FSDP layout against one process with transformers in float32: the right value is the same number everywhere."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.fakes import tiny_config
from tests.torchrun import layout_cells as cells
from tests.torchrun import ppo_cells
from tests.torchrun.layout_cells import Outcome
from tests.torchrun.live_group import LiveGroup

SLIDING = {"sliding_window": 4}
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8, **SLIDING}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen2-untied": ("qwen2", {"tie_word_embeddings": False}),
    "uneven": ("qwen2", {"vocab_size": 66, "intermediate_size": 34}),  # shards of different sizes
    "qwen3": ("qwen3", {"tie_word_embeddings": False, "head_dim": 8}),
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"tie_word_embeddings": False, "head_dim": 8, **SLIDING}),
    "gemma": ("gemma", {"head_dim": 8}),
    "gemma2": ("gemma2", {**GEMMA, "final_logit_softcapping": None, "attn_logit_softcapping": None}),
    "gemma3": ("gemma3_text", {**GEMMA, "tie_word_embeddings": False}),
}
# One tied model and one with everything that a family can add stand for the others where time is short.
IN_TURN = [
    name if name in ("qwen2", "gemma3") else pytest.param(name, marks=[pytest.mark.slow, pytest.mark.ci])
    for name in MODELS
    if name != "uneven"
]
DIAGONAL = [("sft", 1), ("ppo", 2), ("value", 5)]
ALL_CASES = [(loss, n) for loss in cells.LOSSES for n in (1, 2, 5)]
EVERYTHING = list(range(len(cells.LENGTHS)))
UNEVEN = {1: [EVERYTHING], 2: [EVERYTHING[:5], EVERYTHING[5:]], 4: [[0, 1], [2], [3, 4, 5, 6, 7], []]}
ONE_EMPTY = {1: [EVERYTHING], 2: [EVERYTHING, []], 4: [[], EVERYTHING, [], []]}


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("families")
    return {name: _save_model(root / name, *MODELS[name]) for name in MODELS}


def _save_model(path: Path, model_type: str, settings: dict[str, Any]) -> str:
    common = tiny_config("qwen2").to_dict()
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    keys += ("num_key_value_heads", "max_position_embeddings", "tie_word_embeddings", "eos_token_id", "pad_token_id")
    config = AutoConfig.for_model(model_type, **{**{key: common[key] for key in keys}, **settings})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.15)  # norms and biases too
    model.save_pretrained(path)
    return str(path)


@cache
def _reference(path: str, loss_name: str, masked: tuple[int, ...] = ()) -> Outcome:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    return cells.reference(model, loss_name, cells.rows(masked=masked))


def _assert_equal(ours: Outcome, reference: Outcome, own_rows: list[int]) -> None:
    assert ours.losses == pytest.approx(reference.losses, rel=2e-5, abs=5e-6)
    assert ours.norms == pytest.approx(reference.norms, rel=2e-5)
    for step in range(2):
        assert ours.gradients[step].keys() == reference.gradients[step].keys()
        for name, gradient in reference.gradients[step].items():
            torch.testing.assert_close(ours.gradients[step][name], gradient, rtol=1e-4, atol=2e-5, msg=_named(name))
    for name, weight in reference.weights.items():
        torch.testing.assert_close(ours.weights[name], weight, rtol=1e-5, atol=1e-5, msg=_named(name))
    assert len(ours.logprobs) == len(own_rows)
    starts = torch.tensor([0, *(n + 2 for n in cells.LENGTHS)]).cumsum(0).tolist()
    done = 0
    for index, length in enumerate(cells.LENGTHS):
        if index in own_rows:
            values = ours.logprobs[own_rows.index(index)][0, : length - 1]
            torch.testing.assert_close(values, reference.logprobs[index], rtol=1e-4, atol=2e-5)
            entropy = ours.entropy[starts[index] : starts[index] + length]
            torch.testing.assert_close(entropy, reference.entropy[done : done + length], rtol=1e-4, atol=2e-5)
        done += length


def _named(name: str) -> Any:
    return lambda message: f"{name}: {message}"


def _check(
    group: LiveGroup,
    path: str,
    layout: str,
    cases: list[tuple[str, int]],
    shards: dict[int, list[list[int]]],
    masked: tuple[int, ...] = (),
    **settings: Any,
) -> None:
    """Run ``cases`` on ``layout`` and compare what every rank has with one process."""
    d = int(layout[1]) if layout[0] == "d" else 1
    world = [int(size) for size in layout[1::2]]
    ranks = torch.tensor(world).prod().item()
    results = group.run(
        cells.compare, path=path, backend=f"fsdp:{layout}", cases=cases, shards=shards[d], masked=masked, **settings
    )
    assert len(results) == ranks
    for rank, outcomes in enumerate(results):
        own_rows = shards[d][rank // (ranks // d)]
        for (loss_name, n_mbs), outcome in zip(cases, outcomes, strict=True):
            _assert_equal(outcome, _reference(path, loss_name, masked), own_rows)
            if "mb_spec" not in settings:
                assert [r["num_micro_batches"] for r in outcome.results] == [n_mbs] * 2
            assert outcome.results == results[0][cases.index((loss_name, n_mbs))].results


@pytest.mark.parametrize("name", IN_TURN)
@pytest.mark.parametrize("layout", ["d2", "t2", "c2"])
def test_two_ranks_every_family_equals_one_process(
    two_ranks: LiveGroup, model_dirs: dict[str, str], layout: str, name: str
) -> None:
    _check(two_ranks, model_dirs[name], layout, DIAGONAL, UNEVEN)


@pytest.mark.parametrize(
    "layout", ["d2", *(pytest.param(x, marks=[pytest.mark.slow, pytest.mark.ci]) for x in ("t2", "c2"))]
)
def test_two_ranks_every_loss_and_micro_batch_count_equals_one_process(
    two_ranks: LiveGroup, model_dirs: dict[str, str], layout: str
) -> None:
    _check(two_ranks, model_dirs["qwen2"], layout, ALL_CASES, ONE_EMPTY)


# Fewer families and losses here: what differs between them is the same on two ranks.
FOUR_RANKS = [
    *(("d4", name) for name in ("qwen2", "uneven", "mistral", "gemma3")),
    *(("d2c2", name) for name in ("qwen2", "llama", "mistral", "gemma3")),
    *(("d2t2", name) for name in ("qwen2", "uneven", "qwen3", "gemma3")),
    *(("c2t2", name) for name in ("qwen2", "qwen2-untied", "qwen3", "gemma")),
    ("c4", "qwen2"),  # two key-value heads for four ranks
]


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize(("layout", "name"), FOUR_RANKS)
def test_four_ranks_families_equal_one_process(
    four_ranks: LiveGroup, model_dirs: dict[str, str], layout: str, name: str
) -> None:
    cases = DIAGONAL if name == "qwen2" else [("ppo", 2)]
    _check(four_ranks, model_dirs[name], layout, cases, UNEVEN)


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("layout", ["d2t2", "d2c2"])
def test_four_ranks_empty_shard_and_masked_rows_equal_one_process(
    four_ranks: LiveGroup, model_dirs: dict[str, str], layout: str
) -> None:
    _check(four_ranks, model_dirs["qwen2"], layout, [("ppo", 2)], ONE_EMPTY)
    _check(four_ranks, model_dirs["qwen2"], layout, [("ppo", 2)], UNEVEN, masked=(5, 6, 7))


VARIANTS: list[dict[str, Any]] = [
    {"gradient_checkpointing": True},
    {"attn_impl": "sdpa"},
    {"attn_impl": "eager"},
    {"mb_spec": {"max_tokens_per_mb": 13}},
    {"mb_spec": {"max_tokens_per_mb": 60}, "pad_to_maximum": True},
]


@pytest.mark.parametrize("settings", VARIANTS, ids=lambda settings: "-".join(settings))
@pytest.mark.parametrize("layout", ["t2", "c2"])
def test_two_ranks_settings_equal_one_process(
    two_ranks: LiveGroup, model_dirs: dict[str, str], layout: str, settings: dict[str, Any]
) -> None:
    _check(two_ranks, model_dirs["gemma3"], layout, [("ppo", 1)], UNEVEN, **settings)


def test_gemma2_with_attention_softcap_equals_one_process(two_ranks: LiveGroup, tmp_path: Path) -> None:
    settings = {**MODELS["gemma2"][1], "attn_logit_softcapping": 2.0}
    path = _save_model(tmp_path / "softcap", "gemma2", settings)
    for layout in ("t2", "c2"):
        _check(two_ranks, path, layout, [("sft", 2)], UNEVEN, attn_impl="eager")


@pytest.mark.parametrize("layout", ["d2", "t2", "c2"])
def test_two_ranks_token_mask_equals_one_process(two_ranks: LiveGroup, model_dirs: dict[str, str], layout: str) -> None:
    _check(two_ranks, model_dirs["qwen3"], layout, [("value", 2)], UNEVEN, token_mask="predicting")


@pytest.mark.parametrize("layout", ["d2", "t2", "c2"])
def test_two_ranks_token_limit_is_kept_in_every_micro_batch(
    two_ranks: LiveGroup, model_dirs: dict[str, str], layout: str
) -> None:
    limit = {"max_tokens_per_mb": 13}
    results = two_ranks.run(
        cells.compare,
        path=model_dirs["qwen2"],
        backend=f"fsdp:{layout}",
        cases=[("sft", 1)],
        shards=UNEVEN[2 if layout == "d2" else 1],
        mb_spec=limit,
    )
    assert all(0 < outcome.most_tokens <= 13 for outcomes in results for outcome in outcomes)
    counts = {outcomes[0].results[0]["num_micro_batches"] for outcomes in results}
    assert len(counts) == 1


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("layout", ["d2t2", "d2c2"])
def test_four_ranks_one_sequence_above_the_limit_is_an_error_on_every_rank(
    four_ranks: LiveGroup, model_dirs: dict[str, str], layout: str
) -> None:
    errors = four_ranks.run(
        cells.refusal,
        path=model_dirs["qwen2"],
        backend=f"fsdp:{layout}",
        lengths=((12, 3), (12, 3), (4,), (4,)),
        mb_spec={"max_tokens_per_mb": 8},
    )
    assert [kind for kind, _ in errors] == ["PackingError"] * 4
    assert all("a sequence of 12 tokens exceeds max_tokens_per_mb=8" in message for _, message in errors[:2])
    assert all("max_tokens_per_mb" in message and "rank" in message for _, message in errors[2:])


@pytest.mark.parametrize("layout", ["t2", "c2"])
def test_two_ranks_different_rows_in_one_model_group_are_an_error(
    two_ranks: LiveGroup, model_dirs: dict[str, str], layout: str
) -> None:
    errors = two_ranks.run(cells.refusal, path=model_dirs["qwen2"], backend=f"fsdp:{layout}", lengths=((6, 5), (6, 4)))
    assert [kind for kind, _ in errors] == ["DataError"] * 2
    assert "same rows" in errors[0][1]


REFUSALS: list[tuple[str, str, dict[str, Any], dict[str, Any], str]] = [
    ("t2", "qwen2", {"num_key_value_heads": 1}, {}, "t2 does not divide num_key_value_heads=1"),
    (
        "t2",
        "qwen2",
        {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 24},
        {},
        "num_attention_heads=3",
    ),
    ("c2", "qwen2", {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 24}, {}, "c2 does not divide"),
    ("c2", "qwen2", {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}, {}, "key-value heads"),
    ("t2", "qwen2", {"vocab_size": 63}, {}, "t2 does not divide vocab_size=63"),
    ("t2", "qwen2", {"intermediate_size": 33}, {}, "t2 does not divide intermediate_size=33"),
    ("t2", "starcoder2", {}, {}, "no plan for model_type=starcoder2"),
    ("t2", "gemma2", {"head_dim": 8}, {}, "final_logit_softcapping"),
    ("c2", "qwen2", {}, {"attn_impl": "flex_attention", "optimizer": None}, "attn_impl=flex_attention"),
    ("d2e2", "qwen2", {}, {}, "fsdp has the sizes d, t and c only"),
    ("d1p2", "qwen2", {}, {}, "fsdp has the sizes d, t and c only"),
    ("d2", "qwen2", {}, {"strategy": {"pipeline_parallel_size": 2}}, "FSDP has no pipeline parallelism"),
    ("d2", "qwen2", {}, {"strategy": {"data_parallel_size": 2, "expert_parallel_size": 2}}, "has no experts"),
    ("d2t2", "qwen2", {}, {}, "fsdp:d2t2 needs 4 processes, this job has 2"),
]


@pytest.mark.parametrize(("layout", "model_type", "model", "settings", "words"), REFUSALS, ids=lambda x: str(x)[:24])
def test_two_ranks_impossible_layout_is_refused_on_every_rank(  # noqa: PLR0913 - one row of the table
    two_ranks: LiveGroup,
    tmp_path: Path,
    layout: str,
    model_type: str,
    model: dict[str, Any],
    settings: dict[str, Any],
    words: str,
) -> None:
    path = _save_model(tmp_path / "model", model_type, model)
    errors = two_ranks.run(cells.refusal, path=path, backend=f"fsdp:{layout}", **settings)
    for kind, message in errors:
        assert kind in ("ConfigError", "UnsupportedFeatureError", "AllocationValidationError")
        assert words in message


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize(
    ("layout", "model_groups", "data"),
    [
        ("d2t2", [[0, 1], [0, 1], [2, 3], [2, 3]], [(0, 2), (0, 2), (1, 2), (1, 2)]),
        ("d2c2", [[0, 1], [0, 1], [2, 3], [2, 3]], [(0, 2), (0, 2), (1, 2), (1, 2)]),
        ("c2t2", [[0, 1, 2, 3]] * 4, [(0, 1)] * 4),
        ("d4", [None] * 4, [(rank, 4) for rank in range(4)]),
    ],
)
def test_four_ranks_places_of_a_layout_are_as_documented(
    four_ranks: LiveGroup, model_dirs: dict[str, str], layout: str, model_groups: list[Any], data: list[Any]
) -> None:
    found = four_ranks.run(cells.places, path=model_dirs["qwen2"], backend=f"fsdp:{layout}")
    assert [place["model"] for place in found] == model_groups
    assert [place["data"] for place in found] == data
    heads = [rank if group is None else group[0] for rank, group in enumerate(model_groups)]
    assert [place["head"] for place in found] == heads
    assert [place["is_head"] for place in found] == [rank == head for rank, head in enumerate(heads)]
    total = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(model_dirs["qwen2"]).parameters())
    assert max(place["elements"] for place in found) < total / 4 * 1.2  # norms are whole on each tensor-parallel rank


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize(("layout", "name"), [("d2t2", "uneven"), ("c2t2", "qwen3"), ("d2c2", "gemma")])
def test_four_ranks_hf_export_loads_in_transformers_and_in_the_layout(
    four_ranks: LiveGroup, model_dirs: dict[str, str], layout: str, name: str, tmp_path: Path
) -> None:
    out = str(tmp_path / "export")
    for weights in four_ranks.run(cells.export, path=model_dirs[name], backend=f"fsdp:{layout}", out=out):
        loaded = dict(AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).named_parameters())
        assert weights.keys() == loaded.keys()
        for key, value in weights.items():
            assert torch.equal(value, loaded[key]), key


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("layout", ["d4", "d2t2", "d2c2", "c2t2"])
def test_four_ranks_bfloat16_trains_close_to_float32(
    four_ranks: LiveGroup, model_dirs: dict[str, str], layout: str
) -> None:
    d = int(layout[1]) if layout[0] == "d" else 1
    exact = _reference(model_dirs["qwen2"], "sft").losses
    arguments = {"path": model_dirs["qwen2"], "backend": f"fsdp:{layout}", "shards": UNEVEN[d]}
    half = four_ranks.run(cells.losses_of, dtype="bfloat16", **arguments)
    assert half[0][:2] == pytest.approx(exact, rel=0.03)
    assert half[0][3] < half[0][0] - 0.5
    assert all(losses == half[0] for losses in half)


@pytest.mark.parametrize("layout", ["t2", "c2"])
def test_two_ranks_logits_of_a_callback_equal_one_process(
    two_ranks: LiveGroup, model_dirs: dict[str, str], layout: str
) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_dirs["qwen2"], dtype=torch.float32)
    parts = []
    for row in cells.rows():
        n = int(row["attention_mask"].sum())
        parts.append(model(input_ids=row["input_ids"][:, :n]).logits[0])
    logits = torch.cat(parts)
    torch.log_softmax(logits, -1)[:, 3].sum().backward()
    for ours, gradients in two_ranks.run(cells.through_logits, path=model_dirs["qwen2"], backend=f"fsdp:{layout}"):
        torch.testing.assert_close(ours, logits.detach(), rtol=1e-4, atol=2e-5)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=5e-4, msg=_named(name))


@pytest.mark.parametrize("rows_key", ["all", "some", "none"])
@pytest.mark.parametrize("keep", [0, 1 << 20])
def test_vocabulary_parallel_head_in_chunks_equals_a_whole_head(two_ranks: LiveGroup, keep: int, rows_key: str) -> None:
    for differences in two_ranks.run(cells.vocabulary_parallel, chunk_rows=5, keep=keep, rows_key=rows_key):
        assert max(differences.values()) < 2e-5, differences


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("layout", ["d2t2", "c2t2"])
def test_four_ranks_ppo_role_equals_one_process(four_ranks: LiveGroup, model_dirs: dict[str, str], layout: str) -> None:
    arguments = {"path": model_dirs["qwen2"], "first_groups": 1, "ppo_n_minibatches": 1}
    expected = ppo_cells.ppo_step(backend="fsdp:d1", **arguments)
    for result in four_ranks.run(ppo_cells.ppo_step, backend=f"fsdp:{layout}", **arguments):
        for name, value in expected["weights"].items():
            torch.testing.assert_close(result["weights"][name], value, rtol=1e-5, atol=1e-5, msg=_named(name))
        for key in ("n_seqs", "n_valid_tokens", "task_reward/avg", "update/grad_norm"):
            name = f"ppo_actor/{key}"
            assert result["stats"][name] == pytest.approx(expected["stats"][name], rel=1e-5), key


@pytest.mark.slow
@pytest.mark.ci
def test_four_ranks_more_micro_batches_than_any_rank_has_rows_is_an_error_on_every_rank(
    four_ranks: LiveGroup, model_dirs: dict[str, str]
) -> None:
    errors = four_ranks.run(
        cells.refusal,
        path=model_dirs["qwen2"],
        backend="fsdp:d4",
        lengths=((4, 3), (4,), (5,), ()),
        mb_spec={"n_mbs": 3},
    )
    assert [kind for kind, _ in errors] == ["PackingError"] * 4
    assert "cannot make 3 groups of 2 sequences" in errors[0][1]
