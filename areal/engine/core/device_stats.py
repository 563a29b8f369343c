"""Memory figures of this process's device; read by ``get_device_stats``."""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch

from areal.utils import logging
from areal.utils.errors import ConfigError

logger = logging.getLogger("DeviceStats")
_UNITS = {"GB": 1024**3, "MB": 1024**2, "KB": 1024}


@dataclass
class DeviceRuntimeInfo:
    """Memory in ``unit``: allocated and reserved by this process, used and total of the device (the host on a CPU)."""

    mem_allocated: float
    mem_reserved: float
    mem_used: float
    mem_total: float
    unit: str = "GB"

    @classmethod
    def get_current(cls, unit: str = "GB") -> DeviceRuntimeInfo:
        """Figures of now; ``unit`` is GB, MB or KB (powers of 1024)."""
        if unit not in _UNITS:
            raise ConfigError(f"unit={unit!r} is not valid; allowed: {', '.join(_UNITS)}")
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            values = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), total - free, total)
        else:
            host, own = psutil.virtual_memory(), psutil.Process().memory_info()
            values = (own.rss, own.rss, host.total - host.available, host.total)
        allocated, reserved, used, whole = (value / _UNITS[unit] for value in values)
        return cls(allocated, reserved, used, whole, unit)

    def log(self, head: str = "", rank: int = 0, precision: int = 2) -> None:
        """One log line, on rank 0."""
        if rank == 0:
            figures = ", ".join(
                f"{name} {getattr(self, 'mem_' + name):.{precision}f} {self.unit}"
                for name in ("allocated", "reserved", "used", "total")
            )
            logger.info(f"{head + ': ' if head else ''}memory {figures}")
