"""Activation checkpointing of Archon models changes memory and nothing else."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from areal.experimental.models.archon.activation_checkpoint import (
    AcOptions,
    apply_activation_checkpointing,
    is_recomputing,
)
from areal.experimental.models.archon.base import ArchonModel
from areal.experimental.models.archon.pipeline_split import keep_modules
from areal.experimental.models.archon.state_dict import plain_name
from tests.archon_fakes import archon_model, hf_model, packed_row

TOLERANCE = {"rtol": 1e-6, "atol": 1e-6}
MODES = {
    "full": AcOptions("full"),
    "op": AcOptions("selective"),
    "every_1": AcOptions("selective", every=1),
    "every_2": AcOptions("selective", every=2),
    "rng": AcOptions("selective", preserve_rng_state=True),
}
MATRIX_PRODUCTS = ("aten.mm.default", "aten.addmm.default")


class SeenOps(TorchDispatchMode):
    """Counts ops that run, by name, and knows which of the tensors that they made still live."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.counts[str(func)] += 1
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    def live_bytes(self) -> int:
        return sum(size for ref, size in self._made.values() if not ref.expired())

    def matrix_products(self) -> int:
        return sum(self.counts[name] for name in MATRIX_PRODUCTS)


def build(family: str, options: AcOptions | None, attn_type: str = "sdpa", **overrides: Any) -> ArchonModel:
    model = archon_model(hf_model(family, **overrides), attn_type=attn_type).train()
    if options is not None:
        apply_activation_checkpointing(model, options)
    return model


def loss_of(model: ArchonModel, lengths: tuple[int, ...] = (5, 1, 17, 11)) -> Tensor:
    return model(*packed_row(lengths)).log_softmax(-1)[..., 3].mean()


def loss_and_gradients(model: ArchonModel) -> list[Tensor]:
    loss = loss_of(model)
    loss.backward()
    return [loss.detach(), *gradients(model)]


def gradients(model: ArchonModel) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters()]


def wrapped(model: ArchonModel) -> list[str]:
    return [key for key, layer in model.layers.items() if isinstance(layer, CheckpointWrapper)]


def forward_and_backward_ops(model: ArchonModel) -> tuple[SeenOps, SeenOps, int]:
    """Ops of both passes, and bytes that the model holds between them."""
    with SeenOps() as forward:
        loss = loss_of(model)
    held = forward.live_bytes()
    with SeenOps() as backward:
        loss.backward()
    return forward, backward, held


# -- results


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("attn_type", ["sdpa", "varlen"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_loss_and_gradients_of_each_mode_equal_those_without(family, attn_type, mode):
    expected = loss_and_gradients(build(family, None, attn_type))

    found = loss_and_gradients(build(family, MODES[mode], attn_type))

    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, wanted, **TOLERANCE)


@pytest.mark.parametrize("mode", ["full", "op"])
@pytest.mark.parametrize("attn_type", ["sdpa", "varlen"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_micro_batches_that_overlap_as_in_a_pipeline_equal_those_without(family, attn_type, mode):
    plain, checkpointed = build(family, None, attn_type), build(family, MODES[mode], attn_type)

    for model in (plain, checkpointed):
        losses = [loss_of(model), loss_of(model, (4, 9))]
        for loss in losses:
            loss.backward()

    for actual, wanted in zip(gradients(checkpointed), gradients(plain), strict=True):
        torch.testing.assert_close(actual, wanted, **TOLERANCE)


def test_debug_mode_shows_the_ops_of_both_computations_where_they_differ(monkeypatch):
    from torch.testing._internal import logging_tensor

    monkeypatch.setattr(logging_tensor.logger, "propagate", True)  # debugging turns it off for good
    model = build("llama", AcOptions("full", debug=True), num_hidden_layers=1)
    wider: Any = model.layers["0"].feed_forward
    torch.testing.assert_close(loss_of(model), loss_of(build("llama", None, num_hidden_layers=1)), **TOLERANCE)

    loss = loss_of(model)
    wider.register_forward_pre_hook(lambda module, args: (args[0].sin(),))

    with pytest.raises(RuntimeError, match=r"(?s)in original.*aten\.sin.* in recompute"):
        loss.backward()


# -- which layers


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (AcOptions("full"), ["0", "1", "2", "3", "4"]),
        (AcOptions("selective"), ["0", "1", "2", "3", "4"]),
        (AcOptions("selective", every=2), ["1", "3"]),
        (AcOptions("selective", every=3), ["2"]),
        (AcOptions("selective", every=5), ["4"]),
        (AcOptions("memory_budget"), []),
    ],
)
def test_wrapped_layers_of_each_option_are_counted_afresh_for_each_model(options, expected):
    for _ in range(2):
        assert wrapped(build("llama", options, num_hidden_layers=5)) == expected


def test_wrapped_layers_of_a_stage_are_those_of_the_whole_model():
    stage = keep_modules(build("llama", None, num_hidden_layers=5), ["layers.2", "layers.3", "layers.4"])

    apply_activation_checkpointing(stage, AcOptions("selective", every=2))

    assert wrapped(stage) == ["3"]


def test_model_without_layers_is_refused():
    with pytest.raises(ValueError, match=r"Linear has no layers .* gradient_checkpointing=false"):
        apply_activation_checkpointing(nn.Linear(2, 2), AcOptions("full"))


def test_parameter_names_of_a_checkpointed_model_are_plain_names_behind_the_wrapper():
    plain, checkpointed = build("qwen3_moe", None), build("qwen3_moe", MODES["full"])

    names = [name for name, _ in checkpointed.named_parameters()]

    assert [plain_name(name) for name in names] == [name for name, _ in plain.named_parameters()]
    assert names != [plain_name(name) for name in names]
    checkpointed.load_state_dict(plain.state_dict())


# -- what is kept, and what is computed again


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_memory_between_the_passes_shrinks_with_each_mode(family):
    options = {"none": None, "every_2": MODES["every_2"], "op": MODES["op"], "full": MODES["full"]}

    held = {name: forward_and_backward_ops(build(family, option))[2] for name, option in options.items()}

    assert held["full"] < held["op"] < 0.7 * held["none"]
    assert held["full"] < held["every_2"] < held["none"]
    assert held["full"] < 0.5 * held["none"]


def test_full_mode_runs_attention_again_and_the_choice_by_op_does_not():
    attention = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    models = {mode: build("llama", MODES[mode]) for mode in ("full", "op")}

    backward = {mode: forward_and_backward_ops(model)[1] for mode, model in models.items()}

    assert backward["full"].counts[attention] == 2  # one in each layer
    assert backward["op"].counts[attention] == 0


def test_choice_by_op_runs_every_second_matrix_product_again():
    plain, full, by_op = (
        forward_and_backward_ops(build("llama", option))[1].matrix_products()
        for option in (None, MODES["full"], MODES["op"])
    )

    # q k v o w1 w3 w2 in each of 2 layers; nothing needs w2's output
    assert full - plain == 2 * 6
    assert by_op - plain == 2 * 3


def test_choice_by_op_keeps_the_routes_and_computes_gates_again():
    gate = Counter[tuple[int, ...]]()

    def count(module: nn.Module, args: Any, output: Tensor) -> None:
        gate[tuple(output.shape)] += 1

    model = build("qwen3_moe", MODES["op"])
    for layer in model.layers.values():
        layer.moe.router.gate.register_forward_hook(count)
    _, backward, _ = forward_and_backward_ops(model)

    assert gate == {(34, 4): 4}  # 2 layers, twice
    assert backward.counts["aten.topk.default"] == 0


def test_choice_by_op_counts_matrix_products_without_those_of_gates():
    with SeenOps() as forward:
        loss = loss_of(build("qwen3_moe", None, num_experts=3))
    with SeenOps() as plain:
        loss.backward()
    backward = forward_and_backward_ops(build("qwen3_moe", MODES["op"], num_experts=3))[1]

    routers, others, head = 2, 2 * (4 + 3 * 3), 1
    assert forward.matrix_products() == others + routers + head
    # 6 of 13 in each layer are kept; with the gate, which comes fifth, they would be 7
    assert backward.matrix_products() - plain.matrix_products() == others + routers - 2 * 6


@pytest.mark.parametrize("preserve", [True, False])
def test_random_numbers_are_drawn_again_where_the_state_is_preserved(preserve):
    found = []
    for options in (None, AcOptions("full", preserve_rng_state=preserve)):
        model = build("llama", options)
        for layer in model.layers.values():
            layer.feed_forward.w2.register_forward_pre_hook(lambda _, args: (F.dropout(args[0], 0.5),))
        torch.manual_seed(3)
        loss_of(model).backward()
        found.append(gradients(model))

    assert all(torch.allclose(x, y, **TOLERANCE) for x, y in zip(*found, strict=True)) is preserve


@pytest.mark.parametrize("mode", ["full", "op"])
def test_outside_of_training_nothing_is_checkpointed(mode):
    model = build("llama", MODES[mode])
    calls: list[bool] = []
    for layer in model.layers.values():
        layer.attention.register_forward_hook(lambda *_: calls.append(is_recomputing()))

    loss_of(model.eval()).backward()
    with torch.no_grad():
        loss_of(model.train())

    assert calls == [False] * 4


def test_is_recomputing_is_true_in_the_second_computation_only():
    model = build("llama", MODES["every_2"], num_hidden_layers=4)
    calls: list[tuple[str, bool]] = []
    for key, layer in model.layers.items():
        layer.attention.register_forward_hook(lambda *_, key=key: calls.append((key, is_recomputing())))

    loss_of(model).backward()

    assert calls == [("0", False), ("1", False), ("2", False), ("3", False), ("3", True), ("1", True)]
    assert not is_recomputing()


@pytest.mark.parametrize("mode", ["full", "op"])
def test_visits_of_experts_that_are_computed_again_count_once(mode):
    plain, checkpointed = build("qwen3_moe", None), build("qwen3_moe", MODES[mode])

    for model in (plain, checkpointed):
        loss_of(model).backward()

    for layer, other in zip(checkpointed.layers.values(), plain.layers.values(), strict=True):
        assert layer.moe.tokens_per_expert.tolist() == other.moe.tokens_per_expert.tolist()
        assert layer.moe.tokens_per_expert.sum() == 34 * 2
