"""Twenty deterministic steps each of supervised fine-tuning and of PPO: tiny model, fixed data, float32, one thread.

The numbers of a commit that was trusted are in ``*.json`` beside this file; ``tests/test_golden_run.py`` compares. They
change only on purpose: ``python -m tests.golden.regenerate`` writes them anew.

Tolerance: written on a CPU with AVX-512; with ``ATEN_CPU_CAPABILITY`` and MKL set to AVX2 or to neither, losses and
norms differ by 2e-6 and statistics of the final weights by 4e-6. ``REL`` leaves a factor of 25 for other CPUs and is
still far below what a change of a formula, a mask or a schedule does.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from areal.api.config.fields import DefaultStr
from areal.api.config.optimizer import OptimizerConfig
from areal.api.config.ppo import PPOActorConfig
from areal.api.config.train import MicroBatchSpec
from areal.api.io_struct import FinetuneSpec
from areal.engine.fsdp_engine import FSDPEngine
from areal.trainer.ppo.actor import PPOActor
from areal.trainer.sft.learner import LMLearner
from areal.utils import stats_tracker
from tests.engine_fakes import batch, engine_config
from tests.fakes import tiny_model

STEPS = 20
REL = 1e-4
LENGTHS = (9, 14, 6, 11, 17, 5, 8, 12)
OPTIMIZER = {
    "lr": 5e-3,
    "eps": 1e-4,
    "weight_decay": 0.05,
    "gradient_clipping": 1.0,
    "lr_scheduler_type": "cosine",
    "warmup_steps_proportion": 0.2,
    "min_lr_ratio": 0.1,
}
SPEC = FinetuneSpec(total_train_epochs=1, dataset_size=STEPS * len(LENGTHS), train_batch_size=len(LENGTHS))


def sft_run(model_dir: str) -> dict[str, Any]:
    """Supervised fine-tuning: loss, gradient norm and learning rate of each step."""
    engine = _start(FSDPEngine(engine_config(model_dir, optimizer=OPTIMIZER, mb_spec={"n_mbs": 2})))
    learner = LMLearner(engine)
    steps = []
    for step in range(STEPS):
        learner.train_lm(batch(LENGTHS, seed=step))
        engine.lr_scheduler_step()
        stats = stats_tracker.export_all()
        steps.append({"loss": stats["sft/loss/avg"], "grad_norm": stats["sft/grad_norm"], "lr": stats["sft/lr"]})
    return {"steps": steps, "final": _weight_statistics(engine)}


def ppo_run(model_dir: str) -> dict[str, Any]:
    """PPO with group-normalized rewards, two mini-batches per step and a sampler that is a little off-policy."""
    base = engine_config(model_dir, optimizer=OPTIMIZER)
    fields = {spec.name: getattr(base, spec.name) for spec in dataclasses.fields(base) if spec.init}
    fields |= {"mb_spec": MicroBatchSpec(), "attn_impl": DefaultStr("flash_attention_2"), "ppo_n_minibatches": 2}
    fields |= {"optimizer": OptimizerConfig(**OPTIMIZER), "kl_ctl": 0.0}
    config = PPOActorConfig(**fields)
    engine = _start(FSDPEngine(config))
    actor = PPOActor(config, engine)
    steps = []
    for step in range(STEPS):
        actor.ppo_update(actor.compute_advantages(actor.annotate(_rollout(actor, step), "prox_logp")))
        engine.lr_scheduler_step()
        engine.set_version(step + 1)
        stats = stats_tracker.export_all()
        steps.append(
            {
                "loss": stats["ppo_actor/update/actor_loss/avg"],
                "grad_norm": stats["ppo_actor/update/grad_norm"],
                "lr": stats["ppo_actor/update/lr"],
            }
        )
    return {"steps": steps, "final": _weight_statistics(engine)}


RUNS: dict[str, Callable[[str], dict[str, Any]]] = {"sft": sft_run, "ppo": ppo_run}


def golden_file(name: str) -> Path:
    """Where the numbers of a run are stored."""
    return Path(__file__).with_name(f"{name}.json")


def run_golden(name: str) -> dict[str, Any]:
    """Numbers of one run, made now."""
    with _one_thread(), tempfile.TemporaryDirectory() as directory:
        tiny_model("qwen2", seed=11).save_pretrained(directory)
        stats_tracker.export_all()
        return RUNS[name](directory)


def _start(engine: FSDPEngine) -> FSDPEngine:
    engine.create_process_group()
    engine.initialize(None, SPEC)
    return engine.train()


def _rollout(actor: PPOActor, step: int) -> Any:
    """Packed rows of four groups of two, with rewards and the log-probs of a sampler that rounds."""
    rows = batch(LENGTHS, seed=100 + step)
    generator = torch.Generator().manual_seed(step)
    for index, (row, logprobs) in enumerate(zip(rows, actor.compute_logp(rows), strict=True)):
        noise = 0.05 * torch.randn(logprobs.shape, generator=generator)
        shifted = torch.roll(logprobs, 1, dims=1)
        row["logprobs"] = (shifted + noise) * row["loss_mask"]
        row["versions"] = torch.where(row["loss_mask"].bool(), step, -1)
        row["rewards"] = torch.tensor([float((index * 7 + step) % 3)])
    packed = actor.pack(rows)
    return packed.with_sequences(group_id=torch.arange(len(rows)) // 2)


def _weight_statistics(engine: FSDPEngine) -> dict[str, dict[str, float]]:
    """Mean, standard deviation and largest magnitude of every tensor."""
    return {
        name: {"mean": float(w.double().mean()), "std": float(w.double().std()), "max": float(w.abs().max())}
        for name, w in engine.named_full_tensors()
    }


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
