"""A user's script: a tiny policy on arithmetic rows, by reinforcement, from labels (``kind=sft``) or pairs (``dpo``).

``tables=FILE`` among the arguments leaves there what an RL run trained on, as ``(step, row, columns)``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from areal import DPOTrainer, PPOTrainer, SFTTrainer
from areal.api.cli_args import DPOConfig, GRPOConfig, SFTConfig, load_expr_config
from tests.controller.runs import TableTrainer
from tests.pair_runs import planted_pairs
from tests.trainer_runs import WORKFLOW, rl_rows, sft_rows, workflow_kwargs


def main(args: list[str]) -> None:
    """Train, then go on as scripts do; only rank 0 has results."""
    own = dict(arg.split("=") for arg in args if arg.startswith(("tables=", "kind=")))
    args = [arg for arg in args if arg.partition("=")[0] not in own]
    trainer: Any
    if own.get("kind") == "sft":
        sft, _ = load_expr_config(args, SFTConfig)
        with SFTTrainer(sft, train_dataset=sft_rows(sft)) as trainer:
            trainer.train()
    elif own.get("kind") == "dpo":
        dpo, _ = load_expr_config(args, DPOConfig)
        with DPOTrainer(dpo, train_dataset=planted_pairs(8)) as trainer:
            trainer.train()
    else:
        config, _ = load_expr_config(args, GRPOConfig)
        kind = TableTrainer if "tables" in own else PPOTrainer
        with kind(config, train_dataset=rl_rows(config)) as trainer:
            trainer.train(workflow=WORKFLOW, workflow_kwargs=workflow_kwargs(config))
        if "tables" in own and trainer.follower is None:
            found = [(step, row.index, columns) for step, (row, columns) in trainer.groups]
            torch.save(found, Path(own["tables"]))
    sys.stdout.write(f"script finished, follower={trainer.follower is not None}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
