"""A short generation whose log-probs tell whether a sampler holds the weights it should.

Run by rollout workers, or on the embedded sampler, for ``areal.trainer.weight_probe``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from areal.api.config.rollout import GenerationHyperparameters
from areal.api.io_struct import ModelRequest


@dataclass
class ProbeReply:
    """What a sampler drew: equally long lists of tokens, their log-probs, and the versions that drew them."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]


async def probe_sampler(sampler: Any, prompt_ids: Sequence[int], n: int, temperature: float) -> ProbeReply:
    """Draw ``n`` tokens after ``prompt_ids`` from the whole distribution; end-of-text does not end them."""
    gconfig = GenerationHyperparameters(max_new_tokens=n, temperature=temperature, ignore_eos=True)
    seed = int(sampler.get_version())  # other tokens for every version
    response = await sampler.agenerate(ModelRequest(input_ids=list(prompt_ids), gconfig=gconfig, seed=seed))
    return ProbeReply(
        list(response.output_tokens), list(response.output_logprobs), [int(v) for v in response.output_versions]
    )
