"""Parts of the Megatron engine that need megatron-core and no second rank: CPU context, schedule, ranges as boxes."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from areal.api.config.optimizer import OptimizerConfig
from areal.api.io_struct import FinetuneSpec
from areal.engine.core.lr_schedule import LrSchedule

pytest.importorskip("megatron.core", reason="megatron-core is not installed; pip install 'areal[megatron]'")
import megatron.core.transformer.moe.moe_utils as moe_utils  # noqa: E402

from areal.engine.megatron_utils.cpu_compat import cpu_compat, tensor_types_of_cuda  # noqa: E402 - needs megatron-core
from areal.engine.megatron_utils.optimizer import MegatronSchedule  # noqa: E402
from areal.engine.megatron_utils.spec import choose_spec, layer_specs  # noqa: E402
from areal.engine.megatron_utils.weights import Part, Run, boxes_of_run  # noqa: E402
from tests.fakes import save_tiny_model  # noqa: E402
from tests.torchrun import megatron_cells as cells  # noqa: E402

SPEC = FinetuneSpec(total_train_epochs=1, dataset_size=80, train_batch_size=4)


# -- the CPU context ---------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_cpu_compat_means_the_cpu_inside_and_leaves_everything_as_it_was() -> None:
    before = {name: getattr(torch.cuda, name) for name in ("current_device", "Stream", "manual_seed", "stream")}

    with cpu_compat():
        with cpu_compat():
            assert torch.cuda.current_device() == torch.device("cpu")
        made = torch.zeros(2, device="cuda", pin_memory=True)
        moved = made.cuda().to("cuda")
        assert made.type() == "torch.FloatTensor"
        with tensor_types_of_cuda():
            assert made.type() == "torch.cuda.FloatTensor"
        assert torch.cuda.current_stream() == torch.cuda.Stream()

    assert moved is made or moved.device.type == "cpu"
    assert {name: getattr(torch.cuda, name) for name in before} == before
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(2, device="cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_cpu_compat_of_one_thread_outlives_that_of_another() -> None:
    inside, leave = threading.Event(), threading.Event()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            with cpu_compat():
                inside.set()
                leave.wait(10)
                torch.empty(1, device=torch.cuda.current_device())
        except BaseException as exc:  # noqa: BLE001 - told to the test
            failures.append(exc)

    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(10)
    with cpu_compat():
        pass
    leave.set()
    thread.join(10)

    assert failures == []


# -- the schedule ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("lowest", [0.0, 0.1])
def test_megatron_schedule_has_the_rates_of_every_other_engine(kind: Any, warmup: float, lowest: float) -> None:
    config = OptimizerConfig(lr=0.5, lr_scheduler_type=kind, warmup_steps_proportion=warmup, min_lr_ratio=lowest)
    groups = [{"lr": 0.0, "weight_decay": 0.0}, {"lr": 0.0, "weight_decay": 0.0, "wd_mult": 0.0}]
    ours = MegatronSchedule(config, SPEC, SimpleNamespace(param_groups=groups))  # type: ignore[arg-type]  # all it reads
    theirs = LrSchedule(config, SPEC)

    for step in range(23):
        ours.apply()
        assert ours.steps_done == theirs.steps_done == step
        assert ours.lr == pytest.approx(theirs.lr, abs=1e-12)
        assert groups[0]["lr"] == groups[1]["lr"] == ours.lr
        assert groups[0]["weight_decay"] == config.weight_decay
        assert groups[1]["weight_decay"] == 0.0  # a group's factor acts through the scheduler
        ours.step()
        theirs.step()

    ours.steps_done = 7
    theirs.steps_done = 7
    assert ours.lr == pytest.approx(theirs.lr, abs=1e-12)


def test_engine_every_parameter_group_has_the_rate_of_the_schedule(tmp_path: Path) -> None:
    with cells.built(save_tiny_model(tmp_path), "megatron:d1", SPEC, optimizer=cells.COSINE) as engine:
        optimizer = engine.loop.optimizer
        for steps in (1, 4, 11, 20):  # in the warm-up, at its end, behind it, at the end of the run
            optimizer.schedule.steps_done = steps
            expected = LrSchedule(engine.config.optimizer, SPEC)
            expected.steps_done = steps
            optimizer.schedule.apply()
            rates = [group["lr"] for group in optimizer.megatron.param_groups]

            assert rates == pytest.approx([expected.lr] * len(rates), rel=1e-9)
            assert optimizer.schedule.lr == pytest.approx(expected.lr, rel=1e-9)


# -- layers ------------------------------------------------------------------------------------------------------------


def test_portable_layers_route_without_transformer_engine_on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(moe_utils, "te_general_gemm", raising=False)
    config = SimpleNamespace(num_moe_experts=2, qk_layernorm=False)

    layer_specs(config, "portable", [True])  # type: ignore[arg-type]  # all it reads

    x, weight = torch.rand(3, 4), torch.rand(2, 4)
    scores = moe_utils.router_gating_linear(x, weight, None, torch.float32)
    torch.testing.assert_close(scores, x @ weight.T, rtol=1e-6, atol=1e-6)


def test_transformer_engine_is_for_bfloat16_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    gpu, cpu = torch.device("cuda"), torch.device("cpu")

    assert choose_spec(gpu, torch.bfloat16) == "te"
    assert choose_spec(gpu, torch.float32) == "portable"  # TF32 rounds to ten bits
    assert choose_spec(cpu, torch.bfloat16) == "portable"


# -- ranges ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(7,), (3, 5), (2, 3, 4)])
def test_boxes_of_every_range_cover_it_once_in_place(size: tuple[int, ...]) -> None:
    shape = tuple(2 * n for n in size)
    index = tuple(slice(n, 2 * n) for n in size)  # the last corner of the whole
    whole = torch.arange(float(torch.tensor(shape).prod())).view(shape)
    view = whole[index].contiguous()
    part = Part("name", torch.nn.Parameter(view), view, shape, index)

    for start in range(view.numel()):
        for stop in range(start, view.numel() + 1):
            leaf = view.flatten()[start:stop].clone()
            covered = torch.zeros(shape)
            for place, values in boxes_of_run(Run(part, leaf, start, stop)):
                assert torch.equal(values, whole[place])
                covered[place] += 1
                values.add_(1)  # the leaf's own memory
            expected = torch.zeros(view.numel())
            expected[start:stop] = 1
            assert torch.equal(covered[index].flatten(), expected)
            assert covered.sum() == stop - start
            assert torch.equal(leaf, view.flatten()[start:stop] + 1)
