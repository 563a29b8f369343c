"""RLHF: PPO whose reward is a model that ``reward_model.py`` trained.

python examples/alignment/rlhf.py --reward-model DIRECTORY --config examples/alignment/toy_rlhf_cpu.yaml
"""

import argparse
import sys

from areal import PPOTrainer
from areal.api.cli_args import GRPOConfig, load_expr_config
from areal.dataset import get_custom_dataset
from areal.reward import RewardModel
from areal.utils.hf_utils import load_hf_tokenizer


def main(args: list[str]) -> None:
    """Train on the configured prompts and evaluate on their test split."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--reward-model", required=True, metavar="DIRECTORY", help="checkpoint of RWTrainer")
    options, rest = parser.parse_known_args(args)
    config, _ = load_expr_config(rest, GRPOConfig)
    tokenizer = load_hf_tokenizer(config.tokenizer_path)
    train_dataset = get_custom_dataset(split="train", dataset_config=config.train_dataset, tokenizer=tokenizer)
    valid_dataset = None
    if config.valid_dataset is not None:
        valid_dataset = get_custom_dataset(split="test", dataset_config=config.valid_dataset, tokenizer=tokenizer)

    workflow_kwargs = {
        "reward_fn": RewardModel(path=options.reward_model),
        "gconfig": config.gconfig,
        "tokenizer": config.tokenizer_path,
    }
    with PPOTrainer(config, train_dataset=train_dataset, valid_dataset=valid_dataset) as trainer:
        trainer.train(
            workflow="areal.workflow.rlvr.RLVRWorkflow",
            workflow_kwargs=workflow_kwargs,
            eval_workflow="areal.workflow.rlvr.RLVRWorkflow",
            eval_workflow_kwargs={**workflow_kwargs, "gconfig": config.eval_gconfig},
        )


if __name__ == "__main__":
    main(sys.argv[1:])
