"""What the live ranks run to compare bfloat16 layouts of Archon with each other; each function runs on every rank."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from areal.api.config.optimizer import OptimizerConfig
from areal.api.io_struct import SaveLoadMeta
from areal.engine.core.inputs import ModelInput, as_model_input
from areal.engine.core.runner import LmOutput
from tests.engine_fakes import weight_fn
from tests.torchrun.archon_cells import archon_engine
from tests.torchrun.layout_cells import LOSSES, rows


def norms(
    path: str, backend: str, optimizer: dict[str, Any], archon: dict[str, Any], dtype: str = "bfloat16"
) -> list[float]:
    """Gradient norms of three steps of five micro-batches."""
    engine = archon_engine(path, backend, archon=archon, dtype=dtype)
    engine.config.optimizer = OptimizerConfig(**optimizer)
    engine.config.mb_spec.n_mbs = 5 if "d2" not in backend else 3
    engine.create_process_group()
    engine.initialize()
    engine.train()
    own = rows()[engine.data_parallel_rank :: engine.data_parallel_world_size]
    found = [engine.train_batch(own, LOSSES["ppo"], weight_fn)["grad_norm"] for _ in range(3)]
    dtypes = {parameter.dtype for part in engine.parts for parameter in part.parameters()}
    assert len(dtypes) == 1
    wanted = torch.bfloat16 if optimizer["type"] == "adam_bf16" or engine.groups.data is None else torch.float32
    assert dtypes == {wanted if dtype == "bfloat16" else torch.float32}
    engine.destroy()
    return found


def recomputed(path: str, backend: str, archon: list[dict[str, Any]]) -> list[list[float]]:
    """Gradient norms of two steps of three micro-batches, for each ``archon`` section."""
    found = []
    for section in archon:
        engine = archon_engine(path, backend, archon=section, gradient_checkpointing=True)
        engine.config.mb_spec.n_mbs = 3
        engine.create_process_group()
        engine.initialize()
        engine.train()
        own = rows()[engine.data_parallel_rank :: engine.data_parallel_world_size]
        found.append([engine.train_batch(own, LOSSES["ppo"], weight_fn)["grad_norm"] for _ in range(2)])
        engine.destroy()
    return found


def layers_are_sharded_at_the_loss(path: str, backend: str, policy: str) -> bool:
    """Whether the layers have given gathered weights back when the loss is computed."""
    engine = archon_engine(path, backend, archon={"reshard_after_forward_policy": policy, "pp_schedule": "1F1B"})
    engine.create_process_group()
    engine.initialize()
    engine.train()
    found: list[bool] = []

    def look(output: LmOutput, model_input: ModelInput) -> torch.Tensor:
        parameters = [p for part in engine.parts for p in part.layers.parameters()]
        found.append(all(isinstance(parameter, DTensor) for parameter in parameters))
        return output.hidden.sum() * 0

    inputs = [as_model_input(row, engine.device, engine.groups) for row in rows()[:2]]
    assert engine.runner is not None
    engine.runner.run(inputs, look, forward_only=False)
    engine.destroy()
    return all(found)


def sharded_after_scoring(path: str, backend: str, policy: str, out: str) -> tuple[bool, bool]:
    """Whether all parameters are shards after an evaluation, and whether a recover point made then can be loaded."""
    engine = archon_engine(path, backend, archon={"reshard_after_forward_policy": policy, "pp_schedule": "1F1B"})
    engine.create_process_group()
    engine.initialize()
    own = rows()[engine.data_parallel_rank :: engine.data_parallel_world_size]
    engine.eval().eval_batch(own, LOSSES["sft"], weight_fn)
    sharded = all(isinstance(p, DTensor) for part in engine.parts for p in part.parameters())
    before = {name: tensor.clone() for name, tensor in engine.named_full_tensors()}
    engine.save(SaveLoadMeta(out, "dcp", True))
    engine.train().train_batch(own, LOSSES["sft"], weight_fn)
    engine.load(SaveLoadMeta(out, "dcp", True))
    equal = all(torch.equal(before[name], tensor) for name, tensor in engine.named_full_tensors())
    engine.destroy()
    return sharded, equal


def norm_of_two_calls(path: str, backend: str) -> float:
    """Gradient norm after two calls of ``forward_backward_batch`` with an evaluation behind them."""
    engine = archon_engine(path, backend, archon={"pp_schedule": "1F1B"})
    engine.create_process_group()
    engine.initialize()
    engine.train().optimizer_zero_grad()
    own = rows()
    for half in (own[:4], own[4:]):
        engine.forward_backward_batch(half, lambda logits, packed: logits.float().square().mean())
    engine.eval_batch(own, LOSSES["sft"], weight_fn)
    norm = engine.optimizer_step()["grad_norm"]
    engine.destroy()
    return norm


def heads(path: str, backend: str) -> tuple[int, bool, int]:
    """Who owns this rank's rows, whether that is this rank, and who ends up with losses."""
    engine = archon_engine(path, backend)
    engine.create_process_group()
    found = engine.current_data_parallel_head(), engine.is_data_parallel_head(), engine.result_rank
    engine.destroy()
    return found
