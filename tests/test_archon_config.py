"""Settings of the ``archon`` section: what they become, and which values and pairs of values are refused."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from areal.api.cli_args import TrainEngineConfig
from areal.api.config.archon import ArchonEngineConfig, ArchonFP8Config
from areal.engine.core.determinism import DETERMINISTIC_ENV, use_deterministic_algorithms
from areal.experimental.engine.archon_config import TrainingOptions, prepare_training_config
from areal.experimental.engine.archon_dims import ArchonParallelDims
from areal.experimental.models.archon.activation_checkpoint import AcOptions
from areal.experimental.models.archon.base import ModelArgs
from areal.experimental.models.archon.compile import CompileOptions
from areal.models.rope import RopeArgs
from areal.utils import environ
from areal.utils.errors import ConfigError, UnsupportedFeatureError

ENV = tuple(DETERMINISTIC_ENV)
ARGS = ModelArgs(
    dim=8, n_layers=4, n_heads=2, n_kv_heads=1, head_dim=4, vocab_size=16, hidden_dim=16, rope=RopeArgs.unscaled(4, 1e4)
)
ONE_RANK = ArchonParallelDims(device_type="cpu")
TWO_RANKS = ArchonParallelDims(world_size=2, device_type="cpu")
PIPELINE = ArchonParallelDims(pp=2, world_size=2, device_type="cpu")


@pytest.fixture
def _restored_determinism() -> Iterator[None]:
    with environ.temporary_env(dict.fromkeys(ENV)):
        yield
    torch.use_deterministic_algorithms(False)


def prepare(
    archon: dict[str, Any] | None = None,
    dims: ArchonParallelDims = ONE_RANK,
    device: str = "cpu",
    **settings: Any,
) -> TrainingOptions:
    settings = {"gradient_checkpointing": True, **settings}
    config = TrainEngineConfig(
        experiment_name="e", trial_name="t", backend="archon:d1", path="m", archon=ArchonEngineConfig(**archon or {}),
        **settings,
    )  # fmt: skip
    return prepare_training_config(config, ARGS, torch.device(device), dims=dims)


# -- what settings become


@pytest.mark.parametrize(
    ("archon", "expected"),
    [
        ({}, AcOptions("selective")),
        ({"ac_mode": "none"}, None),
        ({"ac_mode": "full"}, AcOptions("full")),
        ({"selective_ac_option": "op"}, AcOptions("selective")),
        ({"selective_ac_option": "1"}, AcOptions("selective", every=1)),
        ({"selective_ac_option": "4"}, AcOptions("selective", every=4)),
        ({"ac_preserve_rng_state": True}, AcOptions("selective", preserve_rng_state=True)),
        ({"ac_mode": "full", "ac_debug": True}, AcOptions("full", debug=True)),
        ({"selective_ac_option": "2", "ac_debug": True}, AcOptions("selective", every=2, debug=True)),
        ({"ac_mode": "memory_budget", "ac_memory_budget": 0.25, "enable_compile": True},
         AcOptions("memory_budget", memory_budget=0.25)),
    ],
)  # fmt: skip
def test_checkpointing_options_follow_the_settings(archon, expected):
    assert prepare(archon).ac == expected


@pytest.mark.parametrize("mode", ["full", "selective", "memory_budget"])
def test_without_gradient_checkpointing_nothing_is_checkpointed(mode):
    assert prepare({"ac_mode": mode}, gradient_checkpointing=False) == TrainingOptions()


@pytest.mark.parametrize(
    ("archon", "device", "dtype", "expected"),
    [
        ({}, "cpu", "float32", None),
        ({"enable_compile": True}, "cpu", "bfloat16", CompileOptions()),
        ({"enable_compile": True}, "cuda", "float32", CompileOptions()),
        ({"enable_compile": True}, "cuda", "bfloat16", CompileOptions(flash=True)),
        ({"enable_compile": True, "ac_mode": "memory_budget"}, "cpu", "float32", CompileOptions(memory_budget=0.5)),
        ({"enable_compile": True, "ac_mode": "full"}, "cpu", "float32", CompileOptions()),
    ],
)
def test_compile_options_follow_settings_device_and_dtype(archon, device, dtype, expected):
    assert prepare(archon, device=device, dtype=dtype).compile == expected


def test_memory_budget_without_gradient_checkpointing_is_not_spent():
    options = prepare({"enable_compile": True, "ac_mode": "memory_budget"}, gradient_checkpointing=False)

    assert options == TrainingOptions(None, CompileOptions())


@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", "ZBVZeroBubble"])
def test_choice_by_op_becomes_full_where_backward_comes_in_halves(schedule):
    assert prepare({"pp_schedule": schedule}, PIPELINE).ac == AcOptions("full")
    assert prepare({"pp_schedule": schedule, "ac_debug": True}, PIPELINE).ac == AcOptions("full", debug=True)
    assert prepare({"pp_schedule": schedule, "selective_ac_option": "2"}, PIPELINE).ac == AcOptions(every=2)
    assert prepare({"pp_schedule": schedule}, ONE_RANK).ac == AcOptions("selective")  # no pipeline, no schedule
    assert prepare({"pp_schedule": "1F1B"}, PIPELINE).ac == AcOptions("selective")


# -- deterministic mode


@pytest.mark.usefixtures("_restored_determinism")
def test_deterministic_mode_sets_algorithms_environment_and_rng():
    options = prepare({"use_deterministic_algorithms": True})

    assert options.ac == AcOptions("selective", preserve_rng_state=True)
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert [environ.get_env(name) for name in ENV] == [":4096:8", "Ring", "1", "0"]


@pytest.mark.usefixtures("_restored_determinism")
@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({"CUBLAS_WORKSPACE_CONFIG": ":16:8", "NCCL_ALGO": "Tree"}, [":16:8", "Tree"]),
        ({"CUBLAS_WORKSPACE_CONFIG": ":0:0", "NCCL_ALGO": "NVLS"}, [":4096:8", "Ring"]),
    ],
)
def test_deterministic_mode_keeps_what_is_deterministic_already(found, expected):
    environ.set_env(found)

    use_deterministic_algorithms()

    assert [environ.get_env(name) for name in ENV[:2]] == expected


@pytest.mark.usefixtures("_restored_determinism")
def test_without_deterministic_mode_nothing_is_set():
    prepare()

    assert not torch.are_deterministic_algorithms_enabled()
    assert [environ.get_env(name) for name in ENV] == [None] * len(ENV)


# -- refused


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "ops", "", "02", "2 "])
@pytest.mark.parametrize("on", [True, False])
def test_selective_option_that_is_no_positive_integer_is_refused(text, on):
    with pytest.raises(ConfigError, match=rf"archon\.selective_ac_option='{text}' must be 'op' or a positive integer"):
        prepare({"selective_ac_option": text}, gradient_checkpointing=on)


@pytest.mark.parametrize(
    ("archon", "message"),
    [
        ({"ac_mode": "memory_budget"}, r"archon\.ac_mode=memory_budget: .* set archon\.enable_compile=true"),
        ({"selective_ac_option": "5"}, r"archon\.selective_ac_option=5 .* the model has 4, so none .* smaller N or op"),
        ({"ac_debug": True}, r"archon\.ac_debug=true cannot follow a choice by op; set archon\.ac_mode=full"),
        ({"ac_debug": True, "ac_mode": "full", "enable_compile": True},
         r"archon\.ac_debug=true .* set archon\.enable_compile=false"),
        ({"offload_params": True}, r"archon\.offload_params=true: torch's CPU offload .* set it to false"),
    ],
)  # fmt: skip
def test_settings_that_contradict_each_other_are_refused_with_the_remedy(archon, message):
    with pytest.raises(ConfigError, match=message):
        prepare(archon)


@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", "ZBVZeroBubble"])
@pytest.mark.parametrize("mode", ["memory_budget", "selective"])
def test_compile_where_backward_comes_in_halves_is_refused(schedule, mode):
    with pytest.raises(
        ConfigError, match=rf"archon\.enable_compile=true: .*={schedule} .* use 1F1B or Interleaved1F1B"
    ):
        prepare({"enable_compile": True, "pp_schedule": schedule, "ac_mode": mode}, PIPELINE)


def test_offload_of_a_rank_that_shards_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"archon\.offload_params=true: one rank shards nothing"):
        prepare({"offload_params": True}, device="cuda")
    assert prepare({"offload_params": True}, TWO_RANKS, device="cuda").ac is not None


@pytest.mark.parametrize(
    ("archon", "settings", "message"),
    [
        ({}, {"use_kernels": True}, "use_kernels=true: .* set it to false"),
    ],
)
def test_features_of_other_versions_are_refused_by_name(archon, settings, message):
    with pytest.raises(UnsupportedFeatureError, match=message):
        prepare(archon, **settings)


@pytest.mark.parametrize(
    ("device", "package", "reason"),
    [
        ("cpu", True, "need a Hopper GPU, and this device is cpu"),
        ("cuda", False, "need the package torchao, which is not installed"),
        ("cuda", True, "not available in this version"),
    ],
)
def test_fp8_is_refused_with_the_reason_on_this_device(device, package, reason, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if package else None)

    with pytest.raises(UnsupportedFeatureError, match=rf"archon\.fp8_config\.mode=blockwise: .*{reason}; set it to"):
        prepare({"fp8_config": ArchonFP8Config(mode="blockwise")}, device=device)


@pytest.mark.parametrize(
    ("field", "value"),
    [("moe_router_dtype", "fp64"), ("pp_schedule", "GPipe"), ("ac_memory_budget", 1.5), ("ac_mode", "some")],
)
def test_value_written_after_loading_is_checked_all_the_same(field, value):
    config = TrainEngineConfig(experiment_name="e", trial_name="t", backend="archon:d1", path="m")
    setattr(config.archon, field, value)

    with pytest.raises(ConfigError, match=rf"^archon\.{field}={value!r} is not valid; allowed: "):
        prepare_training_config(config, ARGS, torch.device("cpu"), dims=ONE_RANK)
