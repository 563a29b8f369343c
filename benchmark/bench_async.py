"""What asynchrony buys on one machine: generation and training in two processes, overlapping or taking turns.

``python benchmark/bench_async.py`` trains a model of about one million parameters with ``scheduler.type=local``, one
thread in each process, with ``max_head_offpolicyness=2`` and with 0. Answers are so long, and the sampler has so few
slots, that a step's generation and its training take about the same time. Target: at least 1.6x the steps per second.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from areal import PPOTrainer
from areal.api.cli_args import GRPOConfig, load_expr_config
from areal.dataset import get_custom_dataset
from areal.dataset.char_tokenizer import VOCAB_SIZE, build_char_tokenizer
from areal.utils.stats_logger import StatsLogger, read_stats
from benchmark.common import alternate, arguments, emit, ratio, summary

WARM_STEPS = 4
YAML = """
experiment_name: bench
trial_name: async
total_train_epochs: 100
scheduler: {type: local}
rollout:
  backend: "native:d1"
  max_concurrent_rollouts: 64
  scheduling_spec: [{cpu: 1, env_vars: {OMP_NUM_THREADS: "1"}}]
gconfig: {temperature: 1.0}
actor:
  backend: fsdp:d1
  dtype: float32
  kl_ctl: 0.0
  ppo_n_minibatches: 1
  recompute_logprob: false
  use_decoupled_loss: false
  optimizer: {lr: 1.0e-5, weight_decay: 0.0, lr_scheduler_type: constant, warmup_steps_proportion: 0.0}
  reward_norm: {mean_level: group, std_level: group, group_size: "${gconfig.n_samples}"}
  scheduling_spec: [{cpu: 1, env_vars: {OMP_NUM_THREADS: "1"}}]
train_dataset: {path: arithmetic, type: rl, batch_size: 8, dataset_kwargs: {size: 512}}
"""


def make_model(path: Path) -> None:
    """A random model that answers to the length limit, and its tokenizer."""
    tokenizer = build_char_tokenizer()
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(1)
    Qwen2ForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)


def run(eta: int, options: Any, model: Path, shares: dict[str, list[float]]) -> float:
    """Steps per second after the warm-up; notes where the time went."""
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "config.yaml"
        file.write_text(YAML)
        overrides = [
            f"cluster.fileroot={place}",
            f"cluster.name_resolve.nfs_record_root={place}/names",
            f"actor.path={model}",
            f"total_train_steps={options.steps + WARM_STEPS}",
            f"rollout.max_head_offpolicyness={eta}",
            f"gconfig.max_new_tokens={options.tokens}",
            f"gconfig.min_new_tokens={options.tokens}",
            f"gconfig.n_samples={options.samples}",
            f"native.max_running_requests={options.slots}",
        ]
        config, _ = load_expr_config(["--config", str(file), *overrides], GRPOConfig)
        rows = get_custom_dataset(dataset_config=config.train_dataset)
        with PPOTrainer(config, train_dataset=rows) as trainer:
            trainer.train(
                workflow="areal.workflow.rlvr.RLVRWorkflow",
                workflow_kwargs={
                    "reward_fn": "areal.reward.arithmetic.arithmetic_reward_fn",
                    "gconfig": config.gconfig,
                    "tokenizer": config.tokenizer_path,
                },
            )
        stats = [row["stats"] for row in read_stats(Path(StatsLogger.get_log_path(config)) / "stats.jsonl")]
    measured = stats[WARM_STEPS:]
    for key in ("ledger/train_step", "ledger/wait_generation", "ledger/update_weights", "ledger/wall"):
        value = statistics.mean(step.get(key, 0.0) for step in measured)
        shares.setdefault(f"eta={eta} {key}", []).append(value)
    return len(measured) / sum(step["ledger/wall"] for step in measured)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=64, help="length of every answer")
    parser.add_argument("--samples", type=int, default=4, help="answers per prompt; a step has eight prompts")
    parser.add_argument("--slots", type=int, default=16, help="requests that the sampler decodes at the same time")
    options = parser.parse_args()
    torch.set_num_threads(1)
    shares: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as place:
        model = Path(place)
        make_model(model)

        def side(eta: int) -> Any:
            return lambda: run(eta, options, model, shares)

        measured = alternate({"eta=2": side(2), "eta=0": side(0)}, options.repeats)
    result = {
        "steps_per_second": {name: summary(values) for name, values in measured.items()},
        "seconds_per_step": {name: statistics.median(values) for name, values in shares.items()},
        "async_over_sync": ratio(measured["eta=2"], measured["eta=0"]),
        "target": ">= 1.6",
    }
    emit("async", result, options.out)


if __name__ == "__main__":
    main()
