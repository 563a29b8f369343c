"""Which modules of a model form each pipeline stage, and which rank holds each stage.

In: the schedule's name, the number of pipeline ranks and the model's layers. Out: module names by stage, stages by rank
and a model that keeps one stage's modules. Called by the Archon engine before it shards the parts of its model.

Embedding and head take time too, so the first and the last stage get fewer layers: they count as ``first_less`` and
``last_less`` layers when the model is divided evenly.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import dataclass

from torch import nn

from areal.utils.errors import ConfigError

__all__ = ["SCHEDULES", "Schedule", "count_stages", "keep_modules", "split_modules", "stages_of_rank"]


@dataclass(frozen=True)
class Schedule:
    """What a pipeline schedule asks of the stages.

    Attributes:
        multi_stage: a rank holds several stages; else it holds one.
        v_shape: stages run down the ranks and up again, two for each rank, so rank 0 holds the first and the last one;
            else they go round the ranks.
    """

    multi_stage: bool
    v_shape: bool = False


SCHEDULES = {
    "1F1B": Schedule(multi_stage=False),
    "Interleaved1F1B": Schedule(multi_stage=True),
    "InterleavedZeroBubble": Schedule(multi_stage=True),
    "ZBVZeroBubble": Schedule(multi_stage=True, v_shape=True),
    "DualPipeV": Schedule(multi_stage=True, v_shape=True),
}


def count_stages(
    schedule: str,
    pp: int,
    num_layers: int,
    layers_per_stage: int | None = None,
    first_less: int = 1,
    last_less: int = 1,
) -> int:
    """Number of stages of the whole model.

    Args:
        schedule: a key of ``SCHEDULES``.
        pp: pipeline ranks.
        num_layers: the model's decoder layers.
        layers_per_stage: layers of a stage; None: one stage for each rank, or two if the schedule has several.
        first_less: layers that the embedding counts for.
        last_less: layers that the head counts for.

    Raises:
        ConfigError: an unknown schedule, or ``layers_per_stage`` gives a number of stages that the schedule cannot run.
    """
    kind = _schedule(schedule)
    if layers_per_stage is None:
        return pp * (2 if kind.multi_stage else 1)
    if layers_per_stage < 1:
        raise ConfigError(f"archon.pp_layers_per_stage={layers_per_stage} must be >= 1, or null")
    num_stages = -(-(num_layers + first_less + last_less) // layers_per_stage)
    found = (
        f"archon.pp_layers_per_stage={layers_per_stage} splits {num_layers} layers (+{first_less} for the embedding, "
        f"+{last_less} for the head) into {num_stages} stages"
    )
    if num_stages % pp:
        raise ConfigError(f"{found}, which is not a multiple of p={pp}")
    per_rank = num_stages // pp
    if not kind.multi_stage and per_rank != 1:
        raise ConfigError(f"{found}, {per_rank} for each of {pp} ranks; archon.pp_schedule={schedule} must have 1")
    if kind.v_shape and per_rank != 2:
        raise ConfigError(f"{found}, {per_rank} for each of {pp} ranks; archon.pp_schedule={schedule} must have 2")
    if kind.multi_stage and per_rank < 2:
        raise ConfigError(f"{found}, {per_rank} for each of {pp} ranks; archon.pp_schedule={schedule} must have >= 2")
    return num_stages


def split_modules(
    num_stages: int, num_layers: int, *, first_less: int = 1, last_less: int = 1, is_critic: bool = False
) -> list[list[str]]:
    """Module names of each stage, in the order in which data passes them.

    Raises:
        ConfigError: there are too few layers for so many stages.
    """
    if num_stages < 1:
        raise ConfigError(f"{num_stages} pipeline stages: there must be at least 1")
    for key, value in (("first", first_less), ("last", last_less)):
        if value < 0:
            raise ConfigError(f"archon.pp_{key}_stage_less_layers={value} must be >= 0")
    layers = [f"layers.{i}" for i in range(num_layers)]
    head = ["norm", "score" if is_critic else "output"]
    if num_stages == 1:
        return [["tok_embeddings", *layers, *head]]
    effective = num_layers + first_less + last_less
    if num_stages > effective:
        raise ConfigError(
            f"{num_stages} pipeline stages: {num_layers} layers, +{first_less} for the embedding and +{last_less} for "
            f"the head, allow at most {effective}"
        )
    share, longer = divmod(effective, num_stages)
    for key, value in (("first", first_less), ("last", last_less)):
        if value > share:
            raise ConfigError(
                f"archon.pp_{key}_stage_less_layers={value} must be <= {share}, what each of {num_stages} stages of "
                f"{num_layers} layers gets"
            )
    counts = [share + (stage < longer) for stage in range(num_stages)]
    counts[0] -= first_less
    counts[-1] -= last_less
    ends = [sum(counts[: stage + 1]) for stage in range(num_stages)]
    stages = [layers[end - count : end] for count, end in zip(counts, ends, strict=True)]
    return [["tok_embeddings", *stages[0]], *stages[1:-1], [*stages[-1], *head]]


def stages_of_rank(schedule: str, pp: int, num_stages: int, rank: int) -> tuple[int, ...]:
    """Stages that pipeline rank ``rank`` holds, in the order in which data passes them.

    Raises:
        ConfigError: an unknown schedule, or the stages do not go round evenly.
    """
    if num_stages % pp:
        raise ConfigError(f"{num_stages} pipeline stages are not a multiple of p={pp}")
    if not _schedule(schedule).v_shape:
        return tuple(range(rank, num_stages, pp))
    if num_stages != 2 * pp:
        raise ConfigError(f"archon.pp_schedule={schedule} must have {2 * pp} stages for p={pp}, not {num_stages}")
    return (rank, 2 * pp - 1 - rank)


def keep_modules(model: nn.Module, names: Collection[str]) -> nn.Module:
    """A copy of ``model`` with the modules of one stage; layers keep their names, other modules become None.

    Args:
        model: the whole model, best on the meta device, where a copy takes no memory. It stays as it is.
        names: one entry of :func:`split_modules`.
    """
    stage = copy.deepcopy(model)
    for name, child in list(stage.named_children()):
        if name == "layers":
            for layer in [key for key, _ in child.named_children() if f"layers.{key}" not in names]:
                delattr(child, layer)
        elif name not in names:
            setattr(stage, name, None)
    return stage


def _schedule(name: str) -> Schedule:
    if name not in SCHEDULES:
        raise ConfigError(f"archon.pp_schedule={name!r} must be one of {', '.join(SCHEDULES)}")
    return SCHEDULES[name]
