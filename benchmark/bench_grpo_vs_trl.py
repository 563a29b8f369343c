"""Sequences per second of whole GRPO steps: PPOTrainer against TRL's GRPOTrainer, on the same work.

Both sides get the same character-level Qwen2 (about 1 M parameters) from one directory, the same prompts, reward, group
size, AdamW settings, number of steps and threads. Each measurement is a fresh process; a step's time is the distance
between the ends of two steps, and the first steps (warm-up) are left out.

Usage: python benchmark/bench_grpo_vs_trl.py [--trl-python PATH] [--case short|long] [--repeats N]

``--trl-python`` is an interpreter whose environment has ``trl`` and the same torch (default: this one).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

WARMUP_STEPS = 3
MEASURED_STEPS = 8
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Case:
    """The amount of work of one step: ``prompts`` groups of ``group`` sequences."""

    prompts: int
    group: int
    max_new_tokens: int
    min_new_tokens: int = 0

    @property
    def sequences(self) -> int:
        return self.prompts * self.group

    @property
    def steps(self) -> int:
        return WARMUP_STEPS + MEASURED_STEPS


CASES = {
    "short": Case(prompts=32, group=8, max_new_tokens=8),
    "long": Case(prompts=8, group=8, max_new_tokens=128, min_new_tokens=128),
}


def distinct_reward_fn(prompt, completions, prompt_ids=None, completion_ids=None, **row) -> float:
    """A cheap reward that differs inside a group: the share of distinct characters."""
    return len(set(completions)) / max(1, len(completions))


distinct_reward_fn.areal_inline = True  # takes microseconds; TRL calls it in its own process too


def write_inputs(folder: Path, case: Case) -> None:
    """Saves model, tokenizer and prompts, which both sides read."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from areal.dataset.char_tokenizer import build_char_tokenizer

    tokenizer = build_char_tokenizer()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    rng = random.Random(0)
    questions = [f"{rng.randint(10, 99)}+{rng.randint(10, 99)}=" for _ in range(2 * case.prompts * case.steps)]
    rows = [{"messages": [{"role": "user", "content": question}], "answer": "0"} for question in questions]
    (folder / "prompts.json").write_text(json.dumps(rows), encoding="utf-8")


def areal_side(folder: Path, case: Case, eta: int) -> list[float]:
    """Runs PPOTrainer and returns the times at which its steps ended, read from the statistics it writes."""
    from areal import PPOTrainer
    from areal.api.cli_args import GRPOConfig, load_expr_config

    settings = {
        "experiment_name": "bench-grpo",
        "trial_name": f"t{time.time_ns()}",
        "seed": 1,
        "total_train_steps": case.steps + eta + 1,  # the measured steps also generate what later ones train on
        "tokenizer_path": str(folder),
        "scheduler": {"type": "inline"},
        "cluster": {"fileroot": str(folder / "out")},
        "train_dataset": {"path": "arithmetic", "type": "rl", "batch_size": case.prompts, "shuffle": True},
        "gconfig": {
            "n_samples": case.group,
            "max_new_tokens": case.max_new_tokens,
            "min_new_tokens": case.min_new_tokens,
            "temperature": 1.0,
        },
        "rollout": {
            "backend": "native:d1",
            "max_head_offpolicyness": eta,
            "max_concurrent_rollouts": case.prompts * (eta + 1),
        },
        "native": {"max_running_requests": case.sequences, "max_seq_len": 256},
        "actor": {
            "path": str(folder),
            "backend": "fsdp:d1",
            "dtype": "float32",
            "gradient_checkpointing": False,
            "kl_ctl": 0.0,
            "ppo_n_minibatches": 1,
            "use_decoupled_loss": False,
            "recompute_logprob": False,
            "mb_spec": {"max_tokens_per_mb": 1 << 16},
            "reward_norm": {"mean_level": "group", "std_level": "group", "group_size": case.group},
            "adv_norm": None,
            "optimizer": {
                "type": "adam",
                "lr": LEARNING_RATE,
                "weight_decay": 0.0,
                "beta1": 0.9,
                "beta2": 0.999,
                "eps": 1e-8,
                "gradient_clipping": 1.0,
                "lr_scheduler_type": "constant",
                "warmup_steps_proportion": 0.0,
            },
        },
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML
    config, _ = load_expr_config(["--config", str(path)], GRPOConfig)
    rows = json.loads((folder / "prompts.json").read_text(encoding="utf-8"))
    with PPOTrainer(config, train_dataset=rows) as trainer:
        trainer.train(
            workflow="areal.workflow.rlvr.RLVRWorkflow",
            workflow_kwargs={
                "reward_fn": distinct_reward_fn,
                "gconfig": config.gconfig,
                "tokenizer": config.tokenizer_path,
            },
        )
    (stats,) = (folder / "out").rglob("stats.jsonl")
    return [json.loads(line)["time"] for line in stats.read_text(encoding="utf-8").splitlines()][: case.steps]


def trl_side(folder: Path, case: Case) -> list[float]:
    """Runs TRL's GRPOTrainer and returns the times at which its steps ended."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    ends: list[float] = []

    class StepClock(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            ends.append(time.time())

    def reward(completions, **kwargs):
        texts = [completion[0]["content"] for completion in completions]
        return [distinct_reward_fn("", text) for text in texts]

    rows = json.loads((folder / "prompts.json").read_text(encoding="utf-8"))
    generation = {"min_new_tokens": case.min_new_tokens} if case.min_new_tokens else {}
    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        max_steps=case.steps,
        per_device_train_batch_size=case.sequences,
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        num_generations=case.group,
        num_iterations=1,
        max_completion_length=case.max_new_tokens,
        generation_kwargs=generation,
        temperature=1.0,
        beta=0.0,
        loss_type="grpo",
        learning_rate=LEARNING_RATE,
        weight_decay=0.0,
        adam_beta2=0.999,
        adam_epsilon=1e-8,
        max_grad_norm=1.0,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        gradient_checkpointing=False,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        dataloader_num_workers=0,
        seed=1,
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": row["messages"]} for row in rows]),
        processing_class=AutoTokenizer.from_pretrained(folder),
        callbacks=[StepClock()],
    )
    trainer.train()
    return ends


def steady_rate(ends: list[float], case: Case) -> float:
    """Sequences per second over the steps after the warm-up: their number over their wall time."""
    if len(ends) != case.steps:
        raise RuntimeError(f"{len(ends)} steps ended, expected {case.steps}")
    return case.sequences * MEASURED_STEPS / (ends[-1] - ends[WARMUP_STEPS - 1])


def child(side: str, case: Case, folder: Path, eta: int, threads: int) -> None:
    """One measurement in a process of its own; prints its JSON."""
    import torch

    torch.set_num_threads(threads)
    ends = areal_side(folder, case, eta) if side == "areal" else trl_side(folder, case)
    steps = [b - a for a, b in zip(ends, ends[1:], strict=False)]
    print(json.dumps({"rate": steady_rate(ends, case), "step_s": statistics.median(steps[WARMUP_STEPS - 1 :])}))


def compare(name: str, args: argparse.Namespace) -> dict:
    """Alternates both sides on one case; rates are sequences per second."""
    from common import alternate, ratio, run_json, summary

    case = CASES[name]

    def run(side: str) -> float:
        with tempfile.TemporaryDirectory() as folder:
            write_inputs(Path(folder), case)
            python = args.trl_python if side == "trl" else sys.executable
            command = [python, __file__, "--child", side, "--case", name, "--folder", folder]
            command += ["--eta", str(args.eta), "--threads", str(args.threads)]
            return run_json(command, threads=args.threads)["rate"]

    rates = alternate({"areal": lambda: run("areal"), "trl": lambda: run("trl")}, args.repeats)
    return {
        **dataclasses.asdict(case),
        "sequences_per_second": {side: summary(values) for side, values in rates.items()},
        "ratio": ratio(rates["areal"], rates["trl"]),
    }


def main() -> None:
    from common import arguments, emit, package_version

    parser = arguments("GRPO steps against TRL's GRPOTrainer.")
    parser.add_argument("--trl-python", default=sys.executable, help="interpreter of an environment that has trl")
    parser.add_argument("--case", choices=[*CASES, "all"], default="all")
    parser.add_argument("--eta", type=int, default=1, help="rollout.max_head_offpolicyness of our side")
    parser.add_argument("--child", choices=["areal", "trl"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, CASES[args.case], args.folder, args.eta, args.threads)
        return
    names = list(CASES) if args.case == "all" else [args.case]
    versions = {package: package_version(args.trl_python, package) for package in ("trl", "torch", "transformers")}
    cases = {name: compare(name, args) for name in names}
    emit("grpo_vs_trl", {"eta": args.eta, "threads": args.threads, "trl_side": versions, "cases": cases}, args.out)


if __name__ == "__main__":
    main()
