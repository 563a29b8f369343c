"""All exceptions that AReaL raises on purpose; every layer imports them from here.

Each concrete class derives from ``ArealError`` *and* a standard-library type, so callers may catch either. A message
names where, what was found, what was expected and what to do. Instances carry only their message, hence they pickle
and travel between processes unchanged.

::

    ArealError
    |-- ConfigError               ValueError            a setting is unknown, out of range or contradicts another
    |   |-- UnsupportedFeatureError  NotImplementedError   a valid setting whose feature this build cannot run
    |   `-- VocabularyError     ValueError            two models give token ids different meanings
    |-- DataError                 ValueError            a record, batch or file content is not what it should be
    |   `-- TrajectoryError       ValueError            a workflow returned a malformed trajectory
    |-- WorkflowError             RuntimeError          user code of an episode failed
    |   `-- RewardError           RuntimeError          a reward raised, hung, died or returned no finite number
    |-- CheckpointError           RuntimeError          a checkpoint cannot be written or read
    |   `-- RecoverInfoError      RuntimeError          a recover point is missing, incomplete or of another format
    `-- InfrastructureError       RuntimeError          something between the processes failed
        |-- EngineError           RuntimeError          a train or inference engine failed or is used out of order
        |   `-- EngineStoppedError   RuntimeError       work was sent to an engine that has stopped
        |-- WeightSyncError       RuntimeError          weights did not reach the samplers
        |-- SchedulerError        RuntimeError          a worker could not be started, reached or stopped
        |   `-- WorkerFailedError RuntimeError          a worker process ended on its own
        |-- NetworkError          OSError               no port, address or connection
        |-- NameEntryExistsError  RuntimeError          the key is already in name_resolve
        |-- NameEntryNotFoundError  LookupError         the key is not in name_resolve
        `-- WaitTimeoutError      TimeoutError          a bounded wait reached its limit
            `-- RolloutTimeoutError  TimeoutError       no batch or episode within its limit
"""


class ArealError(Exception):
    """Base of every error raised on purpose by AReaL; catch it to tell our errors from bugs."""


class ConfigError(ArealError, ValueError):
    """A setting is unknown, out of range or contradicts another one."""


class UnsupportedFeatureError(ConfigError, NotImplementedError):
    """A well-formed setting asks for a feature that this build or device cannot run; the message names it."""


class VocabularyError(ConfigError):
    """Two models that read the same token ids give them different meanings."""


class DataError(ArealError, ValueError):
    """A record, batch or file content is not what it should be."""


class TrajectoryError(DataError):
    """A workflow returned a trajectory with wrong keys, dtypes, shapes or values."""


class WorkflowError(ArealError, RuntimeError):
    """User code of an episode failed; the cause is chained."""


class RewardError(WorkflowError):
    """A reward function raised, hung, died, or returned something that is not a finite number."""


class CheckpointError(ArealError, RuntimeError):
    """A checkpoint cannot be written or read."""


class RecoverInfoError(CheckpointError):
    """A recover point is missing, incomplete, damaged or of a format this version does not read."""


class InfrastructureError(ArealError, RuntimeError):
    """Something between the processes failed; rows that were under way are queued again."""


class EngineError(InfrastructureError):
    """A train or inference engine failed or was used out of order."""


class EngineStoppedError(EngineError):
    """Work was sent to an engine that has stopped or was never started."""


class WeightSyncError(InfrastructureError):
    """New weights did not reach the samplers; they still serve the old version."""


class SchedulerError(InfrastructureError):
    """A worker could not be started, reached or stopped."""


class WorkerFailedError(SchedulerError):
    """A worker process ended on its own; the message holds the tail of its log."""


class NetworkError(InfrastructureError, OSError):
    """No usable port, address or connection."""


class NameEntryExistsError(InfrastructureError):
    """The key is already registered in name_resolve and ``replace`` was not asked for."""


class NameEntryNotFoundError(InfrastructureError, LookupError):
    """The key is not registered in name_resolve."""


class WaitTimeoutError(InfrastructureError, TimeoutError):
    """A bounded wait reached its limit; the message says what was waited for and which setting raises the limit."""


class RolloutTimeoutError(WaitTimeoutError):
    """No batch, or no end of an episode, within its limit."""
