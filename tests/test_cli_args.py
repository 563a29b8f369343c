"""Loading: YAML, overrides, interpolation, messages, and what is written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf

from areal.api.cli_args import (
    BaseExperimentConfig,
    ClusterSpecConfig,
    ConfigError,
    ConfigFileError,
    FieldError,
    GRPOConfig,
    MissingValueError,
    PPOActorConfig,
    SFTConfig,
    UnknownKeyError,
    conf_as_dict,
    get_py_cmd,
    is_default,
    load_config,
    load_expr_config,
    parse_cli_args,
    save_config,
    to_structured_cfg,
)
from areal.utils.errors import ArealError

GPU_YAML = """
experiment_name: gsm8k-grpo
trial_name: trial0
seed: 1
enable_offload: false
total_train_epochs: 10
tokenizer_path: ${actor.path}
cluster:
  n_nodes: 1
  n_gpus_per_node: 8
  fileroot: ROOT
  name_resolve:
    type: nfs
    nfs_record_root: ROOT/name_resolve
scheduler:
  type: local
rollout:
  experiment_name: ${experiment_name}
  trial_name: ${trial_name}
  backend: "sglang:d4"
  max_concurrent_rollouts: 256
  queue_size: null
  consumer_batch_size: ${train_dataset.batch_size}
  max_head_offpolicyness: 2
  enable_rollout_tracing: false
  scheduling_spec: ${actor.scheduling_spec}
  fileroot: ${cluster.fileroot}
  tokenizer_path: ${tokenizer_path}
  dump_to_file: true
gconfig:
  n_samples: 4
  min_new_tokens: 0
  max_new_tokens: 1024
  greedy: false
  temperature: 1.0
actor:
  backend: "fsdp:d4"
  experiment_name: ${experiment_name}
  trial_name: ${trial_name}
  path: Qwen/Qwen2.5-1.5B-Instruct
  init_from_scratch: false
  disable_dropout: true
  gradient_checkpointing: true
  dtype: bfloat16
  mb_spec: {max_tokens_per_mb: 10240}
  optimizer:
    type: adam
    lr: 1.70e-5
    weight_decay: 0.017
    beta1: 0.9
    beta2: 0.999
    eps: 1e-8
    lr_scheduler_type: constant
    gradient_clipping: 1.0
    warmup_steps_proportion: 0.001
  eps_clip: 0.4
  temperature: ${gconfig.temperature}
  reward_scaling: 10.0
  reward_bias: -0.5
  kl_ctl: 0.0
  ppo_n_minibatches: 1
  recompute_logprob: true
  use_decoupled_loss: true
  rejection_sampling: {level: token, action: mask, metric: ratio, upper: 5.0}
  reward_norm:
    mean_level: group
    std_level: group
    group_size: ${gconfig.n_samples}
  adv_norm: {mean_level: batch, std_level: batch}
  max_new_tokens: ${gconfig.max_new_tokens}
  weight_update_mode: xccl
  scheduling_spec:
    - {task_type: worker, port_count: 2, gpu: 1, mem: 32, env_vars: {A: b}}
ref:
  backend: ${actor.backend}
  experiment_name: ${experiment_name}
  trial_name: ${trial_name}
  path: ${actor.path}
  dtype: ${actor.dtype}
  mb_spec: {max_tokens_per_mb: 10240}
  scheduling_strategy: {type: colocation, target: actor}
  scheduling_spec: ${actor.scheduling_spec}
sglang:
  model_path: ${actor.path}
  random_seed: ${seed}
  skip_tokenizer_init: true
  dtype: ${actor.dtype}
  context_length: 32768
  mem_fraction_static: 0.8
vllm:
  model: ${actor.path}
  seed: ${seed}
  gpu_memory_utilization: 0.9
train_dataset: {batch_size: 256, shuffle: true, pin_memory: true, num_workers: 4, path: openai/gsm8k, type: rl}
valid_dataset: {batch_size: 256, path: openai/gsm8k, type: rl}
saver: &names
  experiment_name: ${experiment_name}
  trial_name: ${trial_name}
  fileroot: ${cluster.fileroot}
  freq_epochs: 1
  freq_steps: null
  freq_secs: null
recover: {<<: *names, mode: disabled, freq_secs: 3600}
evaluator: {<<: *names}
stats_logger:
  experiment_name: ${experiment_name}
  trial_name: ${trial_name}
  fileroot: ${cluster.fileroot}
  wandb: {mode: disabled, wandb_api_key: secret-key}
perf_tracer:
  experiment_name: ${experiment_name}
  trial_name: ${trial_name}
  fileroot: ${cluster.fileroot}
  enabled: false
  session_tracer: {enabled: false}
"""

SMALL_YAML = """
experiment_name: e
trial_name: t
scheduler: {type: inline}
cluster: {fileroot: ROOT}
train_dataset: {path: arithmetic, type: rl, batch_size: 8}
rollout: {backend: native:d1}
gconfig: {n_samples: 4, max_new_tokens: 16}
actor: {backend: fsdp:d1, path: some/model, optimizer: {lr: 1e-6}}
"""


def _write(folder: Path, text: str) -> list[str]:
    path = folder / "config.yaml"
    path.write_text(text.replace("ROOT", str(folder / "root")))
    return ["--config", str(path)]


@pytest.fixture
def gpu(tmp_path: Path) -> list[str]:
    return _write(tmp_path, GPU_YAML)


@pytest.fixture
def small(tmp_path: Path) -> list[str]:
    return _write(tmp_path, SMALL_YAML)


def _load(argv: list[str], *overrides: str, cls: type[Any] = GRPOConfig) -> Any:
    return load_config([*argv, *overrides], cls)[0]


# ------------------------------------------------------------------------------------------------------------- files
def test_load_gpu_yaml_of_1x_gives_typed_values(gpu: list[str]) -> None:
    config = _load(gpu)

    assert config.actor.optimizer.lr == pytest.approx(1.7e-5)
    assert isinstance(config.actor.optimizer.eps, float)
    assert config.rollout.consumer_batch_size == 256
    assert config.tokenizer_path == config.ref.path == config.sglang.model_path == "Qwen/Qwen2.5-1.5B-Instruct"
    assert (config.actor.scheduling_spec[0].env_vars, config.rollout.scheduling_spec[0].gpu) == ({"A": "b"}, 1)
    assert (config.ref.scheduling_strategy.target, config.valid_dataset.split) == ("actor", "test")
    assert config.eval_gconfig == config.gconfig
    assert config.recover.freq_secs == 3600
    assert config.actor.attn_impl == "flash_attention_2"
    assert is_default(config.actor.attn_impl)


def test_load_small_yaml_omits_name_sections_and_fills_them(small: list[str]) -> None:
    config = _load(small, "ref={}")

    assert (config.saver.experiment_name, config.recover.trial_name, config.stats_logger.experiment_name) == (
        "e",
        "t",
        "e",
    )
    assert (config.ref.backend, config.ref.path, config.rollout.consumer_batch_size) == ("fsdp:d1", "some/model", 8)


def test_load_without_config_flag_exits_with_code_2() -> None:
    with pytest.raises(SystemExit) as caught:
        parse_cli_args(["actor.path=x"])

    assert caught.value.code == 2


def test_load_missing_or_broken_file_raises_naming_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigFileError, match="no such file"):
        parse_cli_args(["--config", str(tmp_path / "none.yaml")])
    with pytest.raises(OSError, match="not a valid YAML"):
        parse_cli_args(_write(tmp_path, "a: [1"))
    with pytest.raises(ConfigError, match="keys and values"):
        parse_cli_args(_write(tmp_path, "- 1\n- 2"))


def test_load_script_name_first_is_dropped(small: list[str]) -> None:
    config, path = load_config(["train.py", *small], GRPOConfig)

    assert (config.trial_name, str(path)) == ("t", small[1])


def test_load_defaults_list_merges_files_in_order(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(SMALL_YAML.replace("ROOT", str(tmp_path)))
    argv = _write(tmp_path, "defaults: [base, _self_]\ntrial_name: other\nactor: {eps_clip: 0.3}\n")

    config = _load(argv)

    assert (config.trial_name, config.actor.eps_clip, config.actor.path) == ("other", 0.3, "some/model")


def test_load_merge_keeps_defaults_of_a_partly_written_section(small: list[str]) -> None:
    config = _load(small, "rollout.agent.mode=subproc", "train_dataset.scheduling_spec.cpu=3")

    assert config.rollout.agent.agent_cls_path.endswith("_OnlineAgent")
    assert (config.train_dataset.scheduling_spec.cpu, config.train_dataset.scheduling_spec.mem) == (3, 10)


# --------------------------------------------------------------------------------------------------------- overrides
@pytest.mark.parametrize(
    ("override", "read", "expected"),
    [
        ("actor.optimizer.lr=1e-6", lambda c: c.actor.optimizer.lr, 1e-6),
        ("actor.optimizer.lr=3", lambda c: c.actor.optimizer.lr, 3.0),
        ("actor.grad_reduce_dtype=bfloat16", lambda c: c.actor.grad_reduce_dtype, "bfloat16"),
        ("+actor.grad_reduce_dtype=bfloat16", lambda c: c.actor.grad_reduce_dtype, "bfloat16"),
        ("++actor.grad_reduce_dtype=bfloat16", lambda c: c.actor.grad_reduce_dtype, "bfloat16"),
        ("~ref", lambda c: c.ref, None),
        ("ref=null", lambda c: c.ref, None),
        ("~actor.reward_norm.mean_level", lambda c: c.actor.reward_norm.mean_level, "batch"),
        ("actor.scheduling_spec.0.gpu=2", lambda c: c.actor.scheduling_spec[0].gpu, 2),
        ("actor.scheduling_spec[0].gpu=2", lambda c: c.actor.scheduling_spec[0].gpu, 2),
        ("valid_dataset.scheduling_spec=null", lambda c: c.valid_dataset.scheduling_spec, None),
        ("memory_profiler.profile_steps=[2,3]", lambda c: c.memory_profiler.profile_steps, [2, 3]),
        ("gconfig.stop=[a,'b c']", lambda c: c.gconfig.stop, ["a", "b c"]),
        ("gconfig.stop=[${actor.path},x]", lambda c: c.gconfig.stop[0], "Qwen/Qwen2.5-1.5B-Instruct"),
        ("actor.mb_spec={n_mbs:2}", lambda c: (c.actor.mb_spec.n_mbs, c.actor.mb_spec.max_tokens_per_mb), (2, 10240)),
        ("actor.path=a/b", lambda c: (c.tokenizer_path, c.ref.path), ("a/b", "a/b")),
        ("actor.path=/data/m=1", lambda c: c.actor.path, "/data/m=1"),
        ("gconfig.n_samples=${rollout.request_retries}", lambda c: c.gconfig.n_samples, 3),
        ("rollout.agent.scheduling_spec.0.cpu=2", lambda c: c.rollout.agent.scheduling_spec[0].cpu, 2),
        ("trial_name=007", lambda c: c.trial_name, "7"),
        ("trial_name='007'", lambda c: c.trial_name, "007"),
        ("trial_name=${experiment_name}-2", lambda c: c.trial_name, "gsm8k-grpo-2"),
        ("trial_name=${saver.experiment_name}", lambda c: c.trial_name, "gsm8k-grpo"),
        ("actor.gradient_checkpointing=False", lambda c: c.actor.gradient_checkpointing, False),
        ("saver.freq_epochs=", None, "an integer"),
        ("rollout.max_head_offpolicyness=2.0", lambda c: c.rollout.max_head_offpolicyness, 2),
        ("train_dataset.dataset_kwargs.a.b=1", lambda c: c.train_dataset.dataset_kwargs, {"a": {"b": 1}}),
    ],
)
def test_override_sets_the_value(gpu: list[str], override: str, read: Any, expected: Any) -> None:
    if read is None:
        with pytest.raises(FieldError, match=expected):
            _load(gpu, override)
    else:
        assert read(_load(gpu, override)) == expected


@pytest.mark.parametrize(
    ("override", "error", "message"),
    [
        ("actor.no_such=1", UnknownKeyError, r"unknown key actor\.no_such; did you mean actor\.\w+"),
        ("+actor.no_such=1", UnknownKeyError, r"unknown key actor\.no_such"),
        ("actor.lerning_rate=1", UnknownKeyError, r"actor\.lerning_rate; did you mean actor\.optimizer\.lr\?"),
        ("actor.optimizer.learning_rate=1", UnknownKeyError, r"did you mean actor\.optimizer\.lr\?"),
        ("lr=1", UnknownKeyError, r"did you mean actor\.optimizer\.lr\?"),
        ("actor.esp_clip=1", UnknownKeyError, r"did you mean actor\.eps_clip\?"),
        ("actor.eps_clip=abc", FieldError, r"actor\.eps_clip='abc'.*a number"),
        ("total_train_epochs=0", FieldError, r"total_train_epochs=0 .*> 0"),
        ("total_train_epochs=1.5", FieldError, r"total_train_epochs=1\.5 .*an integer"),
        ("actor.gradient_checkpointing=2", FieldError, "true or false"),
        ("+actor.behave_imp_weight_cap=5", ConfigError, r"actor\.behave_imp_weight_cap=5 was replaced.*upper: X"),
        ("~rollout.backend", MissingValueError, r"missing: rollout\.backend"),
        (
            "actor.scheduling_spec=[]",
            FieldError,
            r"scheduling_spec=\[\].*1 or 2.*the file has rollout\.scheduling_spec: \$\{actor",
        ),
        ("actor.weight_update_mode=zz", FieldError, r"actor\.weight_update_mode='zz'.*'auto', 'shm', 'xccl', 'disk'"),
        ("actor.weight_update_mode=awex", FieldError, "awex of 1.x"),
        ("actor.reward_norm.mean_level=groups", FieldError, r"actor\.reward_norm\.mean_level.*did you mean 'group'"),
        ("actor.reward_norm.eps=-1", FieldError, r"actor\.reward_norm\.eps=-1.*>= 0"),
        (
            "actor.scheduling_spec.0.gpu=-1",
            FieldError,
            r"scheduling_spec\.0\.gpu=-1.*>= 0.*\$\{actor\.scheduling_spec\}",
        ),
        ("actor.scheduling_spec.5.gpu=1", ConfigError, "1 entries"),
        ("actor.path.x=1", ConfigError, r"actor\.path.*is a value"),
        ("actor.optimizer=5", FieldError, r"actor\.optimizer=5.*OptimizerConfig"),
        ("rollout.backend=fsdp:d1", ConfigError, r"rollout\.backend='fsdp:d1'.*native, vllm, sglang"),
        ("actor.backend=vllm:d1", ConfigError, r"actor\.backend='vllm:d1'.*fsdp, archon, megatron"),
        ("actor.backend=fsdp:d4p2", ConfigError, r"actor\.backend='fsdp:d4p2'"),
        ("actor.backend=", ConfigError, r"actor\.backend"),
        ("tokenizer_path=${no.such}", ConfigError, r"tokenizer_path='\$\{no\.such\}'.*no\.such"),
        ("~gconfig.top_k", ConfigError, r"gconfig\.top_k is not in the file"),
        ("~gconfig.n_samples=5", ConfigError, r"the file has gconfig\.n_samples=4"),
        ("cluster.fileroot=null", FieldError, r"cluster\.fileroot=None.*a string"),
        ("recover.mode=fault", FieldError, r"recover\.mode='fault'.*use on"),
        ("valid_dataset={batch_size:2}", None, ""),
        ("nonsense", ConfigError, "not an override"),
        ("--lr=1", ConfigError, "not an override"),
        ("=1", ConfigError, "not an override"),
    ],
)
def test_override_bad_raises_naming_key_value_and_allowed(
    gpu: list[str], override: str, error: type[Exception] | None, message: str
) -> None:
    if error is None:
        _load(gpu, override)  # merges into the section of the file
        return
    with pytest.raises(error, match=message) as caught:
        _load(gpu, override)

    assert isinstance(caught.value, ArealError)
    assert isinstance(caught.value, ValueError)


def test_load_mandatory_values_missing_names_all_of_them(tmp_path: Path) -> None:
    argv = _write(tmp_path, "experiment_name: e\nrollout: {}\n")

    with pytest.raises(MissingValueError) as caught:
        _load(argv)

    for key in ("trial_name", "train_dataset.path", "train_dataset.type", "rollout.backend", "actor.backend"):
        assert key in str(caught.value)


def test_load_grpo_yaml_as_sft_raises_naming_rollout(gpu: list[str]) -> None:
    with pytest.raises(UnknownKeyError, match="unknown key rollout"):
        _load(gpu, cls=SFTConfig)


def test_load_dataset_section_given_partly_needs_path(small: list[str]) -> None:
    with pytest.raises(MissingValueError, match="valid_dataset.path, valid_dataset.type"):
        _load(small, "valid_dataset.batch_size=4")


# ------------------------------------------------------------------------------------------------ other entry points
def test_to_structured_cfg_fills_a_subsection_and_refuses_unknown_keys(gpu: list[str]) -> None:
    tree, path = parse_cli_args(gpu)

    cluster = to_structured_cfg(tree.cluster, ClusterSpecConfig)
    whole = to_structured_cfg(tree, GRPOConfig)

    assert isinstance(tree, DictConfig)
    assert path == Path(gpu[1])
    assert isinstance(OmegaConf.to_object(cluster), ClusterSpecConfig)
    assert (cluster.cluster_name, whole.actor.eps_clip) == ("local", 0.4)
    with pytest.raises(UnknownKeyError, match="fileroott"):
        to_structured_cfg(OmegaConf.create({"fileroott": "x"}), ClusterSpecConfig)


def test_load_expr_config_writes_resolved_config_with_masked_secrets(
    gpu: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    overrides = ["+actor.scheduling_spec.0.env_vars.HF_TOKEN=hf-1", "cluster.name_resolve.type=memory"]

    config, path = load_expr_config([*gpu, *overrides], GRPOConfig)

    written = list((tmp_path / "root" / "logs").rglob("config.yaml"))
    text = written[0].read_text()
    assert path == gpu[1]
    assert written[0].parent.name == "trial0"
    assert "secret-key" not in text
    assert "hf-1" not in text
    assert "areal-admin-key" not in text
    assert "${" not in text
    assert list(yaml.safe_load(text))[:3] == ["format_version", "experiment_name", "trial_name"]
    again = _load(["--config", str(written[0])])
    assert again.actor.optimizer == config.actor.optimizer
    assert again.rollout.agent.admin_api_key == "areal-admin-key"  # a masked secret counts as not given


def test_load_expr_config_store_that_is_not_there_is_not_contacted(small: list[str]) -> None:
    config, _ = load_expr_config([*small, "cluster.name_resolve.type=etcd3"], GRPOConfig)

    assert config.cluster.name_resolve.type == "etcd3"


def test_load_expr_config_other_ranks_write_nothing(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")

    load_expr_config([*small, "cluster.name_resolve.type=memory"], GRPOConfig)

    assert not list(tmp_path.rglob("logs"))


def test_load_config_has_no_side_effect(small: list[str], tmp_path: Path) -> None:
    _load(small)

    assert [entry.name for entry in tmp_path.iterdir()] == ["config.yaml"]


def test_config_file_of_a_newer_format_is_refused(tmp_path: Path) -> None:
    argv = _write(tmp_path, SMALL_YAML + "format_version: 99\n")

    with pytest.raises(ConfigFileError, match="format_version=99"):
        _load(argv)


def test_save_config_round_trips_every_value(small: list[str], tmp_path: Path) -> None:
    config = _load(small, "actor.optimizer.eps=1e-12", "gconfig.stop=['null','1e-6']")
    save_config(config, tmp_path / "out")

    again = _load(["--config", str(tmp_path / "out" / "config.yaml")])

    assert conf_as_dict(again) == conf_as_dict(config)


def test_conf_as_dict_gives_plain_values_for_objects_and_nodes(small: list[str]) -> None:
    config = _load(small)
    tree, _ = parse_cli_args(small)

    data = conf_as_dict(config)

    assert type(data["actor"]["attn_impl"]) is str
    assert type(data["actor"]["temperature"]) is float
    assert conf_as_dict(tree)["actor"]["optimizer"] == {"lr": 1e-6}


def test_get_py_cmd_renders_flags() -> None:
    args = {"max_num_seqs": 4, "a": None, "b": False, "c": "", "d": [], "e_f": True, "g": [1, 2], "seed": 0}

    assert get_py_cmd("a.b", args) == [
        "python3", "-m", "a.b", "--max-num-seqs", "4", "--e-f", "--g", "1", "2", "--seed", "0",
    ]  # fmt: skip


def test_direct_construction_needs_no_loader() -> None:
    config = GRPOConfig(experiment_name="e", trial_name="t", actor=PPOActorConfig(backend="fsdp:d1", path="m"))

    assert isinstance(config, BaseExperimentConfig)
    assert config.saver.trial_name == "t"


def test_load_in_a_bare_process_prints_no_warning_and_no_torch(small: list[str]) -> None:
    code = (
        "import sys; from areal.api.cli_args import load_config, GRPOConfig\n"
        f"load_config({small!r}, GRPOConfig)\nassert 'torch' not in sys.modules"
    )

    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        check=False,
        capture_output=True,
        text=True,
        cwd=Path(__file__).resolve().parents[1],
        timeout=60,
    )

    assert (done.returncode, done.stdout) == (0, ""), done.stderr
