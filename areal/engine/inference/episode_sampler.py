"""The ``engine`` that an episode sees: a sampler with the episode's seeds, order and bookkeeping around it.

Used by the embedded inference engine in the trainer's process and by rollout workers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from areal.infra import workflow_context
from areal.utils import perf_tracer

if TYPE_CHECKING:
    from areal.api.io_struct import ModelRequest, ModelResponse


class EpisodeSampler:
    """Generates for workflows.

    Args:
        sampler: offers ``agenerate``, ``get_version`` and, if it can queue without admitting, ``hold_admission`` and
            ``release_admission``.
    """

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """One continuation; seed and admission order come from the running episode unless the request names them."""
        workflow_context.prepare_request(req)
        with perf_tracer.trace_session_phase("generate"):
            response: ModelResponse = await self.sampler.agenerate(req)
        workflow_context.note_response(response)
        return response

    def get_version(self) -> int:
        """Weight version of the next token."""
        return int(self.sampler.get_version())
