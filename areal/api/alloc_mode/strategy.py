"""Parallel layouts and the allocation of models to devices; the one home of parallel degrees.

In: allocation strings such as ``fsdp:d4t2``. Out: :class:`ModelAllocation` (one model, used for every ``*.backend``
field) or :class:`_AllocationMode` (several, for the ``allocation_mode`` key of SPMD launchers). Called by the trainers'
builder, the engines and the launchers.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from areal.api.alloc_mode.grammar import INFERENCE_BACKENDS, Component, parse
from areal.api.config.scheduling import SchedulingStrategy
from areal.utils.errors import ConfigError


class AllocationValidationError(ConfigError):
    """A well-formed allocation that makes no sense."""


class InvalidAllocationModeError(ConfigError):
    """Attention and feed-forward parts of a hybrid layout need different numbers of devices."""


class ExpertLayoutError(AllocationValidationError, AssertionError):
    """The expert sizes do not divide the number of devices."""


class AllocationType(enum.Enum):
    """What an allocation of several components is for."""

    COLOCATE = 0
    DECOUPLED_TRAIN = 1
    LLM_SERVER_ONLY = 2


@dataclass
class ParallelStrategy:
    """Sizes of one model's parallel layout; experts add no devices.

    Raises:
        ExpertLayoutError: ``pipeline * expert_tensor * expert`` does not divide the number of devices.
        AllocationValidationError: a size below 1.
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_parallel_size: int = 1
    expert_tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        for size in self._sizes():
            if size < 1:
                raise AllocationValidationError(f"{self}: every parallel size must be >= 1")
        if self.expert_parallel_size > 1 and self.world_size % self._expert_cell():
            raise ExpertLayoutError(
                f"{self}: pipeline * expert tensor * expert size = {self._expert_cell()} does not divide "
                f"{self.world_size} devices"
            )

    def _sizes(self) -> tuple[int, ...]:
        return (
            self.tensor_parallel_size,
            self.pipeline_parallel_size,
            self.data_parallel_size,
            self.context_parallel_size,
            self.expert_parallel_size,
            self.expert_tensor_parallel_size,
        )

    def _expert_cell(self) -> int:
        return self.pipeline_parallel_size * self.expert_tensor_parallel_size * self.expert_parallel_size

    @property
    def world_size(self) -> int:
        """Number of devices."""
        return (
            self.data_parallel_size
            * self.context_parallel_size
            * self.tensor_parallel_size
            * self.pipeline_parallel_size
        )

    @property
    def expert_data_parallel_size(self) -> int:
        """How many replicas each expert has."""
        if self.expert_parallel_size == 1:
            return self.data_parallel_size
        return self.world_size // self._expert_cell()

    @property
    def tp_size(self) -> int:
        """Tensor parallel size."""
        return self.tensor_parallel_size

    @property
    def pp_size(self) -> int:
        """Pipeline parallel size."""
        return self.pipeline_parallel_size

    @property
    def dp_size(self) -> int:
        """Data parallel size."""
        return self.data_parallel_size

    @property
    def cp_size(self) -> int:
        """Context parallel size."""
        return self.context_parallel_size

    @property
    def ep_size(self) -> int:
        """Expert parallel size."""
        return self.expert_parallel_size

    @property
    def etp_size(self) -> int:
        """Expert tensor parallel size."""
        return self.expert_tensor_parallel_size

    @property
    def edp_size(self) -> int:
        """Expert data parallel size."""
        return self.expert_data_parallel_size

    def data_rank(self, rank: int) -> int:
        """Which of the ``dp_size`` shares of a batch is that of global ``rank``.

        Every train backend orders ranks with pipeline stages slowest, then data, context and tensor parallel ranks.
        """
        return rank // (self.tensor_parallel_size * self.context_parallel_size) % self.data_parallel_size

    @staticmethod
    def parallelism_eq(this: ParallelStrategy, other: ParallelStrategy) -> bool:
        """Whether all sizes are equal."""
        return this._sizes() == other._sizes()

    def __str__(self) -> str:
        text = f"tp={self.tp_size},pp={self.pp_size},dp={self.dp_size}"
        if self.cp_size > 1:
            text += f",cp={self.cp_size}"
        if self.ep_size > 1:
            text += f",ep={self.ep_size}"
            if self.etp_size > 1:
                text += f",ep_tp={self.etp_size}"
        return f"Parallel({text})"


@dataclass
class FSDPParallelStrategy(ParallelStrategy):
    """Layout of the FSDP engine."""

    __str__ = ParallelStrategy.__str__


@dataclass
class MegatronParallelStrategy(ParallelStrategy):
    """Layout of the Megatron engine.

    Raises:
        AllocationValidationError: virtual pipeline stages without a pipeline.
    """

    virtual_pipeline_parallel_size: int = 1
    use_sequence_parallel: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.virtual_pipeline_parallel_size = max(1, self.virtual_pipeline_parallel_size)
        if self.virtual_pipeline_parallel_size > 1 and self.pipeline_parallel_size == 1:
            raise AllocationValidationError(
                f"virtual_pipeline_parallel_size={self.virtual_pipeline_parallel_size} needs a pipeline size > 1"
            )

    __str__ = ParallelStrategy.__str__

    @staticmethod
    def parallelism_eq(this: ParallelStrategy, other: ParallelStrategy) -> bool:
        """Whether all sizes and the virtual pipeline size are equal."""
        virtual = [getattr(strategy, "virtual_pipeline_parallel_size", 1) for strategy in (this, other)]
        return ParallelStrategy.parallelism_eq(this, other) and virtual[0] == virtual[1]


@dataclass
class ModelAllocation:
    """One model on its devices.

    Raises:
        AllocationValidationError: a size that the backend does not have.
    """

    backend: str
    name: str | None
    parallel: ParallelStrategy
    scheduling_strategy: SchedulingStrategy = field(default_factory=SchedulingStrategy)

    def __post_init__(self) -> None:
        if self.backend == "fsdp" and (self.parallel.pp_size > 1 or self.parallel.ep_size > 1):
            raise AllocationValidationError(
                f"{self}: fsdp has the sizes d, t and c only; use archon or megatron for p and e"
            )
        if self.backend == "native" and self.parallel.world_size != self.parallel.dp_size:
            raise AllocationValidationError(f"{self}: native runs each replica on one device; only d is possible")

    @classmethod
    def from_str(
        cls, spec: str, name: str | None = None, scheduling_strategy: SchedulingStrategy | None = None
    ) -> ModelAllocation:
        """Parse the string of one component, e.g. ``"fsdp:d4"``.

        Args:
            spec: allocation string without ``+``.
            name: role; replaces the one in the string.
            scheduling_strategy: placement; separation when not given.
        Raises:
            ValueError: (as a subclass) syntax, several components, or sizes that make no sense.
        """
        if "+" in spec:
            raise AllocationValidationError(f"{spec!r}: expected one component, so no '+'")
        allocations = _AllocationMode.from_str(spec).allocations
        if len(allocations) != 1:
            raise AllocationValidationError(f"{spec!r}: expected one component, found {len(allocations)}")
        found = allocations[0]
        return cls(found.backend, name or found.name, found.parallel, scheduling_strategy or SchedulingStrategy())

    @property
    def world_size(self) -> int:
        """Devices this model adds; 0 when it shares another role's."""
        return 0 if self.scheduling_strategy.type == "colocation" else self.parallel.world_size

    @property
    def is_inference(self) -> bool:
        """Whether the backend generates (as opposed to trains)."""
        return self.backend in INFERENCE_BACKENDS

    def __str__(self) -> str:
        p = self.parallel
        sizes = (("d", p.dp_size), ("p", p.pp_size), ("t", p.tp_size), ("c", p.cp_size), ("e", p.ep_size))
        dims = "".join(f"{letter}{size}" for letter, size in sizes if size != 1) or "d1"
        return f"{self.backend}{f'({self.name})' if self.name else ''}:{dims}"


@dataclass
class _AllocationMode:
    """Several models on the devices of one run; for the deprecated ``allocation_mode`` key."""

    allocations: list[ModelAllocation] = field(default_factory=list)

    @classmethod
    def from_str(cls, text: str) -> _AllocationMode:
        """Parse a string of one or more components.

        Raises:
            ValueError: (as a subclass) syntax, names, or sizes that make no sense.
        """
        groups = parse(text)
        count = sum(len(group) for group in groups)
        allocations: list[ModelAllocation] = []
        for group in groups:
            allocations.extend(_allocate_group(group, text))
        names = [allocation.name for allocation in allocations if allocation.name]
        if len(set(names)) != len(names):
            raise AllocationValidationError(f"{text!r}: duplicate name; each component needs its own")
        if count > 2 and len(names) != count:
            raise AllocationValidationError(f"{text!r}: with three or more components, all must have names")
        return cls(allocations)

    def __getitem__(self, name: str) -> ModelAllocation:
        for allocation in self.allocations:
            if allocation.name == name:
                return allocation
        raise KeyError(f"no component named {name!r}; there are: {[a.name for a in self.allocations]}")

    def _only(self, what: str, *, inference: bool) -> ModelAllocation | None:
        found = [allocation for allocation in self.allocations if allocation.is_inference == inference]
        if len(found) > 1:
            raise AttributeError(f"ambiguous: {len(found)} {what} components; select one by name")
        return found[0] if found else None

    @property
    def world_size(self) -> int:
        """Devices of all components together."""
        return sum(allocation.world_size for allocation in self.allocations)

    @property
    def gen(self) -> ParallelStrategy | None:
        """Layout of the only inference component."""
        only = self._only("inference", inference=True)
        return only.parallel if only else None

    @property
    def gen_backend(self) -> str | None:
        """Backend of the only inference component."""
        only = self._only("inference", inference=True)
        return only.backend if only else None

    @property
    def train(self) -> ParallelStrategy | None:
        """Layout of the only training component."""
        only = self._only("training", inference=False)
        return only.parallel if only else None

    @property
    def train_backend(self) -> str | None:
        """Backend of the only training component."""
        only = self._only("training", inference=False)
        return only.backend if only else None

    @property
    def gen_instance_size(self) -> int:
        """Devices of one inference server."""
        gen = self.gen
        if gen is None:
            raise AttributeError("there is no inference component")
        return gen.tp_size * gen.pp_size

    @property
    def type_(self) -> AllocationType:
        """What this allocation is for."""
        kinds = [allocation.is_inference for allocation in self.allocations]
        if len(kinds) == 1:
            return AllocationType.LLM_SERVER_ONLY if kinds[0] else AllocationType.COLOCATE
        if sorted(kinds) == [False, True]:
            separate = all(a.scheduling_strategy.type == "separation" for a in self.allocations)
            return AllocationType.DECOUPLED_TRAIN if separate else AllocationType.COLOCATE
        raise AttributeError("the type is defined for one component, or one inference and one training component")


def _allocate_group(group: list[Component], text: str) -> list[ModelAllocation]:
    """Interpret components that share devices: the first owns them."""
    members: list[ModelAllocation] = []
    for component in group:
        parallel = (
            _hybrid(component, text) if component.ffn is not None else ParallelStrategy(**_keywords(component.dims))
        )
        if component.backend is None:
            raise AllocationValidationError(f"{text!r}: backend missing; write for example 'fsdp:d4' instead of 'd4'")
        placement = SchedulingStrategy()
        if members:
            if component.name is None:
                raise AllocationValidationError(f"{text!r}: components after '|' must have names")
            if parallel.world_size != members[0].parallel.world_size:
                raise AllocationValidationError(
                    f"{text!r}: components that share devices need equally many; {members[0].parallel.world_size} and "
                    f"{parallel.world_size} differ"
                )
            placement = SchedulingStrategy(type="colocation", target=members[0].name)
        members.append(ModelAllocation(component.backend, component.name, parallel, placement))
    return members


def _keywords(dims: dict[str, int]) -> dict[str, int]:
    names = {"d": "data", "t": "tensor", "p": "pipeline", "c": "context", "e": "expert"}
    return {f"{names[letter]}_parallel_size": size for letter, size in dims.items()}


def _hybrid(component: Component, text: str) -> ParallelStrategy:
    """Combine the attention and feed-forward parts of a mixture-of-experts layout."""
    attention: dict[str, int] = {letter: component.dims.get(letter, 1) for letter in "dtpc"}
    ffn: dict[str, Any] = component.ffn or {}
    world = attention["d"] * attention["t"] * attention["p"] * attention["c"]
    pipeline, tensor, expert = ffn.get("p", attention["p"]), ffn.get("t", 1), ffn.get("e", 1)
    if pipeline != attention["p"]:
        raise AllocationValidationError(
            f"{text!r}: pipeline sizes of attn ({attention['p']}) and ffn ({pipeline}) must be equal"
        )
    cell = pipeline * tensor * expert
    if "d" not in ffn and world % cell:
        raise AllocationValidationError(
            f"{text!r}: cannot derive the ffn data size, because {cell} does not divide {world}"
        )
    ffn_world = ffn.get("d", world // cell) * cell
    if ffn_world != world:
        raise InvalidAllocationModeError(f"{text!r}: attn needs {world} devices, ffn {ffn_world}; they must be equal")
    return ParallelStrategy(**_keywords(attention), expert_parallel_size=expert, expert_tensor_parallel_size=tensor)
