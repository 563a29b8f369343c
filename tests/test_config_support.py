"""A run that asks for what is not there is refused, naming every setting at once."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from areal.api.cli_args import (
    ConfigError,
    GRPOConfig,
    InferenceEngineConfig,
    OptimizerConfig,
    PPOActorConfig,
    RWConfig,
    SchedulerConfig,
    SFTConfig,
    TrainDatasetConfig,
    TrainEngineConfig,
    UnsupportedFeatureError,
)
from areal.api.config.convert import build, to_plain
from areal.api.config.support import WEIGHT_MODES, check_supported, unsupported
from areal.engine.inference.backends import PROTOCOLS, protocol_class


def _grpo(**changes: Any) -> GRPOConfig:
    values: dict[str, Any] = {
        "experiment_name": "e",
        "trial_name": "t",
        "scheduler": SchedulerConfig(type="inline"),
        "train_dataset": TrainDatasetConfig(path="arithmetic", type="rl", batch_size=8),
        "rollout": InferenceEngineConfig(backend="native:d1"),
        "actor": PPOActorConfig(backend="fsdp:d1", path="m", optimizer=OptimizerConfig()),
    }
    return GRPOConfig(**{**values, **changes})


def _changed(**nested: Any) -> GRPOConfig:
    """The same config with some values replaced, given as nested dicts."""
    data = to_plain(_grpo())

    def lay(below: dict[str, Any], above: dict[str, Any]) -> None:
        for key, value in above.items():
            if isinstance(value, dict) and isinstance(below.get(key), dict):
                lay(below[key], value)
            else:
                below[key] = value

    lay(data, nested)
    config = build(GRPOConfig, data)
    assert isinstance(config, GRPOConfig)
    return config


def test_check_supported_plain_inline_grpo_and_sft_pass() -> None:
    check_supported(_grpo())
    check_supported(_grpo(ref=PPOActorConfig()))
    check_supported(
        SFTConfig(
            experiment_name="e",
            trial_name="t",
            scheduler=SchedulerConfig(type="inline"),
            actor=TrainEngineConfig(backend="fsdp:d2", path="m"),
        )
    )


@pytest.mark.parametrize("kind", [None, "local", "ray", "slurm"])
def test_check_supported_every_scheduler_passes_with_several_rollout_workers(kind: Any) -> None:
    rollout = InferenceEngineConfig(backend="native:d3")
    check_supported(_grpo(scheduler=SchedulerConfig(type=kind), rollout=rollout))


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"critic": {"backend": "fsdp:d1"}}, "critic.optimizer=null"),
        ({"critic": {"optimizer": {}, "mask_no_eos_with_zero": True}}, "critic.mask_no_eos_with_zero=true"),
        ({"critic": {"optimizer": {}, "offload": True}}, "critic.offload=true: models leave"),
        ({"teacher": {"backend": "other:d1", "path": "x"}}, "teacher.backend=other:d1"),
        ({"teacher": {"backend": "fsdp:d1", "path": ""}}, "teacher.path=''"),
        ({"teacher": {"path": "x", "is_critic": True}}, "teacher.is_critic"),
        ({"teacher": {"path": "x", "offload": True}}, "teacher.offload=true: models leave"),
        ({"allocation_mode": "fsdp:d1"}, "allocation_mode"),
        ({"memory_profiler": {}}, "memory_profiler"),
        ({"rollout": {"backend": "vllm:d1"}}, "rollout.backend=vllm:d1"),
        ({"rollout": {"backend": "native:d2"}}, "rollout.backend=native:d2"),
        ({"rollout": {"_version": "v2"}}, "rollout._version=v2"),
        ({"rollout": {"return_routed_experts": True}}, "rollout.return_routed_experts"),
        ({"rollout": {"agent": {"mode": "online"}}}, "rollout.agent.mode"),
        ({"actor": {"backend": "megatron:d1", "use_lora": True}}, "actor.use_lora"),
        ({"actor": {"backend": "megatron:d1", "megatron": {"async_save": True}}}, "actor.megatron.async_save"),
        ({"actor": {"backend": "megatron:d1", "enable_tree_training": True}}, "actor.enable_tree_training"),
        (
            {"actor": {"backend": "archon:d1", "archon": {"fp8_config": {"mode": "blockwise"}}}},
            "actor.archon.fp8_config.mode=blockwise",
        ),
        ({"actor": {"use_kernels": True}}, "actor.use_kernels"),
        ({"actor": {"backend": "archon:d1p2", "use_lora": True}}, "actor.use_lora=true: adapters are not cut"),
        ({"actor": {"backend": "fsdp:d1t2", "use_lora": True}}, "actor.use_lora=true: adapters are not cut"),
        ({"ref": {"path": "m", "use_lora": True}}, "ref.use_lora=true: no adapter of it is trained"),
        ({"teacher": {"path": "m", "use_lora": True}}, "teacher.use_lora=true: no adapter of it is trained"),
        ({"rollout": {"use_lora": True}}, "rollout.use_lora=true: no adapter is trained"),
        ({"actor": {"backend": "archon:d2e2", "use_lora": True}}, "actor.use_lora=true: adapters are not cut"),
        (
            {"actor": {"use_lora": True, "init_from_scratch": True}},
            "actor.use_lora=true with actor.init_from_scratch=true",
        ),
        (
            {"critic": {"optimizer": {}, "use_lora": True, "init_from_scratch": True}},
            "critic.use_lora=true with critic.init_from_scratch=true",
        ),
        (
            {"actor": {"use_lora": True}, "rollout": {"use_lora": True}, "gconfig": {"lora_name": ""}},
            "gconfig.lora_name='': ",
        ),
        (
            {
                "scheduler": {"type": "local"},
                "actor": {"use_lora": True, "weight_update_mode": "xccl"},
                "rollout": {"use_lora": True, "backend": "vllm:d1"},
            },
            "actor.weight_update_mode=xccl: vllm takes adapters by disk",
        ),
        ({"actor": {"offload": True}}, "actor.offload=true: models leave"),
        ({"ref": {"backend": "fsdp:d1", "path": "m", "offload": True}}, "ref.offload=true: models leave"),
        ({"actor": {"_version": "v2"}}, "actor._version"),
        ({"actor": {"weight_update_mode": "xccl"}}, "actor.weight_update_mode=xccl"),
        ({"actor": {"dtype": "float16"}}, "actor.dtype=float16"),
        ({"actor": {"path": ""}}, "actor.path"),
        ({"actor": {"is_critic": True}}, "actor.is_critic"),
        ({"scheduler": {"type": "local"}, "rollout": {"backend": "native:d2t2"}}, "rollout.backend=native:d2t2"),
        (
            {"rollout": {"scheduling_strategy": {"type": "colocation", "target": "actor"}}},
            "rollout.scheduling_strategy",
        ),
        ({"gconfig": {"skip_special_tokens": False}}, "gconfig.skip_special_tokens"),
        ({"ref": {"backend": "fsdp:d1", "path": "m", "use_lora": True}}, "ref.use_lora"),
        ({"gconfig": {"use_beam_search": True}}, "gconfig.use_beam_search"),
        ({"train_dataset": {"num_dataset_workers": 2}}, "train_dataset.num_dataset_workers"),
    ],
)
def test_check_supported_feature_not_there_is_named(change: dict[str, Any], key: str) -> None:
    with pytest.raises(UnsupportedFeatureError) as caught:
        check_supported(_changed(**change))

    assert f"  {key}" in str(caught.value)


def test_check_supported_names_all_settings_at_once() -> None:
    config = _changed(
        memory_profiler={}, rollout={"backend": "sglang:d4"}, actor={"backend": "fsdp:d4", "use_kernels": True}
    )

    keys = [line.partition("=")[0] for line in unsupported(config)]

    assert keys == ["memory_profiler", "actor.use_kernels", "rollout.backend"]


def test_check_supported_adapters_merged_or_sent_alone_pass() -> None:
    assert unsupported(_changed(actor={"use_lora": True}, critic={"optimizer": {}, "use_lora": True})) == []
    assert unsupported(_changed(actor={"use_lora": True}, rollout={"use_lora": True})) == []


def _served(backend: str, targets: list[str], use_lora: bool = True) -> GRPOConfig:
    actor, rollout = {"use_lora": True, "target_modules": targets}, {"backend": backend, "use_lora": use_lora}
    return _changed(scheduler={"type": "local"}, actor=actor, rollout=rollout)


@pytest.mark.parametrize(
    ("targets", "lacking"),
    [
        (["q_proj"], "q_proj is without v_proj"),
        (["v_proj", "o_proj"], "v_proj is without q_proj"),
        (["k_proj"], "k_proj is without q_proj"),
        (["q_proj", "k_proj"], "q_proj is without v_proj"),
        (["k_proj", "v_proj"], "k_proj is without q_proj, v_proj is without q_proj"),
        (["q_proj", "v_proj", "up_proj"], "up_proj is without gate_proj"),
        (["layers.1.self_attn.q_proj"], "layers.1.self_attn.q_proj is without v_proj"),
        (["q_proj", "layers.0.self_attn.v_proj"], "q_proj is without v_proj"),
        (
            ["layers.1.self_attn.q_proj", "layers.11.self_attn.v_proj"],
            "layers.1.self_attn.q_proj is without v_proj, layers.11.self_attn.v_proj is without q_proj",
        ),
    ],
)
def test_check_supported_adapters_that_sglang_cannot_load_are_named(targets: list[str], lacking: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_supported(_served("sglang:d1", targets))

    message = str(caught.value)
    assert f"actor.target_modules=[{', '.join(targets)}]: {lacking}; SGLang loads no such adapter" in message
    assert "q_proj needs v_proj" in message
    assert "leave the list empty" in message
    assert unsupported(_served("vllm:d1", targets)) == []
    assert unsupported(_served("native:d1", targets)) == []
    assert unsupported(_served("sglang:d1", targets, use_lora=False)) == []


@pytest.mark.parametrize(
    "targets",
    [
        [],
        ["all-linear"],
        ["all-linear", "q_proj"],
        ["q_proj", "v_proj"],
        ["q_proj", "k_proj", "v_proj", "gate_proj"],
        ["o_proj", "down_proj"],
        ["gate_proj", "up_proj"],
        ["layers.1.self_attn.q_proj", "layers.1.self_attn.v_proj"],
        ["layers.1.self_attn.q_proj", "self_attn.v_proj", "q_proj"],
        ["q_proj", "self_attn.v_proj"],
        ["layers.1.self_attn.q_proj", "model.layers.1.self_attn.v_proj"],
    ],
)
def test_check_supported_adapters_that_sglang_can_load_pass(targets: list[str]) -> None:
    assert unsupported(_served("sglang:d1", targets)) == []


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_check_supported_adapters_without_peft_name_the_extra(monkeypatch: pytest.MonkeyPatch, role: str) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    config = _changed(**{role: {"optimizer": {}, "use_lora": True}})
    with pytest.raises(UnsupportedFeatureError, match=rf"{role}\.use_lora=true: .*pip install 'areal\[lora\]'"):
        check_supported(config)


def test_check_supported_critic_teacher_and_roles_that_leave_pass() -> None:
    config = _changed(
        enable_offload=True,
        actor={"offload": True},
        critic={"optimizer": {}, "offload": True},
        ref={"backend": "fsdp:d1", "path": "m", "offload": True},
        teacher={"backend": "fsdp:d1", "path": "m", "offload": True},
    )

    assert unsupported(config) == []
    assert config.critic is not None
    assert (config.critic.is_critic, config.critic.backend, config.critic.path) == (True, "fsdp:d1", "m")


def test_check_supported_value_head_only_where_the_role_has_one() -> None:
    names: dict[str, Any] = {"experiment_name": "e", "trial_name": "t", "scheduler": SchedulerConfig(type="inline")}
    actor = TrainEngineConfig(backend="fsdp:d1", path="m", is_critic=True)

    assert unsupported(RWConfig(**names, actor=actor)) == []
    assert [line.partition(":")[0] for line in unsupported(SFTConfig(**names, actor=actor))] == ["actor.is_critic=True"]


def test_check_supported_supervised_run_has_no_phases_to_leave_in() -> None:
    actor = TrainEngineConfig(backend="fsdp:d1", path="m", offload=True)
    config = SFTConfig(
        experiment_name="e",
        trial_name="t",
        scheduler=SchedulerConfig(type="inline"),
        actor=actor,
        enable_offload=True,
    )

    assert [line.partition("=")[0] for line in unsupported(config)] == ["enable_offload", "actor.offload"]


def test_check_supported_unused_sections_do_not_count() -> None:
    config = _changed(
        sglang={"enable_torch_compile": True},
        vllm={"enable_lora": True},
        actor={"megatron": {"async_save": True}, "archon": {"enable_compile": True}, "kl_ctl": 0.0},
        ref={"backend": "megatron:d2", "path": "m", "use_lora": True},
    )

    check_supported(config)


@pytest.mark.parametrize(
    ("backend", "mode"),
    [
        ("native:d2", "auto"),
        ("native:d1", "xccl"),
        ("native:d1", "disk"),
        ("vllm:d2t2", "shm"),
        ("vllm:d1p2", "xccl"),
        ("sglang:d4", "auto"),
        ("sglang:d2t2", "xccl"),
        ("sglang:d1p2", "disk"),
        ("sglang:d1p1", "xccl"),
    ],
)
def test_unsupported_samplers_in_processes_with_what_they_receive_is_empty(backend: str, mode: str) -> None:
    config = _changed(scheduler={"type": "local"}, rollout={"backend": backend}, actor={"weight_update_mode": mode})
    assert unsupported(config) == []


@pytest.mark.parametrize(
    ("backend", "changes", "expected"),
    [
        ("sglang:d1", {"actor": {"weight_update_mode": "shm"}}, "sglang receives weights by xccl, disk"),
        ("sglang:d1p2", {}, "SGLang with pipeline stages"),
        ("sglang:d1", {"rollout": {"on_weight_update": "keep"}}, "rollout.on_weight_update=keep"),
        ("native:d1t2", {}, "a native replica is one process"),
    ],
)
def test_unsupported_server_settings_name_the_remedy(backend: str, changes: dict[str, Any], expected: str) -> None:
    changes.setdefault("rollout", {})["backend"] = backend
    (problem,) = unsupported(_changed(scheduler={"type": "local"}, **changes))
    assert expected in problem


def test_weight_modes_of_the_config_check_are_those_of_the_protocols() -> None:
    found = {backend: protocol_class(backend).capabilities.weight_modes for backend in WEIGHT_MODES}
    assert found == WEIGHT_MODES
    assert WEIGHT_MODES.keys() == PROTOCOLS.keys()


def test_advice_loss_settings_of_a_dpo_reference_have_no_effect() -> None:
    from areal.api.cli_args import DPOConfig, DPOEngineConfig, TrainDatasetConfig
    from areal.api.config.advice import advise

    names = {"experiment_name": "e", "trial_name": "t"}
    actor = DPOEngineConfig(backend="fsdp:d1", path="m", beta=0.3)
    data = TrainDatasetConfig(path="pairs", type="dpo")

    def about_ref(**settings: float | str) -> list[str]:
        config = DPOConfig(**names, actor=actor, ref=DPOEngineConfig(**settings), train_dataset=data)
        return [message for message in advise(config) if message.startswith("ref.")]

    assert about_ref() == about_ref(beta=0.3) == []
    assert about_ref(beta=0.2) == ["ref.beta=0.2 has no effect: the loss reads actor.beta"]


@pytest.mark.parametrize("role", ["ref", "teacher"])
def test_advice_optimizer_of_a_model_that_is_only_scored_has_no_effect(role: str) -> None:
    from areal.api.config.advice import advise

    section = {"backend": "fsdp:d1", "path": "m", "optimizer": {}}
    config = _changed(actor={"kl_ctl": 0.1}, **{role: section})

    assert [message for message in advise(config) if "optimizer" in message] == [
        f"{role}.optimizer takes memory and has no effect: this model is not trained; set it to null"
    ]
