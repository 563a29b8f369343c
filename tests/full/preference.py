"""Preference cells: DPO and a reward model learn a planted preference from pairs, measured on what they never saw.

In the pairs, an answer of even digits is preferred to one of odd digits. A supervised stage on both kinds comes first,
so that the policy writes either about equally often; then DPO must make it write even digits, and a reward model must
put unseen answers in order.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from areal import SFTTrainer
from areal.api.cli_args import GenerationHyperparameters
from areal.api.io_struct import ModelRequest
from areal.utils import fs
from tests.full.accuracy import SEED, quickstart
from tests.full.cell import CellContext
from tests.full.presets import PAIR_PRESETS, PAIR_STEPS
from tests.pair_runs import dpo_config, planted_pairs, run_pairs, rw_config
from tests.trainer_runs import checkpoints, sft_config

EVEN = {4, 6, 8, 10, 12}  # tokens of the even digits
DIGITS = range(4, 14)
PAIRS, HELD_OUT, WARM_STEPS = 2000, 256, 60
MAKERS = {"dpo": dpo_config, "rw": rw_config}
IN_ORDER = {"dpo": "dpo-eval/reward_accuracy/avg", "rw": "rw-eval/correct_ratio/avg"}  # share of pairs


def run(context: CellContext, preset: str) -> None:
    """Train one preset from the supervised start and compare what it learnt with its bar."""
    settings = PAIR_PRESETS[preset]
    start = supervised_start(context.shared)
    kind = "rw" if preset == "rw" else "dpo"
    config = MAKERS[kind](
        context.work,
        str(start),
        f"seed={SEED}",
        "train_dataset.batch_size=16",
        f"total_train_steps={PAIR_STEPS}",
        f"saver.freq_steps={PAIR_STEPS}",
        f"evaluator.freq_steps={PAIR_STEPS}",
        "evaluator.eval_before_train=true",
        f"valid_dataset={{path: pairs, type: {kind}, batch_size: 64}}",
        *settings.overrides,
    )
    stats = run_pairs(config, planted_pairs(PAIRS), valid=planted_pairs(HELD_OUT, seed=1))
    before, after = stats[0][f"before_train/{IN_ORDER[kind]}"], stats[-1][IN_ORDER[kind]]
    context.facts |= {"pairs_in_order_before": round(before, 4), "pairs_in_order_after": round(after, 4)}
    context.expect(after >= settings.bar, f"{after:.1%} of unseen pairs are in order, below {settings.bar:.0%}")
    if kind == "dpo":
        shares = {name: even_share(path) for name, path in (("before", start), ("after", checkpoints(config)[-1]))}
        context.facts |= {f"even_digits_{name}": round(share, 4) for name, share in shares.items()}
        context.expect(0.3 <= shares["before"] <= 0.7, f"the start writes {shares['before']:.1%} even digits")
        context.expect(shares["after"] >= settings.bar, f"the policy writes {shares['after']:.1%} even digits")


def supervised_start(shared: Path) -> Path:
    """A model that has learnt to write both kinds of answers; made by the first cell that asks."""
    place = shared / "preference-start"
    if not place.is_dir():
        with fs.atomic_directory(place) as aside:
            quickstart().create_model(aside / "initial", SEED)
            config = sft_config(
                aside / "run",
                str(aside / "initial"),
                f"seed={SEED}",
                "train_dataset.batch_size=32",
                "actor.optimizer.lr=2.0e-3",
                f"total_train_steps={WARM_STEPS}",
                f"saver.freq_steps={WARM_STEPS}",
            )
            with SFTTrainer(config, train_dataset=both_sides()) as trainer:
                trainer.train()
            checkpoints(config)[-1].rename(aside / "model")
    return place / "model"


def both_sides() -> list[dict[str, Any]]:
    """Chosen and rejected answers alike, as supervised rows."""
    pairs = planted_pairs(PAIRS, seed=2)
    return [
        {"input_ids": pair[f"{side}_ids"], "loss_mask": pair[f"{side}_loss_mask"]}
        for pair in pairs
        for side in ("chosen", "rejected")
    ]


def even_share(model: Path) -> float:
    """Share of even digits among the digits that the model samples after unseen prompts."""
    pairs = planted_pairs(HELD_OUT, seed=3)
    prompts = [pair["chosen_ids"][: pair["chosen_loss_mask"].index(1)] for pair in pairs]
    gconfig = GenerationHyperparameters(max_new_tokens=6, stop_token_ids=[1])
    with quickstart().sampler(model) as engine:
        requests = [ModelRequest(input_ids=prompt, gconfig=gconfig, seed=seed) for seed, prompt in enumerate(prompts)]
        futures = [engine.submit(request) for request in requests]
        digits = [token for future in futures for token in future.result().output_tokens if token in DIGITS]
    return sum(token in EVEN for token in digits) / max(1, len(digits))
