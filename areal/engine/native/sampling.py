"""Drawing tokens: seeds to uniform numbers, logits to tokens and log-probs.

In: float32 logits ``[B, V]`` and the sampling settings of ``B`` requests. Out: a token and a log-prob per row. Called
by ``scheduler``.

- A token depends on its distribution and on one number in [0, 1) that is a hash of (seed, how many tokens were drawn
  before). Who else is in the batch changes nothing.
- Drawing inverts the cumulative distribution: one pass over the vocabulary in blocks, then one block per row.
- The reported log-prob is the model's own: log-softmax of ``logits / temperature`` over the whole vocabulary.
  Truncation (top-k, then top-p on what is left), penalties and ``min_new_tokens`` change what is drawn, not what is
  reported, so it is what a trainer computes for the same token. Greedy requests report at temperature 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_BLOCK = 256  # vocabulary entries per block of the cumulative search
_SMALL_VOCAB = 1024  # below: one cumulative sum over the whole vocabulary
_FIRST_TOP = 1024  # candidates of a top-p search before a full sort


@dataclass(frozen=True)
class SamplingParams:
    """How one request draws. ``top_k`` 0 means off; ``banned`` ids may not be drawn for the first
    ``min_new_tokens``."""

    seed: int
    greedy: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    frequency_penalty: float = 0.0
    min_new_tokens: int = 0
    banned: tuple[int, ...] = ()

    @property
    def truncated(self) -> bool:
        """Whether top-k or top-p cuts the distribution."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0)


def uniform(seeds: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Numbers in [0, 1), one per row, from uint64 seeds and int64 draw counters; float64 with 53 random bits.

    Source: the splitmix64 output function (Steele, Lea, Flood 2014), applied to the counter, mixed with the seed, and
    again.
    """
    mixed = _mix(draws.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x632BE59BD9B4E019))
    numbers: np.ndarray = (_mix(_mix(seeds) ^ mixed) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = z ^ (z >> np.uint64(31))
    return mixed


class BatchSampler:
    """Draws for a fixed list of requests; rebuilt when the list changes.

    Args:
        params: one per row.
        drawn: tokens each row has drawn so far; kept by reference (the scheduler appends), read for penalties.
        device: where the logits lie.
    """

    def __init__(self, params: Sequence[SamplingParams], drawn: Sequence[Sequence[int]], device: torch.device) -> None:
        self.device = device
        self._drawn = drawn
        self._draws = np.array([len(tokens) for tokens in drawn], dtype=np.int64)
        self._seeds = np.array([p.seed & 0xFFFFFFFFFFFFFFFF for p in params], dtype=np.uint64)
        greedy = [p.greedy for p in params]
        self._all_greedy = all(greedy)
        self._greedy = self._tensor(greedy, torch.bool) if any(greedy) and not self._all_greedy else None
        heat = [1.0 if p.greedy else p.temperature for p in params]
        self._temperature = self._tensor(heat, torch.float32)[:, None] if any(t != 1.0 for t in heat) else None
        cut = [i for i, p in enumerate(params) if p.truncated]
        self._cut = _Truncation(cut, [params[i] for i in cut], device) if cut else None
        self._penalised = [(i, p.frequency_penalty) for i, p in enumerate(params) if p.frequency_penalty]
        self._counts: Tensor | None = None
        self._guarded = [(i, p) for i, p in enumerate(params) if p.min_new_tokens and p.banned]

    def _tensor(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(self.device)

    def draw(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """One token per row: (int64 ``[B]``, float32 log-prob ``[B]``). May overwrite ``logits``."""
        if self._temperature is not None:
            logits = logits / self._temperature
        probs = torch.softmax(logits, -1)
        changed = self._changed(logits)
        tokens = self._pick(probs if changed is None else torch.softmax(changed, -1))
        self._draws += 1
        picked = tokens[:, None]
        logprobs = probs.gather(-1, picked).log()
        if changed is not None:  # a forced token may have a probability that underflows
            logprobs = logits.gather(-1, picked) - torch.logsumexp(logits, -1, keepdim=True)
        return tokens, logprobs[:, 0]

    def _pick(self, probs: Tensor) -> Tensor:
        if self._all_greedy:
            return probs.argmax(-1)
        numbers = torch.from_numpy(uniform(self._seeds, self._draws)).to(self.device)
        tokens = invert_cdf(probs, numbers)
        if self._greedy is not None:
            tokens = torch.where(self._greedy, probs.argmax(-1), tokens)
        if self._cut is not None:
            rows = self._cut.rows
            tokens[rows] = self._cut.draw(probs[rows], numbers[rows])
        return tokens

    def _changed(self, logits: Tensor) -> Tensor | None:
        """Scaled logits after penalties and bans, or None when no row has any."""
        bans = [(i, p) for i, p in self._guarded if self._draws[i] < p.min_new_tokens]
        if not bans and not self._penalised:
            return None
        logits = logits.clone()
        if self._penalised:
            self._penalise(logits)
        for row, params in bans:
            logits[row, list(params.banned)] = float("-inf")
        return logits

    def _penalise(self, logits: Tensor) -> None:
        """Subtract ``penalty / temperature * count`` for every token drawn before: the penalty acts before the
        temperature."""
        rows = [row for row, _ in self._penalised]
        if self._counts is None:
            self._counts = torch.zeros((len(rows), logits.shape[1]), device=self.device)
            for at, row in enumerate(rows):
                past = torch.tensor(list(self._drawn[row]), dtype=torch.int64).to(self.device)
                self._counts[at].index_add_(0, past, torch.ones_like(past, dtype=torch.float32))
        else:
            latest = torch.tensor([self._drawn[row][-1] for row in rows]).to(self.device)
            self._counts[torch.arange(len(rows), device=self.device), latest] += 1
        penalties = self._tensor([penalty for _, penalty in self._penalised], torch.float32)[:, None]
        if self._temperature is not None:
            penalties = penalties / self._temperature[rows]
        logits[rows] -= penalties * self._counts


class _Truncation:
    """Top-k, then top-p within what is left, for some rows of a batch."""

    def __init__(self, rows: list[int], params: list[SamplingParams], device: torch.device) -> None:
        self.rows = torch.tensor(rows).to(device)
        self._top_k = [p.top_k for p in params]
        self._top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64).to(device)[:, None]

    def draw(self, probs: Tensor, numbers: Tensor) -> Tensor:
        """``probs`` ``[r, V]`` and numbers in [0, 1) ``[r]`` -> tokens ``[r]``."""
        vocab = probs.shape[1]
        limits = [k or vocab for k in self._top_k]
        widest = min(max(limits), vocab)
        width = min(widest, _FIRST_TOP)
        while True:
            best, ids = probs.topk(width, -1)
            mass = best.double()
            limit = torch.tensor(limits, device=probs.device)[:, None]
            mass = torch.where(torch.arange(width, device=probs.device) < limit, mass, 0.0)
            before = mass.cumsum(-1) - mass
            # a row cut by top-k is renormalised over its candidates; else the whole distribution sums to one
            total = torch.where(limit <= width, mass.sum(-1, keepdim=True), 1.0)
            kept = torch.where(before < self._top_p * total, mass, 0.0)
            complete = (limit <= width) | (mass.sum(-1, keepdim=True) >= self._top_p)
            if width == widest or bool(complete.all()):
                return ids.gather(-1, _search(kept.cumsum(-1), numbers)[:, None])[:, 0]
            width = widest


def invert_cdf(probs: Tensor, numbers: Tensor) -> Tensor:
    """First token whose cumulative probability exceeds ``number * total``; never one of probability 0.

    Args:
        probs: ``[B, V]`` float32, non-negative, rows of any positive sum.
        numbers: ``[B]`` float64 in [0, 1).
    Returns: ``[B]`` int64.
    """
    vocab = probs.shape[1]
    if vocab <= _SMALL_VOCAB:
        return _search(probs.double().cumsum(-1), numbers)
    whole = vocab // _BLOCK * _BLOCK
    sums = probs[:, :whole].view(-1, whole // _BLOCK, _BLOCK).sum(-1)
    if whole < vocab:
        sums = torch.cat([sums, probs[:, whole:].sum(-1, keepdim=True)], -1)
    ends = sums.double().cumsum(-1)
    block = _search(ends, numbers)[:, None]
    size = sums.gather(-1, block).double()
    start = ends.gather(-1, block) - size
    share = ((numbers[:, None] * ends[:, -1:] - start) / size).clamp(0.0, 1.0)
    columns = block * _BLOCK + torch.arange(_BLOCK, device=probs.device)
    inside = probs.gather(-1, columns.clamp(max=vocab - 1)).double()
    inside = torch.where(columns < vocab, inside, 0.0)
    return block[:, 0] * _BLOCK + _search(inside.cumsum(-1), share[:, 0])


def _search(ends: Tensor, numbers: Tensor) -> Tensor:
    """Index of the first entry of each row's running sum above ``number * total``."""
    total = ends[:, -1:]
    target = torch.minimum(numbers[:, None] * total, total * (1.0 - 2.0**-52))
    return torch.searchsorted(ends, target, right=True)[:, 0]
