"""What the live ranks run to compare prefix trees in a layout with one process that shares nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from areal.engine.fsdp_engine import FSDPEngine
from areal.experimental.engine.archon_engine import ArchonEngine
from tests.engine_fakes import engine_config
from tests.tree_rows import branches, packed

TREES: dict[str, Any] = {
    "enable_tree_training": True,
    "pad_to_maximum": True,
    "mb_spec": {"max_tokens_per_mb": 128},
}
SEQUENCES = branches(roots=8)


def _loss(logprobs: Tensor, entropy: Tensor, fields: dict[str, Any]) -> Tensor:
    return -((logprobs + 0.1 * entropy) * fields["loss_mask"]).sum() / fields["loss_mask"].sum()


def _weight(fields: dict[str, Any]) -> Tensor:
    return fields["loss_mask"].count_nonzero()


def steps(path: str, backend: str, shards: list[list[int]], **settings: Any) -> dict[str, Any]:
    """Two steps of this rank's sequences; ``shards[r]`` are those of rank r of d."""
    config = engine_config(path, backend=backend, **settings)
    engine: Any = ArchonEngine(config) if backend.startswith("archon") else FSDPEngine(config)
    engine.create_process_group()
    engine.initialize(None, None)
    engine.train()
    own = shards[engine.data_parallel_rank]
    batch = packed([SEQUENCES[i] for i in own]) if own else []
    answer: dict[str, Any] = {"losses": [], "results": []}
    answer["logprobs"] = np.asarray(engine.forward_batch(batch), np.float32)
    for _ in range(2):
        answer["losses"].append(engine.eval_batch(batch, _loss, _weight).item())
        answer["results"].append(engine.train_batch(batch, _loss, _weight, token_mask="loss_mask"))
    answer["weights"] = {name: tensor.numpy().copy() for name, tensor in engine.named_full_tensors()}
    engine.destroy()
    return answer


def too_long(path: str, backend: str) -> str:
    """The error of a sequence on the first rank of d that no tree can take, as this rank sees it."""
    engine = FSDPEngine(engine_config(path, backend=backend, **TREES))
    engine.create_process_group()
    engine.initialize(None, None)
    long = engine.data_parallel_rank == 0
    batch = packed([list(range(2, 60)) * (3 if long else 1)] * 2)
    try:
        engine.forward_batch(batch)
    except (ValueError, RuntimeError) as exc:
        return f"{type(exc).__name__}: {exc}"
    finally:
        engine.destroy()
        torch.distributed.barrier()
    return ""
