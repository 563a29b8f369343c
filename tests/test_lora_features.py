"""Adapters beside other features, one process: two steps with a feature are the two steps without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from areal.api.config.archon import ArchonEngineConfig
from areal.api.config.fsdp import FSDPEngineConfig
from areal.api.io_struct import SaveLoadMeta
from areal.engine.core.layer_step import LayerwiseAdamW
from areal.engine.core.lora import adapted_layers, merged_weight
from areal.engine.core.lora_layout import SCALING
from areal.engine.fsdp_engine import FSDPEngine
from areal.experimental.engine.archon_engine import ArchonEngine
from tests.engine_fakes import engine_config
from tests.fakes import tiny_model
from tests.tree_rows import branches, packed

BATCH = packed(branches(roots=3))
N_TREE_TOKENS = 256
TREES: dict[str, Any] = {
    "enable_tree_training": True,
    "pad_to_maximum": True,
    "mb_spec": {"max_tokens_per_mb": N_TREE_TOKENS},
}


def checkpointed(**settings: Any) -> dict[str, Any]:
    """Settings of Archon whose layers are checkpointed."""
    return {"gradient_checkpointing": True, "archon": ArchonEngineConfig(**settings)}


@dataclass
class Steps:
    """Losses before each of two steps, gradient norms, adapters after them."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    adapter: dict[str, Tensor] = field(default_factory=dict)
    stats: dict[str, float] = field(default_factory=dict)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A model, and an adapter of it that adds something."""
    return save_places(tmp_path_factory.mktemp("models"), "qwen2")


def save_places(root: Path, arch: str, **settings: Any) -> tuple[str, str]:
    """Directories of a fresh model and of its adapter after a step, without which the adapter would add nothing."""
    tiny_model(arch).save_pretrained(root / "model")
    engine = build(str(root / "model"), "fsdp:d1", **settings)
    one_step(engine, Steps())
    engine.save(SaveLoadMeta(str(root / "start"), "hf", False))
    engine.destroy()
    return str(root / "model"), str(root / "start")


@pytest.fixture(scope="module")
def plain_steps(places: tuple[str, str]) -> dict[str, Steps]:
    """What comes out without the feature, by backend."""
    return {backend: two_steps(started(places, backend)) for backend in ("fsdp:d1", "archon:d1")}


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Nothing is compiled before or after the test."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def build(path: str, backend: str, **settings: Any) -> Any:
    kind: Any = FSDPEngine if backend.startswith("fsdp") else ArchonEngine
    lora = {"use_lora": True, "lora_rank": 4, "lora_alpha": 8}
    engine = kind(engine_config(path, backend=backend, **lora, **settings))
    engine.create_process_group()
    engine.initialize(None, None)
    return engine.train()


def started(places: tuple[str, str], backend: str, **settings: Any) -> Any:
    """An engine that holds the adapter of ``places``."""
    engine = build(places[0], backend, **settings)
    engine.load(SaveLoadMeta(places[1], "hf", False))
    return engine


def loss_fn(logprobs: Tensor, entropy: Tensor, fields: dict[str, Any]) -> Tensor:
    return -((logprobs + 0.1 * entropy) * fields["loss_mask"]).sum() / fields["loss_mask"].sum()


def weight_fn(fields: dict[str, Any]) -> Tensor:
    return fields["loss_mask"].count_nonzero()


def one_step(engine: Any, steps: Steps) -> None:
    steps.losses.append(float(engine.eval_batch(BATCH, loss_fn, weight_fn, token_mask="loss_mask")))
    steps.stats = engine.train_batch(BATCH, loss_fn, weight_fn, token_mask="loss_mask")
    steps.norms.append(steps.stats["grad_norm"])


def adapter_of(engine: Any) -> dict[str, Tensor]:
    engine.send_adapter()
    return {name: tensor.clone() for name, tensor in engine.named_full_tensors()}


def two_steps(engine: Any, between: Callable[[Any], None] = lambda engine: None) -> Steps:
    steps = Steps()
    one_step(engine, steps)
    between(engine)
    one_step(engine, steps)
    steps.adapter = adapter_of(engine)
    return steps


def assert_equal(found: Steps, expected: Steps) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert found.norms == pytest.approx(expected.norms, rel=1e-5)
    assert expected.losses[1] < expected.losses[0] - 0.01
    assert found.adapter.keys() == expected.adapter.keys()
    for name, tensor in expected.adapter.items():
        torch.testing.assert_close(found.adapter[name], tensor, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("backend", ["fsdp:d1", "archon:d1"])
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_lora_steps_over_prefix_trees_equal_those_over_sequences(
    places: tuple[str, str], plain_steps: dict[str, Steps], backend: str, recompute: bool
) -> None:
    engine = started(places, backend, gradient_checkpointing=recompute, **TREES)

    found = two_steps(engine)

    assert found.stats["tree_token_ratio"] < 0.7
    assert_equal(found, plain_steps[backend])


def test_lora_steps_layer_by_layer_equal_one_step_of_all(
    places: tuple[str, str], plain_steps: dict[str, Steps]
) -> None:
    engine = started(places, "fsdp:d1", fsdp=FSDPEngineConfig(per_layer_optim_step=True))
    torch_optimizer = engine._loop.optimizer.torch_optimizer
    assert isinstance(torch_optimizer, LayerwiseAdamW)

    found = two_steps(engine)

    assert [len(layer) for layer in torch_optimizer._layers] == [14, 14]  # seven pairs in each of two layers
    assert_equal(found, plain_steps["fsdp:d1"])


@pytest.mark.parametrize(
    ("settings", "n_wrapped"),
    [
        (checkpointed(ac_mode="full"), 2),
        (checkpointed(ac_mode="selective", selective_ac_option="op"), 2),
        (checkpointed(ac_mode="selective", selective_ac_option="2"), 1),
        (checkpointed(ac_mode="full", ac_preserve_rng_state=True), 2),
    ],
    ids=["full", "op", "every second", "random state"],
)
def test_lora_steps_of_each_activation_checkpointing_equal_those_without(
    places: tuple[str, str], plain_steps: dict[str, Steps], settings: dict[str, Any], n_wrapped: int
) -> None:
    engine = started(places, "archon:d1", **settings)

    found = two_steps(engine)

    assert sum(isinstance(layer, CheckpointWrapper) for layer in engine.module.layers.values()) == n_wrapped
    assert_equal(found, plain_steps["archon:d1"])


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["k_proj"], ["up_proj", "o_proj"]], ids=str)
def test_lora_on_some_layers_of_checkpointed_ones_changes_no_product_that_is_kept(
    tmp_path: Path, arch: str, targets: list[str]
) -> None:
    """Every second product is kept for the second computation: which are those of base layers depends on targets."""
    places = save_places(tmp_path, arch, target_modules=targets)
    plain = two_steps(started(places, "archon:d1", target_modules=targets))

    found = two_steps(started(places, "archon:d1", target_modules=targets, **checkpointed(ac_mode="selective")))

    assert_equal(found, plain)


@pytest.mark.slow  # up to a minute of C++ compilation each
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("backend", "settings", "most_graphs"),
    [
        ("fsdp:d1", {"fsdp": FSDPEngineConfig(enable_compile=True)}, 12),
        ("archon:d1", {"archon": ArchonEngineConfig(enable_compile=True, attn_type="varlen")}, 12),
        ("archon:d1", checkpointed(enable_compile=True, attn_type="sdpa", ac_mode="selective"), 3),
        ("archon:d1", checkpointed(enable_compile=True, attn_type="sdpa", ac_mode="memory_budget"), 3),
    ],
    ids=["fsdp", "archon parts", "archon op", "archon budget"],
)
def test_lora_compiled_steps_equal_plain_ones_in_few_graphs(
    places: tuple[str, str], plain_steps: dict[str, Steps], backend: str, settings: dict[str, Any], most_graphs: int
) -> None:
    found = two_steps(started(places, backend, **settings))

    assert 1 <= torch._dynamo.utils.counters["stats"]["unique_graphs"] <= most_graphs
    assert_equal(found, plain_steps[backend])


@pytest.mark.parametrize("backend", ["fsdp:d1", "archon:d1"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lora_engine_that_leaves_memory_between_steps_goes_on_bit_for_bit(
    places: tuple[str, str], backend: str, dtype: str, tmp_path: Path
) -> None:
    expected = two_steps(started(places, backend, dtype=dtype))
    published: list[dict[str, Tensor]] = []

    def leave(engine: Any) -> None:
        before = adapter_of(engine)
        engine.offload()
        assert [p.untyped_storage().nbytes() for p in engine.module.parameters() if p.untyped_storage().nbytes()] == []
        published.extend((before, adapter_of(engine)))
        engine.save(SaveLoadMeta(str(tmp_path / "merged"), "hf", False, merged=True))
        engine.save(SaveLoadMeta(str(tmp_path / "point"), "dcp", True))
        assert engine.is_offload

    found = two_steps(started(places, backend, dtype=dtype), leave)

    assert (found.losses, found.norms) == (expected.losses, expected.norms)
    for name, tensor in expected.adapter.items():
        assert torch.equal(found.adapter[name], tensor), name
    before, during = published
    assert SCALING in before
    assert all(torch.equal(during[name], tensor) for name, tensor in before.items())
    assert (tmp_path / "merged" / "model.safetensors").exists()


def test_merged_weight_is_made_where_the_weight_is_though_its_adapter_is_elsewhere(places: tuple[str, str]) -> None:
    _, layer = next(adapted_layers(build(places[0], "archon:d1").module))
    weight = layer.get_base_layer().weight.detach().to("meta")

    merged = merged_weight(layer, weight)

    assert (merged.device.type, merged.shape, merged.dtype) == ("meta", weight.shape, weight.dtype)
