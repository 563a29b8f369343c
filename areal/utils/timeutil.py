"""When to do something every n epochs, steps or seconds, and values that change over a run.

``EpochStepTimeFreqCtl`` is asked once per training step by the saver, evaluator and recover handler. Its state is plain
data, restored on resume. Works with and without ``torch.distributed``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from areal.utils.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class FrequencyControl:
    """Fires when enough steps and seconds went by since it last fired.

    Args:
        frequency_seconds: seconds between firings; None does not look at the clock.
        frequency_steps: steps between firings; None does not count. Both given: both must have passed.
        initial_value: make the first check fire, whatever the rest says.
        group: ranks that must agree on the clock; None takes the default group, if there is one.
    """

    def __init__(
        self,
        frequency_seconds: float | None = None,
        frequency_steps: int | None = None,
        initial_value: bool = False,
        group: ProcessGroup | None = None,
    ) -> None:
        for key, value in (("frequency_seconds", frequency_seconds), ("frequency_steps", frequency_steps)):
            if value is not None and value <= 0:
                raise ConfigError(f"{key}={value} must be > 0, or null to switch it off")
        self.frequency_seconds = frequency_seconds
        self.frequency_steps = frequency_steps
        self.initial_value = initial_value
        self.group = group
        self.start_time = self.last_time = time.monotonic()
        self.steps = self.last_steps = 0

    def check(self, steps: int = 1) -> bool:
        """Count ``steps`` and say whether to act now. With a frequency in seconds every rank of the group must call."""
        self.steps += steps
        due = self._due()
        if self.initial_value:
            self.initial_value, due = False, True
        if due:
            self.last_time, self.last_steps = time.monotonic(), self.steps
        return due

    def _due(self) -> bool:
        if self.frequency_seconds is None and self.frequency_steps is None:
            return False
        enough_time = self.frequency_seconds is None or self._elapsed_s() >= self.frequency_seconds
        enough_steps = self.frequency_steps is None or self.steps - self.last_steps >= self.frequency_steps
        return enough_time and enough_steps

    def _elapsed_s(self) -> float:
        """Seconds since the last firing; the longest of all ranks, so that they decide alike."""
        elapsed = time.monotonic() - self.last_time
        import torch

        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return elapsed
        device = "cpu" if "gloo" in str(torch.distributed.get_backend(self.group)) else None
        if device is None:
            device = str(torch.accelerator.current_accelerator() or "cpu")
        value = torch.tensor(elapsed, dtype=torch.float64, device=device)
        torch.distributed.all_reduce(value, op=torch.distributed.ReduceOp.MAX, group=self.group)
        return float(value)

    def state_dict(self) -> dict[str, Any]:
        """Counters as plain numbers; ``frequence_seconds`` is spelled as users' files have it."""
        now = time.monotonic()
        return {
            "frequence_seconds": self.frequency_seconds,
            "frequency_steps": self.frequency_steps,
            "start_time": now - self.start_time,
            "steps": self.steps,
            "last_time": now - self.last_time,
            "last_steps": self.last_steps,
            "interval_steps": self.steps - self.last_steps,
            "interval_seconds": now - self.last_time,
            "initial_value": self.initial_value,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counters. The frequencies stay as configured now, so a resumed run may change them."""
        now = time.monotonic()
        self.steps = int(state["steps"])
        self.last_steps = self.steps - int(state["interval_steps"])
        self.last_time = now - float(state["interval_seconds"])
        self.initial_value = bool(state["initial_value"])


class EpochStepTimeFreqCtl:
    """Three independent controls; fires when any of them does.

    Args:
        freq_epoch: epochs between firings, or None.
        freq_step: steps between firings, or None.
        freq_sec: seconds between firings, or None.
        initial_epoch_value: make the first check fire.
        group: ranks that must agree on the clock.
    """

    def __init__(
        self,
        freq_epoch: int | None,
        freq_step: int | None,
        freq_sec: float | None,
        initial_epoch_value: bool = False,
        group: ProcessGroup | None = None,
    ) -> None:
        self.epoch_ctl = FrequencyControl(frequency_steps=freq_epoch, initial_value=initial_epoch_value)
        self.step_ctl = FrequencyControl(frequency_steps=freq_step)
        self.time_ctl = FrequencyControl(frequency_seconds=freq_sec, group=group)

    def check(self, epochs: int, steps: int) -> bool:
        """Count ``epochs`` ended and ``steps`` done since the last call; every control is asked (no short circuit)."""
        fired = [self.epoch_ctl.check(epochs), self.step_ctl.check(steps), self.time_ctl.check(steps)]
        return any(fired)

    def state_dict(self) -> dict[str, Any]:
        """State of the three controls."""
        return {
            "epoch": self.epoch_ctl.state_dict(),
            "step": self.step_ctl.state_dict(),
            "time": self.time_ctl.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the three controls."""
        self.epoch_ctl.load_state_dict(state["epoch"])
        self.step_ctl.load_state_dict(state["step"])
        self.time_ctl.load_state_dict(state["time"])


class StepTracker:
    """A frequency that is asked at most once per global step, however many engines act on its answer.

    Also notices steps it was never asked about (a recover point written before this step's check), see ``catch_up``.
    """

    def __init__(self, control: EpochStepTimeFreqCtl) -> None:
        self.control = control
        self.last_step = -1
        self._decision = False

    def due(self, step: int, global_step: int, steps_per_epoch: int) -> bool:
        """Whether to act at ``global_step``; the same answer for every call within it.

        Args:
            step: step within its epoch, from 0.
            global_step: step of the run, from 0.
            steps_per_epoch: the epoch ends when ``step`` is one less.
        """
        if global_step != self.last_step:
            self.last_step = global_step
            self._decision = self.control.check(epochs=int(step == steps_per_epoch - 1), steps=1)
        return self._decision

    def state_dict(self) -> dict[str, Any]:
        """The control's state and the last step it was asked about."""
        return {"freq_ctl": self.control.state_dict(), "last_step": self.last_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore both."""
        self.control.load_state_dict(state["freq_ctl"])
        self.last_step = int(state["last_step"])
        self._decision = False


# --- values over a run -------------------------------------------------------------------------------------------
class Scheduler(Protocol):
    """A value for each step."""

    total_iters: int

    def get(self, step: int) -> float:
        """Value at ``step``, clamped to [0, total_iters]."""
        ...


class _Decay:
    """Goes from ``init_value`` to ``final_value`` in ``total_iters`` steps and stays there."""

    def __init__(self, init_value: float, total_iters: int, final_value: float = 0.0) -> None:
        if total_iters <= 0:
            raise ConfigError(f"total_iters={total_iters} must be > 0")
        self.init_value, self.total_iters, self.final_value = init_value, total_iters, final_value

    def _progress(self, step: int) -> float:
        return min(max(step, 0), self.total_iters) / self.total_iters


class ConstantScheduler(_Decay):
    """``init_value`` at every step."""

    def get(self, step: int) -> float:
        """Value at ``step``."""
        return self.init_value


class LinearScheduler(_Decay):
    """A straight line."""

    def get(self, step: int) -> float:
        """Value at ``step``."""
        return self.init_value + (self.final_value - self.init_value) * self._progress(step)


class ExponentialScheduler(_Decay):
    """A constant ratio per step; both ends must be > 0."""

    def __init__(self, init_value: float, total_iters: int, final_value: float) -> None:
        super().__init__(init_value, total_iters, final_value)
        if init_value <= 0 or final_value <= 0:
            raise ConfigError(f"exponential decay from {init_value} to {final_value}: both must be > 0")

    def get(self, step: int) -> float:
        """Value at ``step``."""
        return float(self.init_value * (self.final_value / self.init_value) ** self._progress(step))


class CosineDecayScheduler(_Decay):
    """Half a cosine."""

    def get(self, step: int) -> float:
        """Value at ``step``."""
        share = (1 + math.cos(math.pi * self._progress(step))) / 2
        return self.final_value + (self.init_value - self.final_value) * share


class ChainedScheduler:
    """One scheduler after the other, each counting from its own start."""

    def __init__(self, schedulers: Sequence[Scheduler]) -> None:
        if not schedulers:
            raise ConfigError("ChainedScheduler needs at least one scheduler")
        self.schedulers = list(schedulers)
        self.total_iters = sum(s.total_iters for s in schedulers)

    def get(self, step: int) -> float:
        """Value at ``step``."""
        for scheduler in self.schedulers[:-1]:
            if step < scheduler.total_iters:
                return scheduler.get(step)
            step -= scheduler.total_iters
        return self.schedulers[-1].get(step)
