"""From nothing to a trained model in minutes: SFT warm-up, then asynchronous GRPO, on two-digit addition.

    python examples/quickstart/quickstart.py [key=value …]

A character-level Qwen2 of about one million parameters first learns the format and some addition from examples, then
improves on its own samples. ``seed=N`` and ``output=DIR`` are for the whole script, ``sft_steps=N`` and ``steps=N`` set
the length of the two stages; any other override goes to the GRPO stage. With ``rollout.max_head_offpolicyness=0`` (no
generation ahead of training) a seed repeats the run bit for bit.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from areal import PPOTrainer, SFTTrainer
from areal.api.cli_args import (
    GenerationHyperparameters,
    GRPOConfig,
    NativeConfig,
    SFTConfig,
    TrainDatasetConfig,
    load_expr_config,
)
from areal.api.io_struct import ModelRequest, StepInfo
from areal.dataset import get_custom_dataset
from areal.dataset.char_tokenizer import VOCAB_SIZE, build_char_tokenizer
from areal.engine.native.engine import NativeEngine
from areal.utils.hf_utils import apply_chat_template, load_hf_tokenizer
from areal.utils.stats_logger import StatsLogger, read_stats

HERE = Path(__file__).resolve().parent
WORKFLOW = "areal.workflow.rlvr.RLVRWorkflow"
REWARD = "areal.reward.arithmetic.arithmetic_reward_fn"
SAMPLES_SHOWN = 8
PROBE_EVERY = 10  # steps of the warm-up between two looks at its accuracy
WARM_ACCURACY = 0.4  # of sampled answers; where GRPO takes over


def create_model(path: Path, seed: int) -> None:
    """Save a randomly initialised model and its tokenizer as a Hugging Face directory."""
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
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    Qwen2ForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)


def arithmetic(split: str = "train", **stretch: int) -> Any:
    """Problems of the same order that the YAML files take theirs from; the test split is disjoint from both."""
    config = TrainDatasetConfig(path="arithmetic", type="rl", split=split, dataset_kwargs=stretch)
    return get_custom_dataset(dataset_config=config)


def answers(engine: NativeEngine, tokenizer: Any, problems: Any, *, greedy: bool) -> list[str]:
    """One reply per problem."""
    gconfig = GenerationHyperparameters(greedy=greedy, max_new_tokens=8, stop_token_ids=[tokenizer.eos_token_id])
    futures = []
    for seed, problem in enumerate(problems):
        prompt = apply_chat_template(tokenizer, problem["messages"], add_generation_prompt=True)
        futures.append(engine.submit(ModelRequest(input_ids=prompt, gconfig=gconfig, seed=seed)))
    return [tokenizer.decode(future.result().output_tokens, skip_special_tokens=True) for future in futures]


def accuracy(replies: list[str], problems: Any) -> float:
    """Share of right replies."""
    return sum(reply == problem["answer"] for reply, problem in zip(replies, problems, strict=True)) / len(replies)


@contextmanager
def sampler(model_path: Path) -> Iterator[NativeEngine]:
    """The embedded inference engine on the model at ``model_path``."""
    engine = NativeEngine(NativeConfig(max_running_requests=128), str(model_path), dtype="float32")
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def evaluate(model_path: Path, problems: Any) -> tuple[float, list[str]]:
    """Greedy accuracy of the model at ``model_path``, and its replies."""
    with sampler(model_path) as engine:
        replies = answers(engine, load_hf_tokenizer(str(model_path)), problems, greedy=True)
    return accuracy(replies, problems), replies


def newest_checkpoint(config: Any) -> Path:
    """The last Hugging Face checkpoint that a run saved."""
    from areal.utils.saver import Saver

    root = Path(Saver.get_model_save_root(config.saver.experiment_name, config.saver.trial_name, config.saver.fileroot))
    return max(root.glob("epoch*"), key=lambda path: int(path.name.rpartition("globalstep")[2]))


def stage_arguments(stage: str, output: Path, model: Path, seed: int) -> list[str]:
    """Command line of one stage: its YAML file and what the script decides."""
    common = [f"seed={seed}", f"cluster.fileroot={output}", f"actor.path={model}"]
    return ["--config", str(HERE / f"{stage}.yaml"), *common]


def warm_up(output: Path, model: Path, seed: int, overrides: list[str], enough: float = WARM_ACCURACY) -> Path:
    """Supervised stage, until a share ``enough`` of sampled answers is right; returns its checkpoint."""
    config, _ = load_expr_config([*stage_arguments("sft", output, model, seed), *overrides], SFTConfig)
    tokenizer = load_hf_tokenizer(config.tokenizer_path)
    dataset = get_custom_dataset(dataset_config=config.train_dataset, tokenizer=tokenizer)
    probes = arithmetic(start=4000, size=256)
    with SFTTrainer(config, train_dataset=dataset) as trainer, sampler(model) as engine:

        def warm(step: StepInfo) -> bool:
            if (step.global_step + 1) % PROBE_EVERY:
                return False
            engine.receive_weights(trainer.engine.named_full_tensors(), step.global_step + 1)
            return accuracy(answers(engine, tokenizer, probes, greedy=False), probes) >= enough

        trainer.train(stop_fn=warm)
    return newest_checkpoint(config)


def reinforce(output: Path, model: Path, seed: int, overrides: list[str]) -> tuple[Path, Path]:
    """GRPO stage; returns its checkpoint and its log directory."""
    config, _ = load_expr_config([*stage_arguments("grpo", output, model, seed), *overrides], GRPOConfig)
    dataset = get_custom_dataset(dataset_config=config.train_dataset)
    with PPOTrainer(config, train_dataset=dataset) as trainer:
        trainer.train(
            workflow=WORKFLOW,
            workflow_kwargs={"reward_fn": REWARD, "gconfig": config.gconfig, "tokenizer": config.tokenizer_path},
        )
    return newest_checkpoint(config), Path(StatsLogger.get_log_path(config))


def show(text: str) -> None:
    """One line for the person who watches."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(argv: list[str]) -> None:
    """Run both stages and write checkpoint, curve, samples and summary."""
    options = dict(argument.split("=", 1) for argument in argv if "=" in argument)
    seed = int(options.pop("seed", "1"))
    output = Path(options.pop("output", "outputs/quickstart")).resolve()
    if "steps" in options:
        options["total_train_steps"] = options.pop("steps")
    sft_overrides = [f"total_train_steps={options.pop('sft_steps')}"] if "sft_steps" in options else []
    if output.exists():
        shutil.rmtree(output)
    output.mkdir(parents=True)
    create_model(output / "model", seed)
    problems = arithmetic(split="test", size=512)

    show("1/2 supervised warm-up on examples of two-digit addition")
    start = time.perf_counter()
    warm = warm_up(output, output / "model", seed, sft_overrides)
    accuracy_before, replies_before = evaluate(warm, problems)
    show(f"after the warm-up: {accuracy_before:.1%} of {len(problems)} unseen problems right (greedy)")

    show("2/2 asynchronous GRPO: the model learns from its own samples")
    checkpoint, log_dir = reinforce(output, warm, seed, [f"{k}={v}" for k, v in options.items()])
    train_seconds = time.perf_counter() - start
    accuracy_after, replies_after = evaluate(checkpoint, problems)

    shutil.copytree(checkpoint, output / "checkpoint")
    shutil.copy(log_dir / "reward_curve.png", output / "reward_curve.png")
    rows = read_stats(log_dir / "stats.jsonl")
    pairs = [
        {"prompt": p["messages"][0]["content"], "reply_before": before, "reply": after, "answer": p["answer"]}
        for p, before, after in zip(problems, replies_before, replies_after, strict=True)
    ]
    (output / "samples.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    summary = {
        "accuracy_before": accuracy_before,
        "accuracy_after": accuracy_after,
        "train_seconds": round(train_seconds, 1),
        "steps": len(rows),
        "sequences_per_second": round(
            sum(row["stats"]["ppo_actor/n_seqs"] for row in rows) / sum(row["stats"]["ledger/wall"] for row in rows), 1
        ),
        "checkpoint": str(output / "checkpoint"),
        "reward_curve": str(output / "reward_curve.png"),
        "samples": str(output / "samples.jsonl"),
    }
    (output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")

    changed = [pair for pair in pairs if pair["reply_before"] != pair["answer"]] or pairs
    for pair in changed[:SAMPLES_SHOWN]:
        before, after = pair["reply_before"], pair["reply"]
        show(f"  {pair['prompt']:<8} before: {before:<6} after: {after:<6} right: {pair['answer']}")
    show(f"accuracy on {len(problems)} unseen problems: {accuracy_before:.1%} before, {accuracy_after:.1%} after GRPO")
    show(str(output / "summary.json"))


if __name__ == "__main__":
    main(sys.argv[1:])
