"""FSDPEngine on two gloo ranks against one process: the right value for every layout is the same number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from areal.api.io_struct import SaveLoadMeta
from tests.engine_fakes import adamw, batch, build_engine, loss_fn, reference_step, weight_fn
from tests.torchrun import cells
from tests.torchrun.live_group import LiveGroup


def _assert_weights(ours: dict[str, torch.Tensor], reference: Any, atol: float = 1e-5) -> None:
    theirs = dict(reference.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name].detach(), rtol=1e-5, atol=atol)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("tied", {"mb_spec": {"n_mbs": 2}}),
        ("untied", {"gradient_checkpointing": True}),
        ("tied", {"mb_spec": {"max_tokens_per_mb": 20}}),  # the ranks need different numbers of micro-batches
    ],
)
def test_two_ranks_train_batch_equals_one_process(
    two_ranks: LiveGroup, model_dirs: dict[str, str], name: str, settings: dict[str, Any]
) -> None:
    first, second = two_ranks.run(cells.train, path=model_dirs[name], split=5, **settings)
    reference = AutoModelForCausalLM.from_pretrained(model_dirs[name], dtype=torch.float32)
    optimizer = adamw(reference)
    for step in range(2):
        loss, norm = reference_step(reference, batch(), optimizer)
        for rank in (first, second):
            assert rank["losses"][step] == pytest.approx(loss, rel=1e-5)
            assert rank["results"][step]["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert first["results"] == second["results"]
    _assert_weights(first["weights"], reference)
    assert (first["world"], second["world"]) == ((0, 2), (1, 2))
    assert first["local"] + second["local"] == sum(p.numel() for p in reference.parameters())
    single = build_engine(model_dirs[name])
    with torch.no_grad():
        for parameter, value in zip(single.module.parameters(), reference.parameters(), strict=True):
            parameter.copy_(value)
    for ours, expected in zip(first["logprobs"] + second["logprobs"], single.forward_batch(batch()), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=2e-5)


def test_two_ranks_all_masked_rank_equals_one_process(two_ranks: LiveGroup, model_dirs: dict[str, str]) -> None:
    first, _ = two_ranks.run(cells.train, path=model_dirs["untied"], split=4, masked_rank=1, steps=1)
    rows = batch()
    for row in rows[4:]:
        row["loss_mask"].zero_()
    reference = AutoModelForCausalLM.from_pretrained(model_dirs["untied"], dtype=torch.float32)
    _, norm = reference_step(reference, rows, adamw(reference))
    assert first["results"][0]["grad_norm"] == pytest.approx(norm, rel=1e-5)
    _assert_weights(first["weights"], reference)


def test_two_ranks_rank_without_rows_equals_one_process(two_ranks: LiveGroup, model_dirs: dict[str, str]) -> None:
    settings = {"mb_spec": {"n_mbs": 2}}
    first, second = two_ranks.run(cells.train, path=model_dirs["tied"], split=7, steps=1, **settings)
    reference = AutoModelForCausalLM.from_pretrained(model_dirs["tied"], dtype=torch.float32)
    _, norm = reference_step(reference, batch(), adamw(reference))
    assert first["results"][0]["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert second["logprobs"] == []
    _assert_weights(first["weights"], reference)


def test_two_ranks_packing_error_is_raised_on_both(two_ranks: LiveGroup, model_dirs: dict[str, str]) -> None:
    first, second = two_ranks.run(cells.packing_error, path=model_dirs["tied"])
    assert first != "no error"
    assert "another rank" in second


def test_two_ranks_bfloat16_trains_close_to_float32(two_ranks: LiveGroup, model_dirs: dict[str, str]) -> None:
    half, _ = two_ranks.run(cells.train, path=model_dirs["tied"], split=4, steps=3, dtype="bfloat16")
    exact, _ = two_ranks.run(cells.train, path=model_dirs["tied"], split=4, steps=3)
    assert half["losses"] == pytest.approx(exact["losses"], rel=0.03)
    assert {w.dtype for w in half["weights"].values()} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_two_ranks_hf_export_loads_in_transformers(
    two_ranks: LiveGroup, model_dirs: dict[str, str], name: str, tmp_path: Path
) -> None:
    out = str(tmp_path / "export")
    first, second = two_ranks.run(cells.export, path=model_dirs[name], out=out)
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.dtype == torch.float32
    assert type(loaded).__name__ in ("Qwen2ForCausalLM", "LlamaForCausalLM")
    _assert_weights(first, loaded, atol=0)
    _assert_weights(second, loaded, atol=0)
    again, _ = two_ranks.run(cells.load_hf, path=model_dirs[name], other=out)
    _assert_weights(again, loaded, atol=0)


def test_two_ranks_dcp_resume_equals_uninterrupted_run_and_reshards(
    two_ranks: LiveGroup, model_dirs: dict[str, str], tmp_path: Path
) -> None:
    out = str(tmp_path / "recover")
    went_on = two_ranks.run(cells.save_and_go_on, path=model_dirs["tied"], out=out)
    resumed = two_ranks.run(cells.resume, path=model_dirs["tied"], out=out)
    for before, after in zip(went_on, resumed, strict=True):
        assert after["version"] == 2
        assert torch.equal(before["drawn"], after["drawn"])
        assert before["results"] == after["results"]
        for name, value in before["weights"].items():
            assert torch.equal(value, after["weights"][name]), name

    # The same recover point in one process, with all rows there.
    engine = build_engine(model_dirs["tied"], optimizer=cells.COSINE, ft_spec=cells.SPEC)
    engine.load(SaveLoadMeta(out, "dcp", True))
    results = cells.step_some(engine, batch(), 2)
    for ours, theirs in zip(results, went_on[0]["results"], strict=True):
        assert ours["lr"] == theirs["lr"]
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
    for name, value in engine.named_full_tensors():
        torch.testing.assert_close(value, went_on[0]["weights"][name], rtol=1e-5, atol=1e-5)


def test_one_process_dcp_is_read_by_two_ranks(two_ranks: LiveGroup, model_dirs: dict[str, str], tmp_path: Path) -> None:
    out = str(tmp_path / "recover")
    engine = build_engine(model_dirs["tied"], optimizer=cells.COSINE, ft_spec=cells.SPEC)
    cells.step_some(engine, batch(), 2)
    engine.save(SaveLoadMeta(out, "dcp", True))
    cells.step_some(engine, batch(), 2)
    first, _ = two_ranks.run(cells.resume, path=model_dirs["tied"], out=out)
    for name, value in engine.named_full_tensors():
        torch.testing.assert_close(value, first["weights"][name], rtol=1e-5, atol=1e-5)


def test_one_rank_engine_inside_a_two_rank_job_is_refused() -> None:
    # Nothing is launched here: the job has one process, the layout wants two.
    with pytest.raises(ValueError, match=r"scheduler\.type=local"):
        build_engine("unused", backend="fsdp:d2")


def test_weight_fn_counts_over_ranks(two_ranks: LiveGroup, model_dirs: dict[str, str]) -> None:
    # A one-token shard and a long one: every token weighs the same, whichever rank holds it.
    first, _ = two_ranks.run(cells.train, path=model_dirs["tied"], split=1, steps=1)
    expected = build_engine(model_dirs["tied"]).eval_batch(batch(), loss_fn, weight_fn)
    assert first["losses"][0] == pytest.approx(expected.item(), rel=1e-5)
