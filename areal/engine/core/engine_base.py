"""How every train engine starts and ends, and the collaborators that it has in between.

In: a ``TrainEngineConfig``. Out: the base class of the backends, which build a model, its groups and these
collaborators; what can be asked of an engine meanwhile is in ``facade.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from areal.api.engine_api import TrainEngine
from areal.engine.core.distributed import current_device
from areal.engine.core.facade import ComputeFacade, RolloutFacade, ServiceFacade, TopologyFacade, WeightsFacade
from areal.engine.core.failure_capture import watch_for_failures
from areal.engine.core.offload import Offloader
from areal.engine.core.parallel_dims import ParallelGroups
from areal.utils.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from areal.api.alloc_mode import ParallelStrategy
    from areal.api.cli_args import TrainEngineConfig
    from areal.engine.core.engine_checkpoints import EngineCheckpoints
    from areal.engine.core.loop import TrainLoop
    from areal.engine.core.optimizer import ParamShards

__all__ = ["EngineBase"]


class EngineBase(TopologyFacade, ComputeFacade, WeightsFacade, RolloutFacade, ServiceFacade, TrainEngine):
    """A train engine whose model and groups a backend makes.

    Life: ``create_process_group()``, ``initialize()``, any number of calls, ``destroy()``.
    """

    def __init__(self, config: TrainEngineConfig) -> None:
        self.config = config
        self.groups = ParallelGroups()
        self.module: nn.Module | None = None
        self._device = current_device()
        self._shards: ParamShards | None = None
        self._loop: TrainLoop | None = None
        self._checkpoints: EngineCheckpoints | None = None
        self._version = 0

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def initialized(self) -> bool:
        return self._loop is not None

    def _strategy_or_own(self, given: ParallelStrategy | None) -> ParallelStrategy:
        """``given``, or the layout that ``config.backend`` names."""
        if given is not None:
            return given
        from areal.api.alloc_mode import ModelAllocation

        return ModelAllocation.from_str(self.config.backend).parallel

    def _check_start(self, addr: str | None, unknown: Mapping[str, Any]) -> None:
        """Refuse what ``initialize`` of an engine in this process has no use for."""
        if addr is not None or unknown:
            name = type(self).__name__
            raise ConfigError(f"{name}.initialize takes ft_spec only, got addr={addr!r} {sorted(unknown)}")

    def _started(self, zeros: Callable[[], Iterable[Tensor]] = tuple) -> None:
        """The collaborators are there. ``zeros``: see ``Offloader``."""
        self._offloader = Offloader(self._tensors_to_move, self._device, self._drop_gradients, zeros)
        watch_for_failures(self)

    def _release(self) -> None:
        """Let the collaborators and the model go; safe to call twice."""
        self.disconnect_engine()
        for held in (self._checkpoints, self._offloader):
            if held is not None:
                held.close()
        self._loop = self._offloader = self._checkpoints = self._shards = None
        self.module = None
