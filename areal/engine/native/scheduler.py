"""Decides what every step of the native engine computes, and keeps the slots tidy.

One :meth:`Scheduler.step` of the worker thread::

    waiting --admit--> filling --(prompt computed or copied, first token drawn)--> ready --decode--> finished
                          ^                                                           |
                          +------------- weights changed: every cache is void --------+

- *Filling* requests have tokens that are not in the cache yet: a new prompt, or after a weight update everything but
  the newest token. Equal prompts are computed once and copied; what follows a prompt runs as one packed extension. No
  logits outlive a step, so nothing is ever drawn from old weights.
- *Ready* requests occupy slots ``0 .. n_ready - 1`` without holes, so that a decode step reads the cache in place.

Not thread-safe: only the engine's worker thread calls it, inside ``torch.inference_mode``.
"""

from __future__ import annotations

import heapq
import sys
import time
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from areal.api.config.inference import NativeConfig
from areal.engine.native.kv_cache import SlotCache
from areal.engine.native.model import Block, CausalLM, DecodeInput, Span
from areal.engine.native.requests import Sequence
from areal.engine.native.sampling import BatchSampler
from areal.engine.native.slots import SlotTable
from areal.engine.native.weights import Weights
from areal.utils.runs import in_runs

_PATIENCE = 0.25  # decode steps of an idle engine that cost as much as filling a few slots for themselves
_EXTEND_TOKENS = 512  # of one forward pass on a CPU: what a layer writes is still in the cache when it is read
_SPARE_POSITIONS = 64  # room reserved after a prompt, so that the cache does not grow in the first steps


@dataclass
class NativeStats:
    """Counters since the engine was built; ``running`` and ``waiting`` are requests right now."""

    running: int = 0
    waiting: int = 0
    decode_steps: int = 0
    generated_tokens: int = 0
    prefill_tokens: int = 0
    shared_prefill_tokens: int = 0
    recomputed_tokens: int = 0
    max_recomputed_in_step: int = 0
    weight_swaps: int = 0
    finished_requests: int = 0
    aborted_requests: int = 0


@dataclass
class _Prompt:
    """What live requests with one prompt share: the final hidden state ``[hidden]`` and who holds its cache."""

    hidden: Tensor | None = None
    holders: list[Sequence] = field(default_factory=list)
    users: int = 0


class _DecodeState:
    """The ready slots between two changes of them: what is on the device, and drawn tokens not handed out yet.

    Handing every token to its request at once would be most of a small model's step. So rows of tokens are kept until
    one of them may end a request, or somebody wants to know what a request has.
    """

    def __init__(self, sequences: list[Sequence], blocks: list[Block], device: torch.device) -> None:
        lengths = [s.kv_len for s in sequences]
        self.sequences = sequences
        self.step = DecodeInput(
            tokens=torch.tensor([s.tokens[-1] for s in sequences]).to(device),
            positions=torch.tensor(lengths).to(device),
            blocks=blocks,
            ragged=min(lengths) != max(lengths),
        )
        self.sampler = BatchSampler([s.params for s in sequences], [s.output for s in sequences], device)
        self._stop_ids = frozenset[int]().union(*(s.stop_ids for s in sequences))
        # Stop strings and penalties depend on every token drawn so far.
        self._watched = any(s.stop_text is not None or s.params.frequency_penalty for s in sequences)
        self._room = min(s.max_len - len(s.tokens) for s in sequences)
        self._tokens: list[list[int]] = []
        self._logprobs: list[list[float]] = []
        self._versions: list[int] = []

    def advance(self, tokens: Tensor, logprobs: Tensor, version: int) -> bool:
        """Keep one drawn token per request; True when one of them may end its request."""
        self.step.tokens = tokens
        self.step.positions += 1
        for block in self.step.blocks:
            block.length += 1
        self._tokens.append(tokens.tolist())
        self._logprobs.append(logprobs.tolist())
        self._versions.append(version)
        full = len(self._tokens) >= self._room
        return full or self._watched or not self._stop_ids.isdisjoint(self._tokens[-1])

    def hand_out(self) -> list[Sequence]:
        """Give every request its tokens; returns those that have ended."""
        if not self._tokens:
            return []
        count, ended = len(self._tokens), []
        for sequence, tokens, logprobs in zip(
            self.sequences, zip(*self._tokens, strict=True), zip(*self._logprobs, strict=True), strict=True
        ):
            sequence.kv_len += count
            if sequence.take(tokens, logprobs, self._versions):
                ended.append(sequence)
        self._room -= count
        self._tokens, self._logprobs, self._versions = [], [], []
        return ended


class Scheduler:
    """Owns slots, queues and the cache.

    Args:
        config: limits.
        model: forward pass.
        weights: current weights; replaced by :meth:`swap`.
        cache: slot cache.
        stats: counters to update.
    """

    def __init__(
        self, config: NativeConfig, model: CausalLM, weights: Weights, cache: SlotCache, stats: NativeStats
    ) -> None:
        self.config, self.model, self.weights, self.cache, self.stats = config, model, weights, cache, stats
        self.version = 0
        self.admission_held = False
        self._waiting: list[tuple[tuple[int, ...], int, Sequence]] = []
        self._idle = 0  # slots times steps that stood empty since the last admission, while requests waited
        self._filling: list[Sequence] = []
        self._slots = SlotTable(cache)
        self._prompts: dict[Hashable, _Prompt] = {}
        self._state: _DecodeState | None = None

    def add(self, sequence: Sequence) -> None:
        """Queue a request; smaller ``order`` first, then arrival."""
        heapq.heappush(self._waiting, (tuple(sequence.request.order), sequence.arrival, sequence))
        self.stats.waiting = len(self._waiting)

    def has_work(self) -> bool:
        """Whether :meth:`step` would do something."""
        return bool(self._filling or self._slots.n_ready or (self._waiting and not self.admission_held))

    def live(self) -> list[Sequence]:
        """Every request that has not ended, admitted ones first."""
        return self._slots.ready + self._filling + [entry[2] for entry in self._waiting]

    def abort_marked(self) -> None:
        """End the requests whose ``abort`` flag is set."""
        marked = [s for s in self.live() if s.abort]
        if marked:
            self.abort(marked)

    def abort(self, sequences: list[Sequence]) -> None:
        """End requests with what they have."""
        _bring_up_to_date(self._state)
        chosen = {id(s) for s in sequences}
        if any(id(entry[2]) in chosen for entry in self._waiting):
            self._waiting = [entry for entry in self._waiting if id(entry[2]) not in chosen]
            heapq.heapify(self._waiting)
        leaving = [s for s in self._slots.ready + self._filling if id(s) in chosen]
        self._filling = [s for s in self._filling if id(s) not in chosen]
        self._leave(leaving)
        self.stats.aborted_requests += len(sequences)
        for sequence in sequences:
            sequence.future.set_result(sequence.respond("abort"))
        self._count()

    def swap(self, weights: Weights, version: int) -> None:
        """Go on with other weights: running requests stay, all they have cached is void."""
        _bring_up_to_date(self._state)
        self.weights, self.version = weights, version
        self.stats.weight_swaps += 1
        started = [s for s in self._filling if s.slot >= 0]
        pending = [s for s in self._filling if s.slot < 0]
        running = sorted(self._slots.ready + started, key=lambda s: -len(s.tokens))
        self._filling = running + pending
        self._slots.clear()
        for sequence in running:
            if sequence.output:  # all come back: long ones first, which makes few blocks
                self._slots.assign(sequence)
        self._state = None
        for prompt in self._prompts.values():
            prompt.hidden, prompt.holders = None, []

    def _admit(self) -> None:
        """Admit what fits, but not one by one into a full engine: filling a slot costs part of everybody's step."""
        room = self.config.max_running_requests - self._slots.n_ready - len(self._filling)
        self._idle += room
        if self._idle < _PATIENCE * self.config.max_running_requests:
            return
        self._idle = 0
        while room > 0 and self._waiting:
            sequence = heapq.heappop(self._waiting)[2]
            self._prompts.setdefault(self._key(sequence), _Prompt()).users += 1
            self._filling.append(sequence)
            room -= 1

    def _key(self, sequence: Sequence) -> Hashable:
        return sequence.prompt if self.config.share_prefill else id(sequence)

    def _count(self) -> None:
        self.stats.running, self.stats.waiting = self._slots.n_ready + len(self._filling), len(self._waiting)

    def step(self) -> None:
        """Admit, fill within the budgets, decode one token for everything that is ready."""
        self.weights.settle()
        if self._waiting and not self.admission_held:
            self._admit()
        if self._filling:
            self._fill()
        if self._slots.n_ready:
            self._decode()
        self._count()

    def _decode(self) -> None:
        state = self._state
        if state is None:
            state = self._state = _DecodeState(self._slots.ready, self._slots.blocks(), self.model.device)
        self.cache.reserve(0, max(block.length for block in state.step.blocks))
        hidden = self.model.decode(self.weights, state.step, self.cache)
        tokens, logprobs = state.sampler.draw(self.model.logits(self.weights, hidden))
        self.stats.decode_steps += 1
        self.stats.generated_tokens += len(state.sequences)
        if state.advance(tokens, logprobs, self.version) and (ended := state.hand_out()):
            self._finish(ended)

    def _finish(self, ended: list[Sequence]) -> None:
        self._leave(ended)
        self.stats.finished_requests += len(ended)
        for sequence in ended:
            sequence.future.set_result(sequence.respond(sequence.stop_reason()))

    def _fill(self) -> None:
        """Bring filling requests closer to ready: prompts (once each), copies, what follows, first tokens."""
        _bring_up_to_date(self._state)
        budget = Counter(new=self.config.prefill_tokens_per_step, old=self.config.recompute_tokens_per_step)
        before = self.stats.recomputed_tokens
        longest = max(min(len(s.tokens) + _SPARE_POSITIONS, s.max_len) for s in self._filling)
        self.cache.reserve(self._slots.n_ready + len(self._filling), longest)
        self._extend(self._prompt_spans(budget))
        self._copy_prompts()
        self._extend(self._continuation_spans(budget))
        done = self.stats.recomputed_tokens - before
        self.stats.max_recomputed_in_step = max(self.stats.max_recomputed_in_step, done)
        self._draw_first()
        ready = [s for s in self._filling if s.slot >= 0 and s.ready]
        if ready:
            chosen = {id(s) for s in ready}
            self._filling = [s for s in self._filling if id(s) not in chosen]
            for sequence in ready:
                self._slots.promote(sequence)
            self._state = None

    def _prompt_spans(self, budget: Counter[str]) -> list[tuple[Sequence, int]]:
        """(request, tokens) for the first request of every prompt that nobody holds."""
        spans, led = [], set()
        for sequence in self._filling:
            key = self._key(sequence)
            if key in led or self._prompts[key].holders:
                continue
            led.add(key)
            count = _take(budget, sequence, len(sequence.prompt) - sequence.kv_len)
            if count:
                spans.append((sequence, count))
        return spans

    def _continuation_spans(self, budget: Counter[str]) -> list[tuple[Sequence, int]]:
        """(request, tokens) for what was generated before the weights changed, after the prompt is there."""
        spans = []
        for sequence in self._filling:
            missing = len(sequence.tokens) - 1 - sequence.kv_len
            if sequence.kv_len >= len(sequence.prompt) and missing > 0:
                count = _take(budget, sequence, missing)
                if count:
                    spans.append((sequence, count))
        return spans

    def _extend(self, work: list[tuple[Sequence, int]]) -> None:
        """Compute ``count`` more tokens of each request; keep the final hidden state where a prompt is complete."""
        limit = _EXTEND_TOKENS if self.model.device.type == "cpu" else sys.maxsize
        for part in in_runs(work, lambda item: item[1], limit):
            spans, tokens = [], []
            for sequence, count in part:
                self._slots.assign(sequence)
                spans.append(Span(sequence.slot, sequence.kv_len, count))
                tokens += sequence.tokens[sequence.kv_len : sequence.kv_len + count]
            hidden = self.model.extend(self.weights, tokens, spans, self.cache)
            for row, (sequence, count) in enumerate(part):
                sequence.kv_len += count
                if sequence.output:
                    self.stats.recomputed_tokens += count
                else:
                    self.stats.prefill_tokens += count
                if sequence.kv_len == len(sequence.prompt):
                    prompt = self._prompts[self._key(sequence)]
                    prompt.hidden = hidden[row]
                    prompt.holders.append(sequence)

    def _copy_prompts(self) -> None:
        """Give every filling request whose prompt somebody holds a slot with a copy of it, all in one copy."""
        sources, targets, longest = [], [], 0
        for sequence in self._filling:
            prompt = self._prompts[self._key(sequence)]
            if not prompt.holders or sequence.kv_len >= len(sequence.prompt):
                continue
            self._slots.assign(sequence)
            length = len(sequence.prompt)
            sources.append(prompt.holders[0].slot)
            targets.append(sequence.slot)
            longest = max(longest, length)  # what is copied beyond a shorter prompt is overwritten before it is read
            sequence.kv_len = length
            prompt.holders.append(sequence)
            self.stats.shared_prefill_tokens += length
        if targets:
            self.cache.copy_many(sources, targets, longest)

    def _draw_first(self) -> None:
        """Draw the first token of every request whose prompt was just completed; distinct prompts share one head
        product."""
        fresh = [s for s in self._filling if not s.output and s.kv_len == len(s.prompt)]
        if not fresh:
            return
        rows: dict[Hashable, int] = {}
        picks = [rows.setdefault(self._key(s), len(rows)) for s in fresh]
        hidden = torch.stack([self._prompts[key].hidden for key in rows])  # type: ignore[misc]
        logits = self.model.logits(self.weights, hidden)
        if len(rows) != len(fresh):
            logits = logits.index_select(0, torch.tensor(picks).to(logits.device))
        sampler = BatchSampler([s.params for s in fresh], [s.output for s in fresh], self.model.device)
        tokens, logprobs = sampler.draw(logits)
        now, ended = time.monotonic(), []
        for sequence, token, logprob in zip(fresh, tokens.tolist(), logprobs.tolist(), strict=True):
            sequence.first_token = now
            if sequence.take((token,), (logprob,), (self.version,)):
                ended.append(sequence)
        self.stats.generated_tokens += len(fresh)
        if ended:
            chosen = {id(s) for s in ended}
            self._filling = [s for s in self._filling if id(s) not in chosen]
            self._finish(ended)

    def _leave(self, sequences: list[Sequence]) -> None:
        """Forget requests that end and free their slots, last slot first: then a batch that ends together moves
        nothing."""
        for sequence in sorted(sequences, key=lambda s: -s.slot):
            key = self._key(sequence)
            prompt = self._prompts[key]
            prompt.users -= 1
            if prompt.users == 0:
                del self._prompts[key]
            elif sequence in prompt.holders:
                prompt.holders.remove(sequence)
            self._slots.release(sequence)
        self._state = None


def _bring_up_to_date(state: _DecodeState | None) -> None:
    """Give the requests what was drawn for them, before somebody looks at them; none of them can have ended."""
    if state is not None:
        state.hand_out()


def _take(budget: Counter[str], sequence: Sequence, wanted: int) -> int:
    """Draw up to ``wanted`` tokens from the budget that a request falls under."""
    kind = "old" if sequence.output else "new"
    count = min(wanted, budget[kind])
    budget[kind] -= count
    return count
