"""What can go wrong between a controller and its workers. All are ``SchedulerError`` and a standard-library type.

::

    SchedulerError                RuntimeError     a worker could not be started, reached or stopped
    |-- WorkerFailedError         RuntimeError     a worker ended or stopped answering (areal.utils.errors)
    |-- WorkerCreationError       RuntimeError     a job that cannot be started as it is
    |   |-- WorkerConfigurationError  ValueError   ... because of one of its settings
    |   |-- GPUAllocationError    RuntimeError     ... because there are not enough devices
    |   `-- PortAllocationError   RuntimeError     ... because there are not enough ports
    |-- WorkerNotFoundError       LookupError      no such role or worker
    |-- WorkerTimeoutError        TimeoutError     a worker was not ready within its limit
    |-- EngineCreationError       RuntimeError     the constructor of a hosted object failed
    |   `-- EngineImportError     ImportError      its class cannot be imported on the worker
    |-- EngineCallError           RuntimeError     a remote method raised a type that is not known here
    `-- RPCConnectionError        OSError          no connection to a worker, or it broke
"""

from __future__ import annotations

from areal.infra.rpc.errors import EngineCallError, RPCConnectionError
from areal.utils.errors import SchedulerError, WaitTimeoutError, WorkerFailedError

__all__ = [
    "EngineCallError",
    "EngineCreationError",
    "EngineImportError",
    "GPUAllocationError",
    "PortAllocationError",
    "RPCConnectionError",
    "SchedulerError",
    "WorkerConfigurationError",
    "WorkerCreationError",
    "WorkerFailedError",
    "WorkerNotFoundError",
    "WorkerTimeoutError",
]


class WorkerCreationError(SchedulerError):
    """A job that cannot be started as it is; nothing was started."""


class WorkerConfigurationError(WorkerCreationError, ValueError):
    """A setting of a job is missing or contradicts another one."""


class GPUAllocationError(WorkerCreationError):
    """Not enough devices for a job; nothing was started."""


class PortAllocationError(WorkerCreationError):
    """Not enough free ports for a worker."""


class WorkerNotFoundError(SchedulerError, LookupError):
    """No such role or worker."""


class WorkerTimeoutError(SchedulerError, WaitTimeoutError):
    """A worker was not ready within its limit; the message says what it is waiting for."""


class EngineCreationError(SchedulerError):
    """The constructor of a hosted object failed; the cause is chained."""


class EngineImportError(EngineCreationError, ImportError):
    """The class of a hosted object cannot be imported on the worker."""
