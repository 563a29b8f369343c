"""Value models of the FSDP engine in one process: what they load, what they refuse, how exact their values are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from areal.api.io_struct import SaveLoadMeta
from areal.engine.core.replay import replay_step
from areal.engine.core.value_head import token_values
from areal.engine.fsdp_engine import FSDPEngine
from areal.experimental.engine.archon_engine import ArchonEngine
from areal.trainer.ppo.critic import CriticLoss, value_tokens
from areal.utils.batch import pack
from areal.utils.errors import CheckpointError, ConfigError, UnsupportedFeatureError
from areal.utils.stats_tracker import DistributedStatsTracker
from tests.engine_fakes import batch, build_engine, engine_config, predicting_mask, weight_fn
from tests.fakes import tiny_config, tiny_model


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A causal LM with a tied head."""
    path = tmp_path_factory.mktemp("lm")
    tiny_model("qwen2").save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def critic(tmp_path_factory: pytest.TempPathFactory, lm: str) -> str:
    """A saved critic, written by transformers."""
    path = tmp_path_factory.mktemp("critic")
    torch.manual_seed(1)
    AutoModelForSequenceClassification.from_pretrained(lm, num_labels=1, dtype=torch.float32).save_pretrained(path)
    return str(path)


def square(values: Tensor, packed: dict[str, Any]) -> Tensor:
    """Mean squared distance of the values from 1 over predicting positions."""
    mask = predicting_mask(packed)
    return ((values - 1).square() * mask).sum() / mask.sum()


def values_of(engine: FSDPEngine) -> list[Tensor]:
    return engine.eval().forward_batch(batch())


def _copy(source: str, target: Path, **changes: Any) -> str:
    """A checkpoint with tensors replaced or removed (None)."""
    AutoConfig.from_pretrained(source).save_pretrained(target)
    tensors = load_file(Path(source, "model.safetensors"))
    for name, tensor in changes.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return str(target)


def test_forward_batch_every_form_has_the_value_of_every_token(critic: str) -> None:
    engine, rows = build_engine(critic, is_critic=True), batch()
    module = AutoModelForSequenceClassification.from_pretrained(critic, dtype=torch.float32)

    listed = engine.eval().forward_batch(rows)
    packed = engine.forward_batch(pack(rows))

    whole = []
    for row, values in zip(rows, listed, strict=True):
        n = int(row["attention_mask"].sum())
        expected = module.score(module.base_model(row["input_ids"][:, :n]).last_hidden_state)[0, :, 0]
        torch.testing.assert_close(values[0, :n], expected, rtol=1e-5, atol=1e-5)
        assert values.shape == row["input_ids"].shape
        assert values.dtype == torch.float32
        assert not values[0, n:].any()
        whole.append(values[0, :n])
    torch.testing.assert_close(packed, torch.cat(whole), rtol=1e-5, atol=1e-6)


def test_forward_batch_prompts_shared_have_the_values_of_unshared_ones(critic: str) -> None:
    engine = build_engine(critic, is_critic=True).eval()
    prompt = torch.arange(2, 42)
    rows = []
    for n in (3, 9, 5):
        ids = torch.cat([prompt, torch.arange(n) + 20])[None]
        rows.append({"input_ids": ids, "attention_mask": torch.ones_like(ids, dtype=torch.bool)})

    together = engine.forward_batch(rows)

    for row, values in zip(rows, together, strict=True):
        torch.testing.assert_close(values, engine.forward_batch([row])[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n_mbs", [1, 2, 5])
def test_train_batch_micro_batches_do_not_change_the_step(critic: str, n_mbs: int) -> None:
    one, cut = (build_engine(critic, is_critic=True, mb_spec={"n_mbs": n}) for n in (1, n_mbs))

    first, second = (engine.train_batch(batch(), square, weight_fn) for engine in (one, cut))

    assert second["num_micro_batches"] == n_mbs
    assert first["grad_norm"] == pytest.approx(second["grad_norm"], rel=1e-5)
    for a, b in zip(one.module.parameters(), cut.module.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_train_batch_learns_a_constant_value(lm: str) -> None:
    engine = build_engine(lm, is_critic=True)
    before = engine.eval_batch(batch(), square, weight_fn).item()

    for _ in range(40):
        engine.train().train_batch(batch(), square, weight_fn)

    assert engine.eval_batch(batch(), square, weight_fn).item() < 0.05 * before


def test_forward_backward_batch_gives_values(critic: str) -> None:
    engine = build_engine(critic, is_critic=True)
    seen: list[Tensor] = []

    def process(values: Tensor, packed: dict[str, Any]) -> Tensor:
        seen.append(values.detach())
        return values.sum()

    engine.forward_backward_batch([pack(batch())], process)

    torch.testing.assert_close(seen[0], engine.forward_batch(pack(batch())), rtol=1e-6, atol=1e-6)
    assert engine.module.score.weight.grad.any()


def test_token_values_bfloat16_inputs_give_float32_values_and_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(50, 64, generator=generator).bfloat16().requires_grad_()
    head = torch.randn(1, 64, generator=generator).bfloat16().requires_grad_()

    values = token_values(hidden, head)
    values.sum().backward()

    assert values.dtype == torch.float32
    exact = hidden.detach().double() @ head.detach().double()[0]
    torch.testing.assert_close(values.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hidden.grad, head.detach().expand_as(hidden), rtol=0, atol=0)


def test_token_values_gradients_in_float64_equal_finite_differences() -> None:
    hidden = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    head = torch.randn(1, 3, dtype=torch.float64, requires_grad=True)

    assert torch.autograd.gradcheck(token_values, (hidden, head))


@pytest.mark.parametrize("name", ["lm", "critic"])
def test_save_and_load_hf_give_the_same_critic(request: pytest.FixtureRequest, tmp_path: Path, name: str) -> None:
    engine = build_engine(request.getfixturevalue(name), is_critic=True)
    engine.train_batch(batch(), square, weight_fn)
    expected = values_of(engine)

    engine.save(SaveLoadMeta(str(tmp_path / "out"), "hf", False))
    engine.train().train_batch(batch(), square, weight_fn)
    engine.load(SaveLoadMeta(str(tmp_path / "out"), "hf", False))

    for again in (values_of(engine), values_of(build_engine(str(tmp_path / "out"), is_critic=True))):
        for a, b in zip(again, expected, strict=True):
            assert torch.equal(a, b)
    assert not (tmp_path / "out" / "generation_config.json").exists()


def test_load_hf_without_a_value_head_is_refused(critic: str, lm: str) -> None:
    engine = build_engine(critic, is_critic=True)

    with pytest.raises(CheckpointError, match=r"score\.weight"):
        engine.load(SaveLoadMeta(lm, "hf", False))


def test_family_without_a_classifier_class_trains_saves_and_loads(tmp_path: Path) -> None:
    settings = {key: value for key, value in tiny_config("llama").to_dict().items() if key != "model_type"}
    config = AutoConfig.for_model("granite", **settings)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "lm")
    engine = build_engine(str(tmp_path / "lm"), is_critic=True)
    engine.train_batch(batch(), square, weight_fn)

    engine.save(SaveLoadMeta(str(tmp_path / "out"), "hf", False))

    assert AutoConfig.from_pretrained(tmp_path / "out").architectures == ["GraniteForSequenceClassification"]
    again = build_engine(str(tmp_path / "out"), is_critic=True)
    for a, b in zip(values_of(again), values_of(engine), strict=True):
        assert torch.equal(a, b)


def test_init_from_scratch_makes_a_value_head(lm: str) -> None:
    engine = build_engine(lm, is_critic=True, init_from_scratch=True)

    assert engine.module.score.weight.std() > 0.1
    assert not engine.module.config.tie_word_embeddings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"score.weight": torch.zeros(2, 32)}, r"score\.weight"),
        ({"score.bias": torch.zeros(1)}, "bias"),
        ({"model.norm.weight": None}, r"model\.norm\.weight"),
    ],
)
@pytest.mark.parametrize("engine_class", [FSDPEngine, ArchonEngine])
def test_saved_classifier_that_is_no_critic_is_refused_by_name(
    critic: str, tmp_path: Path, changes: dict[str, Any], message: str, engine_class: type
) -> None:
    path = _copy(critic, tmp_path, **changes)
    backend = "fsdp:d1" if engine_class is FSDPEngine else "archon:d1"
    engine = engine_class(engine_config(path, backend=backend, is_critic=True))

    with pytest.raises(CheckpointError, match=message):
        engine.initialize(None, None)


def test_saved_critic_as_a_policy_is_refused(critic: str, tmp_path: Path) -> None:
    build_engine(critic, is_critic=True).save(SaveLoadMeta(str(tmp_path / "out"), "hf", False))

    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        build_engine(str(tmp_path / "out"))


def test_saved_critic_in_a_pickle_is_refused(critic: str, tmp_path: Path) -> None:
    AutoConfig.from_pretrained(critic).save_pretrained(tmp_path)
    torch.save(load_file(Path(critic, "model.safetensors")), tmp_path / "pytorch_model.bin")

    with pytest.raises(ConfigError, match="safetensors"):
        build_engine(str(tmp_path), is_critic=True)


def test_head_that_is_not_linear_is_refused(lm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.Qwen2ForCausalLM.get_output_embeddings", lambda self: None)

    with pytest.raises(UnsupportedFeatureError, match="linear"):
        build_engine(lm, is_critic=True)


def test_failing_critic_step_is_captured_and_replays(lm: str, tmp_path: Path) -> None:
    from areal.api.config.ppo import PPOCriticConfig
    from areal.api.config.train import FailureCaptureConfig
    from tests.engine_fakes import ADAM, OptimizerConfig

    config = PPOCriticConfig(
        experiment_name="e",
        trial_name="t",
        path=lm,
        backend="fsdp:d1",
        dtype="float32",
        is_critic=True,
        optimizer=OptimizerConfig(**ADAM),
        failure_capture=FailureCaptureConfig(directory=str(tmp_path)),
    )
    engine = FSDPEngine(config)
    engine.create_process_group()
    engine.initialize(None, None)
    rows = [{**row, "values": torch.zeros(row["input_ids"].shape)} for row in batch()]
    rows = [{**row, "returns": torch.where(row["loss_mask"] != 0, torch.nan, 0.0)} for row in rows]

    result = engine.train_batch(rows, CriticLoss(config, DistributedStatsTracker("ppo_critic")), value_tokens)

    assert result["update_successful"] == 0.0
    assert replay_step(tmp_path / "step_0").reproduced
