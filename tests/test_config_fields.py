"""Every config class: order, docstring, help with unit and range, and the fields and defaults of the 1.x surface."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from areal.api import cli_args
from areal.api.config.fields import (
    MISSING,
    DefaultFloat,
    DefaultInt,
    DefaultStr,
    is_default,
    is_section,
    members,
    plain,
    type_hints,
)

ROOT = Path(__file__).resolve().parents[1]
CLASSES = sorted(
    (value for value in vars(cli_args).values() if inspect.isclass(value) and dataclasses.is_dataclass(value)),
    key=lambda cls: cls.__name__,
)
FACTS = json.loads((Path(__file__).parent / "vectors" / "config_fields.json").read_text())["rows"]
NOT_CONFIG = {
    "ParallelStrategy",
    "MegatronParallelStrategy",
    "ModelAllocation",
    "_AllocationMode",
    "ParallelDimension",
    "InferenceParallelism",
}
DECIDED = {("TrainEngineConfig", "weight_update_mode"): "auto"}
"""Defaults that differ from 1.x on purpose (auto picks the way by where the engines are)."""


def _default(spec: dataclasses.Field[Any]) -> Any:
    return spec.default_factory() if spec.default_factory is not dataclasses.MISSING else spec.default


def test_cli_args_exports_every_class_of_the_facts() -> None:
    names = {cls for cls, *_ in FACTS} - NOT_CONFIG

    assert names <= set(cli_args.__all__)
    assert all(hasattr(cli_args, name) for name in cli_args.__all__)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_config_class_has_docstring_and_help_with_unit_and_range(cls: type) -> None:
    assert cls.__doc__
    assert not cls.__doc__.startswith(f"{cls.__name__}(")  # not the one that dataclass makes up
    for spec in dataclasses.fields(cls):
        text = spec.metadata.get("help", "")
        assert len(text) >= 8, f"{cls.__name__}.{spec.name} has no help"
        assert text.endswith("."), f"{cls.__name__}.{spec.name}: {text!r}"
        numeric = {int, float} & set(members(type_hints(cls)[spec.name]))
        if numeric:
            assert "Range:" in text, f"{cls.__name__}.{spec.name} names no range"
        if numeric and re.search(r"(tokens|timeout|_s|_gb|_size|steps|length)$", spec.name):
            known = spec.metadata.get("unit") or spec.name in ("dp_size", "ep_size", "virtual_pipeline_parallel_size")
            assert known, f"{cls.__name__}.{spec.name} names no unit"


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_config_class_fields_are_ordered_required_optional_internal(cls: type) -> None:
    parent = next((base for base in cls.__bases__ if dataclasses.is_dataclass(base)), None)
    inherited = {spec.name for spec in dataclasses.fields(parent)} if parent else set()
    ranks = []
    for spec in dataclasses.fields(cls):
        if spec.name not in inherited:
            default = _default(spec)
            required = isinstance(default, str) and default == MISSING
            ranks.append(0 if required else 2 if spec.name.startswith("_") else 1)

    assert ranks == sorted(ranks)


@pytest.mark.parametrize(("cls", "field", "default", "tier"), FACTS, ids=lambda value: str(value)[:40])
def test_config_field_exists_with_the_default_of_1x(cls: str, field: str, default: str, tier: str) -> None:
    if cls in NOT_CONFIG:
        pytest.skip("not a config class; see test_alloc_mode.py")
    specs = {spec.name: spec for spec in dataclasses.fields(getattr(cli_args, cls))}
    assert field in specs, f"{tier} field"
    actual = _default(specs[field])
    if (cls, field) in DECIDED:
        assert actual == DECIDED[cls, field]
    elif default.startswith("MISSING"):
        assert actual == MISSING
    elif default.startswith("new "):
        assert type(actual).__name__ == default[4:]
    elif "(" in default:
        _assert_same_sections(actual, default)
    elif re.fullmatch(r"-?[\d.]+(e-?\d+)?", default):
        assert actual == pytest.approx(float(default))
    else:
        assert actual == _literal(default)


def _literal(text: str) -> Any:
    return ast.literal_eval(text)


def _assert_same_sections(actual: Any, text: str) -> None:
    """Compare with a default such as ``(SchedulingSpec(gpu=0, cmd='x'),)`` or ``AgentConfig(agent_cls_path='x')``."""
    section = actual[0] if isinstance(actual, list) else actual
    name, arguments = re.fullmatch(r"\(?(\w+)\((.*?)\),?\)?", text).groups()  # type: ignore[union-attr]
    assert type(section).__name__ == name
    for argument in arguments.split(", "):
        key, _, value = argument.partition("=")
        assert getattr(section, key) == _literal(value)


@pytest.mark.parametrize("mark", [DefaultStr("a"), DefaultInt(3), DefaultFloat(1.5)])
def test_marked_default_equals_plain_value_and_survives_pickling(mark: Any) -> None:
    copy = pickle.loads(pickle.dumps(mark))

    assert mark == plain(mark)
    assert is_default(mark)
    assert is_default(copy)
    assert not is_default(plain(mark))


def test_attn_impl_written_by_the_user_is_told_from_the_default() -> None:
    assert is_default(cli_args.TrainEngineConfig().attn_impl)
    assert not is_default(cli_args.TrainEngineConfig(attn_impl="flash_attention_2").attn_impl)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: cli_args.NormConfig(mean_level="row"), "NormConfig.mean_level='row'.*'batch', 'group', null"),
        (lambda: cli_args.NormConfig(eps=-1), "NormConfig.eps=-1.*>= 0"),
        (lambda: cli_args.NormConfig(group_size=0), "group_size=0.*>= 1"),
        (lambda: cli_args.MicroBatchSpec(packing_algorithm="x"), "'ffd', 'kk'"),
        (lambda: cli_args.FSDPEngineConfig(optim_step_prefetch_layers=-1), ">= 0"),
        (lambda: cli_args.ArchonFP8Config(mode="blockwise", use_triton=False), "use_triton"),
        (lambda: cli_args.ArchonEngineConfig(pp_layers_per_stage=0), ">= 1"),
        (lambda: cli_args.ArchonEngineConfig(moe_router_dtype="bf16"), "'fp32', null"),
        (lambda: cli_args.SchedulingSpec(ray_placement_strategy="x"), "'shared', 'separate', 'deferred'"),
        (lambda: cli_args.TrainEngineConfig(scheduling_spec=[]), "1 or 2 specs"),
        (lambda: cli_args.TrainEngineConfig(attn_impl="fast"), "attn_impl='fast'.*sdpa"),
        (lambda: cli_args.TrainEngineConfig(_version="v3"), "'v1', 'v2'"),
        (lambda: cli_args.TrainEngineConfig(weight_update_mode="awex"), "awex of 1.x"),
        (
            lambda: cli_args.TrainEngineConfig(
                init_from_scratch=True, fsdp=cli_args.FSDPEngineConfig(memory_efficient_load=True)
            ),
            "memory_efficient_load",
        ),
        (lambda: cli_args.RejectionSamplingConfig(upper=1.0), "> 1 for metric=ratio"),
        (lambda: cli_args.RejectionSamplingConfig(lower=0.0), "> 0 for metric=ratio"),
        (lambda: cli_args.RejectionSamplingConfig(lower=6.0), "<= upper"),
        (lambda: cli_args.RejectionSamplingConfig(metric="kl_k2", upper=0.0), "> 0 for metric=kl_k2"),
        (lambda: cli_args.RejectionSamplingConfig(metric="kl_k1", action="clamp"), "action='clamp'"),
        (lambda: cli_args.PPOActorConfig(use_sapo_loss=True, use_decoupled_loss=True), "use_decoupled_loss=True"),
        (lambda: cli_args.PPOActorConfig(use_sapo_loss=True, sapo_tau_neg=0.0), "sapo_tau_neg"),
        (lambda: cli_args.PPOActorConfig(overlong_reward_penalty=True), "overlong_tokens"),
        (lambda: cli_args.PPOActorConfig(c_clip=1.0), "> 1"),
        (lambda: cli_args.PPOActorConfig(kl_estimator="k4"), "'k1', 'k2', 'k3'"),
        (lambda: cli_args.AgentConfig(), "agent_cls_path"),
        (lambda: cli_args.AgentConfig(agent_cls_path="a.b", scheduling_spec=[]), "exactly 1 spec"),
        (lambda: cli_args.AgentConfig(agent_cls_path="a.b", admin_api_key=" "), "blank"),
        (lambda: cli_args.InferenceEngineConfig(admin_api_key=""), "blank"),
        (lambda: cli_args.InferenceEngineConfig(max_failure_share=1.5), "> 0 and <= 1"),
        (lambda: cli_args.SaverConfig(mode="later"), "'auto', 'sync', 'async'"),
        (lambda: cli_args.RecoverConfig(mode="fault"), "use on"),
        (lambda: cli_args.WandBConfig(mode="x"), "'online'"),
        (lambda: cli_args.GenerationHyperparameters(top_p=0.0), "> 0 and <= 1"),
        (lambda: cli_args.GenerationHyperparameters(temperature=float("nan")), ">= 0"),
        (lambda: cli_args.OptimizerConfig(lr="1e-6"), "lr='1e-6'.*float"),
        (lambda: cli_args.GRPOConfig(total_train_epochs=0), "total_train_epochs=0.*> 0"),
        (lambda: cli_args.GRPOConfig(trial_name="a/b"), "without a slash"),
        (lambda: cli_args.RWConfig(), "actor.is_critic=False"),
        (lambda: cli_args.DPOConfig(actor=cli_args.DPOEngineConfig(is_critic=True)), "actor.is_critic=True"),
        (lambda: cli_args.DPOEngineConfig(loss_type="hinge"), "'sigmoid', 'ipo'"),
        (
            lambda: cli_args.GRPOConfig(gconfig=cli_args.GenerationHyperparameters(max_new_tokens=4, min_new_tokens=5)),
            "gconfig.min_new_tokens=5",
        ),
        (
            lambda: cli_args.TrainEngineConfig(scheduling_strategy=cli_args.SchedulingStrategy(type="colocation")),
            "scheduling_strategy.target",
        ),
    ],
)
def test_config_bad_value_raises_naming_field_value_and_allowed(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        make()

    assert isinstance(caught.value, cli_args.ConfigError)


def test_rejection_sampling_clamp_turns_null_lower_into_zero() -> None:
    assert cli_args.RejectionSamplingConfig(action="clamp").lower == 0.0
    assert cli_args.RejectionSamplingConfig().lower is None


@pytest.mark.parametrize("name", ["sdpa", "eager", "org/kernel", "org/kernel@v1:entry"])
def test_attn_impl_builtin_or_hub_kernel_is_accepted(name: str) -> None:
    assert cli_args.TrainEngineConfig(attn_impl=name).attn_impl == name


@pytest.mark.parametrize(
    ("decoupled", "method", "recompute", "expected"),
    [
        (True, "recompute", False, True),
        (True, "loglinear", True, False),
        (True, "metrics", False, True),
        (False, "recompute", True, True),
        (False, "recompute", False, False),
    ],
)
def test_should_compute_prox_logp_follows_the_rule(
    decoupled: bool, method: Any, recompute: bool, expected: bool
) -> None:
    config = cli_args.PPOActorConfig(use_decoupled_loss=decoupled, prox_logp_method=method, recompute_logprob=recompute)

    assert config.should_compute_prox_logp() is expected


def test_gconfig_new_copies_lists() -> None:
    first = cli_args.GenerationHyperparameters(stop_token_ids=[1])
    second = first.new(temperature=0.5)
    second.stop_token_ids.append(2)

    assert (first.stop_token_ids, second.stop_token_ids, second.temperature) == ([1], [1, 2], 0.5)


def test_gconfig_stop_and_pad_ids_are_added_once_in_order() -> None:
    class Tokenizer:
        pad_token_id, eos_token_id = 7, 9

    gconfig = cli_args.GenerationHyperparameters(stop_token_ids=[9]).new_with_stop_and_pad_token_ids(Tokenizer())

    assert gconfig.stop_token_ids == [9, 7]


@pytest.mark.parametrize(
    ("api_format", "limit"),
    [("completions", "max_completion_tokens"), ("responses", "max_output_tokens"), ("openai-agents", "max_tokens")],
)
def test_gconfig_openai_arguments_use_the_names_of_the_format(api_format: str, limit: str) -> None:
    arguments = cli_args.GenerationHyperparameters().to_openai_args_dict(api_format=api_format)

    assert set(arguments) == {"n", limit, "top_p", "temperature", "stop", "frequency_penalty"}


def test_gconfig_openai_arguments_warn_about_what_the_api_lacks() -> None:
    with pytest.warns(UserWarning, match="top_k"):
        cli_args.GenerationHyperparameters(top_k=5).to_openai_completions_args_dict()
    with pytest.raises(ValueError, match="api_format='x'"):
        cli_args.GenerationHyperparameters().to_openai_args_dict(api_format="x")


def test_root_fills_names_and_followed_values_of_its_sections() -> None:
    config = cli_args.GRPOConfig(
        experiment_name="e",
        trial_name="t",
        actor=cli_args.PPOActorConfig(backend="fsdp:d1", path="m", dtype="float32", attn_impl="sdpa"),
        ref=cli_args.PPOActorConfig(),
        gconfig=cli_args.GenerationHyperparameters(temperature=0.7, max_new_tokens=64),
        train_dataset=cli_args.TrainDatasetConfig(path="d", type="rl", batch_size=8),
        cluster=cli_args.ClusterSpecConfig(fileroot="/r"),
    )

    assert config.ref is not None
    assert (config.saver.experiment_name, config.saver.trial_name, config.saver.fileroot) == ("e", "t", "/r")
    assert (config.rollout.experiment_name, config.rollout.fileroot) == ("e", "/r")
    assert (config.ref.backend, config.ref.path, config.ref.dtype, config.ref.attn_impl) == (
        "fsdp:d1",
        "m",
        "float32",
        "sdpa",
    )
    assert (config.actor.temperature, config.ref.temperature, config.actor.max_new_tokens) == (0.7, 0.7, 64)
    assert config.rollout.consumer_batch_size == 8
    assert (config.tokenizer_path, config.vllm.model, config.sglang.model_path) == ("m", "m", "m")


def test_root_keeps_values_that_were_written() -> None:
    config = cli_args.GRPOConfig(
        experiment_name="e",
        trial_name="t",
        actor=cli_args.PPOActorConfig(backend="fsdp:d1", path="m", temperature=1.0),
        ref=cli_args.PPOActorConfig(backend="fsdp:d2", path="other", dtype="bfloat16"),
        gconfig=cli_args.GenerationHyperparameters(temperature=0.7),
        rollout=cli_args.InferenceEngineConfig(consumer_batch_size=1),
        train_dataset=cli_args.TrainDatasetConfig(path="d", type="rl", batch_size=8),
    )

    assert config.ref is not None
    assert (config.actor.temperature, config.rollout.consumer_batch_size) == (1.0, 1)
    assert (config.ref.backend, config.ref.path) == ("fsdp:d2", "other")


def test_config_import_needs_no_third_party_package() -> None:
    code = (
        "import sys; before = set(sys.modules); import areal.api.config.experiment, areal.api.config.support\n"
        "names = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "extra = names - set(sys.stdlib_module_names) - {'areal'}\n"
        "assert not extra, extra"
    )

    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


def test_cli_args_import_loads_neither_torch_nor_omegaconf() -> None:
    code = (
        "import sys, areal.api.cli_args; assert not {'torch', 'omegaconf', 'yaml', 'transformers'} & set(sys.modules)"
    )

    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


def test_every_section_default_is_constructed_anew() -> None:
    for cls in CLASSES:
        for spec in dataclasses.fields(cls):
            first, second = _default(spec), _default(spec)
            if is_section(first) or isinstance(first, (list, dict)):
                assert first is not second, f"{cls.__name__}.{spec.name} is shared"
