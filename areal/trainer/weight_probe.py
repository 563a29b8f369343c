"""Compares log-probs of a short generation on every sampler with the trainer's, after a weight update.

    after_update(v) ─► every sampler draws a few tokens ─► trainer scores them with its own weights ─► compared

It finds what a record of received tensors cannot: bytes that arrived and are not used, such as a repacked copy, a cache
of the old weights, or a server that only says that it loaded them. Built and called by ``areal.trainer.rl_trainer``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from areal.api.alloc_mode import ModelAllocation
from areal.engine.inference.probe import ProbeReply, probe_sampler
from areal.utils import logging, stats_tracker
from areal.utils.errors import WeightSyncError

if TYPE_CHECKING:
    from areal.api.cli_args import PPOConfig
    from areal.trainer.builder import RLParts
    from areal.trainer.ppo.actor import PPOActor
    from areal.trainer.remote_builder import RemoteRLParts

logger = logging.getLogger("WeightProbe")

PROMPT = "The answer to 17 + 25 is"
TOKENS = 8
SGLANG_INTERVAL = 10  # it returns no record of what it received, so it is probed unless the config says otherwise
TOLERANCE_FLOAT32, TOLERANCE_OTHER = 0.01, 0.5  # nats

Generate = Callable[[list[int], int], Mapping[str, ProbeReply]]
Score = Callable[[list[list[int]], int], Sequence[Sequence[float]]]


@dataclass(frozen=True)
class ProbeSettings:
    """When and what to probe.

    Attributes:
        interval: weight updates from one probe to the next; the first update is probed too.
        tolerance: largest difference of a token's log-probs, nats.
        prompt: token ids that every sampler continues.
        tokens: how many it draws.
    """

    interval: int
    tolerance: float
    prompt: list[int]
    tokens: int = TOKENS


class WeightProbe:
    """Checks samplers against the trainer.

    Args:
        settings: see :class:`ProbeSettings`.
        generate: ``(prompt, n)`` to what each sampler in service drew, by name.
        score: ``(sequences, prompt length)`` to the trainer's log-probs of what follows the prompt.
    """

    def __init__(self, settings: ProbeSettings, generate: Generate, score: Score) -> None:
        self.settings = settings
        self._generate, self._score = generate, score
        self._updates = 0

    def after_update(self, version: int) -> None:
        """Count a finished weight update, and probe if it is due; the largest difference goes to the statistics.

        Raises:
            WeightSyncError: a sampler draws with other weights than the trainer's; names it and both log-probs.
        """
        due = self._updates % self.settings.interval == 0
        self._updates += 1
        if due:
            self.check(version)

    def check(self, version: int) -> float:
        """Probe now; returns the largest difference, nats. Errors as :meth:`after_update`."""
        prompt = self.settings.prompt
        replies = self._generate(prompt, self.settings.tokens)
        for name, reply in replies.items():
            _check_reply(name, reply, version)
        if not replies:  # every worker is being replaced, and gets the version in service when it comes back
            logger.warning(f"weights v{version} were not probed: no sampler is in service")
            return 0.0
        scored = self._score([prompt + reply.tokens for reply in replies.values()], len(prompt))
        largest = 0.0
        for (name, reply), trained in zip(replies.items(), scored, strict=True):
            largest = max(largest, self._compare(name, reply, trained, version))
        stats_tracker.get("weight_probe").scalar(abs_diff_max=largest)
        logger.info(f"weights v{version}: log-probs of {len(replies)} samplers are within {largest:.2g} nats of ours")
        return largest

    def _compare(self, name: str, reply: ProbeReply, trained: Sequence[float], version: int) -> float:
        differences = [abs(drawn - own) for drawn, own in zip(reply.logprobs, trained, strict=True)]
        # not "max(...) <= tolerance": NaN must not pass
        bad = [index for index, difference in enumerate(differences) if not difference <= self.settings.tolerance]
        if not bad:
            return max(differences)
        worst = max(bad, key=lambda index: differences[index])
        raise WeightSyncError(
            f"{name} does not sample with the trainer's weights v{version}: it gives token {worst + 1} of "
            f"{len(differences)} of the probe the log-prob {reply.logprobs[worst]:.6g}, the trainer "
            f"{trained[worst]:.6g} (difference {differences[worst]:.4g}, {len(bad)} tokens over "
            f"rollout.weight_probe_tolerance={self.settings.tolerance:g}). Its weights did not change, changed in "
            "part, or are used from a stale copy or cache; if only its arithmetic differs (dtype, attention), raise "
            "rollout.weight_probe_tolerance"
        )


def _check_reply(name: str, reply: ProbeReply, version: int) -> None:
    if not reply.tokens:
        raise WeightSyncError(f"{name} drew no token for the probe of weights v{version}")
    others = sorted({v for v in reply.versions if v != version})
    if others:
        raise WeightSyncError(f"{name} draws with v{others[0]} after the update to v{version}")


def score_tokens(actor: PPOActor, sequences: Sequence[Sequence[int]], prompt_len: int) -> list[list[float]]:
    """The trainer's log-probs of what follows the first ``prompt_len`` tokens; every rank calls with the same."""
    spec = actor.config.mb_spec
    blocks = max(-(-len(sequences) // spec.granularity), spec.n_mbs or 1, spec.n_mbs_divisor or 1)
    rows = blocks * spec.granularity  # repeated, so that the split into micro-batches has what it asks for
    data = [
        {
            "input_ids": torch.tensor([list(ids)]),
            "attention_mask": torch.ones(1, len(ids), dtype=torch.bool),
        }
        for ids in (sequences[row % len(sequences)] for row in range(rows))
    ]
    found = actor.compute_logp(data)
    return [row[0, prompt_len - 1 : -1].tolist() for row in found[: len(sequences)]]


def build_weight_probe(config: PPOConfig, parts: RLParts | RemoteRLParts, tokenizer: Any) -> WeightProbe | None:
    """The probe that ``rollout.weight_probe_interval`` asks for; None: the backend needs none and none is asked for."""
    backend = ModelAllocation.from_str(config.rollout.backend, name="rollout").backend
    interval = config.rollout.weight_probe_interval
    if interval is None and (backend == "sglang" or (config.rollout.use_lora and backend == "vllm")):
        interval = SGLANG_INTERVAL  # of adapters vLLM returns no record either
    if interval is None:
        return None
    prompt = list(tokenizer(PROMPT, add_special_tokens=False)["input_ids"])
    settings = ProbeSettings(interval, probe_tolerance(config, backend), prompt)
    generate, score = _calls(config.actor.temperature, parts)
    return WeightProbe(settings, generate, score)


def probe_tolerance(config: PPOConfig, backend: str) -> float:
    """``rollout.weight_probe_tolerance``; null: tight only where trainer and sampler both compute in float32."""
    if config.rollout.weight_probe_tolerance is not None:
        return config.rollout.weight_probe_tolerance
    sampler = {"vllm": config.vllm.dtype, "sglang": config.sglang.dtype}.get(backend, config.native.dtype)
    exact = {sampler or config.actor.dtype, config.actor.dtype} == {"float32"}
    return TOLERANCE_FLOAT32 if exact else TOLERANCE_OTHER


def _calls(temperature: float, parts: RLParts | RemoteRLParts) -> tuple[Generate, Score]:
    """How to reach samplers and trainer; the temperature is the one at which the trainer scores."""
    from areal.trainer.builder import RLParts

    if isinstance(parts, RLParts):
        sampler, actor = parts.rollout.sampler, parts.actor

        def generate(prompt: list[int], n: int) -> Mapping[str, ProbeReply]:
            with ThreadPoolExecutor(1, thread_name_prefix="weight-probe") as thread:  # this one may have a loop already
                return {"rollout": thread.submit(asyncio.run, probe_sampler(sampler, prompt, n, temperature)).result()}

        return generate, lambda sequences, prompt_len: score_tokens(actor, sequences, prompt_len)
    rollout, ranks = parts.rollout, parts.actor.ranks

    def generate_remote(prompt: list[int], n: int) -> Mapping[str, ProbeReply]:
        return rollout.call(rollout.alive(), "probe", prompt, n, temperature)

    def score_remote(sequences: list[list[int]], prompt_len: int) -> Sequence[Sequence[float]]:
        scored: Sequence[Sequence[float]] = ranks.call("probe_logprobs", sequences, prompt_len)[0]
        return scored

    return generate_remote, score_remote
