"""Roles whose models leave the device's memory while the others work (``<role>.offload`` with ``enable_offload``).

In: the engines of a run by role. Out: each of them resident when it is needed. Called by the RL trainer; engines come
back by themselves when they compute, so forgetting :meth:`Turns.bring` costs a timing key and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal.trainer.phases import PhaseClock

__all__ = ["Turns"]


class Turns:
    """Brings roles in and sends them out.

    Args:
        config: of the run; says which roles leave.
        engines: of the roles that exist, by role.
        phase: times ``<role>_onload`` and ``<role>_offload``.
    """

    def __init__(self, config: Any, engines: Mapping[str, Any], phase: PhaseClock) -> None:
        self._phase = phase
        self._leaving = {role: engine for role, engine in engines.items() if getattr(config, role).offload}

    def bring(self, role: str) -> None:
        """Have the role's model in the device's memory."""
        if role in self._leaving:
            with self._phase(f"{role}_onload"):
                self._leaving[role].onload()

    def send(self, role: str) -> None:
        """Free the device's memory of the role's model until it is needed again."""
        if role in self._leaving:
            with self._phase(f"{role}_offload"):
                self._leaving[role].offload()

    def send_all(self) -> None:
        """Free the memory of every role that leaves: before the first step."""
        for engine in self._leaving.values():
            engine.offload()
