"""A short training that uses nothing but the installed package; test_project_wheel.py runs a copy of it elsewhere.

Builds a tiny character model in the working directory, trains two GRPO steps on arithmetic, prints one line of JSON.
"""

import json
import sys
from pathlib import Path

SETTINGS = """
experiment_name: wheel
trial_name: t0
seed: 1
total_train_steps: 2
tokenizer_path: ${actor.path}
scheduler: {type: inline}
cluster: {fileroot: ./out}
train_dataset: {path: arithmetic, type: rl, batch_size: 4}
gconfig: {n_samples: 2, max_new_tokens: 4, temperature: 1.0}
rollout: {backend: "native:d1", max_head_offpolicyness: 1, max_concurrent_rollouts: 8}
native: {max_running_requests: 8, max_seq_len: 64}
actor:
  path: ./model
  backend: "fsdp:d1"
  dtype: float32
  kl_ctl: 0.0
  reward_norm: {mean_level: group, std_level: group, group_size: 2}
  optimizer: {lr: 1e-3}
"""


def make_model(path: Path) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from areal.dataset.char_tokenizer import build_char_tokenizer

    tokenizer = build_char_tokenizer()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)


def main() -> None:
    import areal
    from areal import PPOTrainer
    from areal.api.cli_args import GRPOConfig, load_expr_config
    from areal.dataset import get_custom_dataset

    make_model(Path("model"))
    Path("config.yaml").write_text(SETTINGS, encoding="utf-8")
    config, _ = load_expr_config(["--config", "config.yaml"], GRPOConfig)
    dataset = get_custom_dataset(split="train", dataset_config=config.train_dataset)
    with PPOTrainer(config, train_dataset=dataset) as trainer:
        trainer.train(
            workflow="areal.workflow.rlvr.RLVRWorkflow",
            workflow_kwargs={
                "reward_fn": "areal.reward.arithmetic.arithmetic_reward_fn",
                "gconfig": config.gconfig,
                "tokenizer": config.tokenizer_path,
            },
        )
    (stats,) = Path("out").rglob("stats.jsonl")
    steps = len(stats.read_text(encoding="utf-8").splitlines())
    print(json.dumps({"steps": steps, "package": areal.__file__, "python": sys.executable}))


if __name__ == "__main__":
    main()
