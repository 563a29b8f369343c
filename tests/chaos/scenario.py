"""What a seed draws: the sizes of a run, and when which of its processes is struck.

A moment is a phase of a step and a little time: it is taken from the progress of the run, not from the clock.
"""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass

STEPS, BATCH, SAVE_EVERY = 8, 4, 3
PHASES = ("rollout", "recompute_logp", "train_step", "update_weights", "save", "checkpoint_for_recover")
HEARTBEAT_S = 6.0  # a stopped worker counts as dead after this long
LONGEST_DELAY_S = 0.25
LONGEST_REBUILD_S = 5.0
LAST_POINT_AT = 4  # from this step on a recover point is still to come, however rare they are
KINDS = ("rollout", "actor", "controller", "two", "again", "point")


@dataclass(frozen=True)
class Strike:
    """One blow.

    Attributes:
        kind: ``rollout``, ``actor``, ``controller``: a process of these; ``two``: two workers at once; ``again``: a
            worker and, while it is built, the one that takes its place; ``point``: the controller while it writes a
            recover point.
        step, phase: the blow comes when the run is in this phase of this step, or further.
        delay_s: and this much later.
        how: signal that is sent; a stopped controller goes on after ``pause_s``.
        pick: chooses among several, 0 to 1.
        pause_s: for ``again``, from the appearance of the next worker to the second blow.
    """

    kind: str
    step: int
    phase: str
    delay_s: float
    how: signal.Signals
    pick: float
    pause_s: float


@dataclass(frozen=True)
class Scenario:
    """A run and its strikes."""

    eta: int
    replicas: int
    ranks: int
    freq_steps: int
    filtering: bool
    recompute: bool
    at_once: bool
    strikes: tuple[Strike, ...]
    async_save: bool = False

    def overrides(self) -> list[str]:
        """Settings of the run; ``filter`` is the script's own."""
        return [
            *run_settings(self.filtering),
            "recover.mode=auto",
            "recover.retries=6",
            f"recover.freq_steps={self.freq_steps}",
            f"saver.freq_steps={SAVE_EVERY}",
            f"saver.mode={'async' if self.async_save else 'sync'}",
            f"rollout.max_head_offpolicyness={self.eta}",
            f"rollout.backend='native:d{self.replicas}'",
            f"actor.backend='fsdp:d{self.ranks}'",
            f"actor.recompute_logprob={str(self.recompute).lower()}",
            f"scheduler.heartbeat_timeout_s={HEARTBEAT_S}",
        ]


def run_settings(filtering: bool) -> list[str]:
    """Settings that decide which rows are trained."""
    return [
        f"total_train_steps={STEPS}",
        "total_train_epochs=4",
        f"train_dataset.batch_size={BATCH}",
        "gconfig.max_new_tokens=16",
        "rollout.wait_timeout_s=120",
        f"filter={'on' if filtering else 'off'}",
    ]


def draw(seed: int) -> Scenario:
    """The scenario of a seed; every kind of strike has its turn."""
    rng = random.Random(seed)
    kinds = [KINDS[seed % len(KINDS)], *rng.choices(KINDS, k=rng.choice([0, 0, 1, 1, 2]))]
    steps = sorted(rng.sample(range(1, STEPS - 1), len(kinds)))
    steps = [min(step, LAST_POINT_AT) if kind == "point" else step for kind, step in zip(kinds, steps, strict=True)]
    return Scenario(
        eta=rng.choice([0, 1, 2]),
        replicas=rng.choice([1, 2]),
        ranks=rng.choice([1, 1, 2]),
        freq_steps=rng.choice([1, 2, 3]),
        filtering=rng.random() < 0.4,
        recompute=rng.random() < 0.5,
        at_once=rng.random() < 0.5,
        strikes=tuple(_strike(rng, kind, step) for kind, step in zip(kinds, steps, strict=True)),
        async_save=rng.random() < 0.5,
    )


def _strike(rng: random.Random, kind: str, step: int) -> Strike:
    other = signal.SIGINT if kind == "controller" else signal.SIGKILL
    signals = [signal.SIGKILL, other, signal.SIGTERM, signal.SIGSTOP]
    return Strike(
        kind=kind,
        step=step,
        phase="checkpoint_for_recover" if kind == "point" else rng.choice(PHASES),
        delay_s=0.0 if rng.random() < 0.3 else rng.uniform(0, LONGEST_DELAY_S),
        how=signal.SIGKILL if kind == "point" else rng.choice(signals),
        pick=rng.random(),
        pause_s=rng.uniform(0, LONGEST_REBUILD_S),
    )
