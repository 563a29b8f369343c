"""Log-probs and entropy from hidden states and the output head, in row chunks, so that full logits never exist.

In: hidden states ``[N, H]``, head weight ``[V, H]``, labels ``[N]``. Out: log-prob of each label and entropy of each
distribution, float32 ``[N]``, differentiable in hidden states and weight. Called by ``engine/core/loop.py``.

Under tensor parallelism the weight is a vocabulary shard ``[V / t, H]``: the largest logit, the sum of exponentials,
the chosen logit and the entropy's sum are reduced over the ranks, twice per chunk. Backward needs no reduction: each
rank has the gradient of its own logits, and its part of the hidden states' gradient (``gather_rows`` adds the parts).

Backward recomputes each chunk's logits. For one row with z = logits / temperature, p = softmax(z), H = entropy:
d logp[y] / dz = onehot(y) - p and dH / dz = -p (log p + H).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from areal.engine.core.distributed import gather_rows, group_rank

CHUNK_ROWS = 1024
CHUNK_ELEMENTS_CPU, MIN_ROWS_CPU = 1 << 23, 128  # 32 MiB of float32 logits; fewer rows read the weight too often
KEEP_ELEMENTS = 1 << 22  # logits this small are kept for backward instead of being computed twice


@dataclass
class TokenOutput:
    """Per-token results of a micro-batch, float32 ``[T]``; 0 where nothing was computed."""

    logprobs: Tensor
    entropy: Tensor
    vocab_min_logits: Tensor
    vocab_max_logits: Tensor

    def select(self, index: Tensor) -> TokenOutput:
        """The results of other positions, ``[N]``, for each of which ``index`` names the one that has them."""
        columns = (self.logprobs, self.entropy, self.vocab_min_logits, self.vocab_max_logits)
        return TokenOutput(*(column.index_select(0, index) for column in columns))

    def gather(self, group: dist.ProcessGroup, n_tokens: int) -> TokenOutput:
        """Join the slices of the ranks of ``group`` and drop the padding behind ``n_tokens``; one collective."""
        columns = [self.logprobs, self.entropy, self.vocab_min_logits, self.vocab_max_logits]
        whole = gather_rows(torch.stack(columns, dim=1), group)[:n_tokens]
        logprobs, entropy, low, high = whole.unbind(1)
        return TokenOutput(logprobs, entropy, low.detach(), high.detach())


def token_output(  # noqa: PLR0913 - the pieces of one formula
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    rows: Tensor | None,
    temperature: float,
    source: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> TokenOutput:
    """Log-probs, entropy and logit range of ``labels`` at the selected rows.

    Args:
        hidden: ``[T, H]``, or ``[U, H]`` with ``source``.
        head: ``[V, H]``, or this rank's equal share of its rows with ``group``.
        labels: int64 ``[T]``, the token that each position predicts.
        rows: int64 ``[N]`` positions to compute; None: all. The other positions get 0 and no gradient.
        temperature: logits are divided by it, > 0.
        source: int64 ``[T]``, row of ``hidden`` of each position; None when they are one to one.
        group: ranks that hold the shards of ``head`` in rank order; every one must call with equal other arguments.
    """
    n_tokens = labels.shape[0]
    if rows is not None:
        labels = labels.index_select(0, rows)
        hidden = hidden.index_select(0, rows if source is None else source.index_select(0, rows))
    elif source is not None:
        hidden = hidden.index_select(0, source)
    logprobs, entropy, low, high = _ChunkedHead.apply(
        hidden, head, _Labels(labels, head.shape[0], group), 1.0 / temperature
    )
    if rows is not None:
        logprobs, entropy, low, high = (
            torch.zeros(n_tokens, dtype=x.dtype, device=x.device).index_copy(0, rows, x)
            for x in (logprobs, entropy, low, high)
        )
    return TokenOutput(logprobs, entropy, low, high)


class _Labels:
    """Labels as rows of this rank's shard of the head."""

    def __init__(self, labels: Tensor, shard_size: int, group: dist.ProcessGroup | None) -> None:
        self.group, self.index = group, labels
        self.inside: Tensor | None = None
        if group is not None:
            local = labels - group_rank(group) * shard_size
            self.inside = (local >= 0) & (local < shard_size)
            self.index = local.clamp(0, shard_size - 1)

    def pick(self, z: Tensor, rows: slice) -> Tensor:
        """The label's entry of each row of ``z [C, V]``; 0 where another rank holds it."""
        chosen = z.gather(1, self.index[rows, None]).squeeze(1)
        return chosen if self.inside is None else chosen.masked_fill_(~self.inside[rows], 0)

    def add(self, z: Tensor, rows: slice, value: Tensor) -> Tensor:
        """Add ``value [C]`` to the label's entry of each row, in place, where this rank holds it."""
        if self.inside is not None:
            value = value.masked_fill(~self.inside[rows], 0)
        return z.scatter_add_(1, self.index[rows, None], value[:, None])

    def extremes(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Smallest and largest logit of each row over all shards."""
        low, high = z.amin(-1), z.amax(-1)
        if self.group is None:
            return low, high
        pair = torch.stack((-low, high))
        dist.all_reduce(pair, op=dist.ReduceOp.MAX, group=self.group)
        return -pair[0], pair[1]

    def summed(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Each value summed over all shards."""
        if self.group is None:
            return values
        stacked = torch.stack(values)
        dist.all_reduce(stacked, op=dist.ReduceOp.SUM, group=self.group)
        return stacked.unbind(0)


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: _Labels, scale: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        n_rows = hidden.shape[0]
        logprobs, log_sum, entropy, low, high = hidden.new_zeros((5, n_rows), dtype=torch.float32).unbind(0)
        needs_grad = any(ctx.needs_input_grad[:2])
        keep = needs_grad and n_rows * weight.shape[0] <= KEEP_ELEMENTS
        buffer = _ChunkBuffer(hidden, weight, keep=keep)
        kept = None
        for start, stop in buffer.chunks():
            z = buffer.logits(start, stop, scale)
            rows = slice(start, stop)
            low[rows], high[rows] = labels.extremes(z)
            top = high[rows]
            # From here on logits are relative to the row's largest one. H = log sum exp(z) - E_p[z].
            z.sub_(top[:, None])
            chosen = labels.pick(z, rows)
            p = torch.exp(z, out=buffer.scratch(z))
            total, chosen, weighted = labels.summed(p.sum(-1), chosen, z.mul_(p).sum(-1))
            log_total = total.log()
            log_sum[rows] = top + log_total
            logprobs[rows] = chosen - log_total
            entropy[rows] = log_total - weighted / total
            if keep:
                kept = p.div_(total[:, None])
        ctx.save_for_backward(hidden, weight, log_sum, entropy)
        ctx.labels, ctx.scale = labels, scale
        ctx.kept = kept  # the first backward pass overwrites it; zero-bubble pipelines run a second one
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(low, high)
        return logprobs, entropy, low, high

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad_logprobs, grad_entropy = grads[:2]
        hidden, weight, log_sum, entropy = ctx.saved_tensors
        kept, ctx.kept = ctx.kept, None
        grad_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        if grad_logprobs is None and grad_entropy is None:
            return grad_hidden, _as(grad_weight, weight), None, None
        buffer = _ChunkBuffer(hidden, weight, keep=kept is not None)
        for start, stop in buffer.chunks():
            if kept is not None:
                p = kept
            else:
                p = buffer.logits(start, stop, ctx.scale).sub_(log_sum[start:stop, None]).exp_()
            rows = slice(start, stop)
            dz = _logit_gradient(p, _rows(grad_logprobs, rows), _rows(grad_entropy, rows), entropy[rows])
            if grad_logprobs is not None:
                ctx.labels.add(dz, rows, grad_logprobs[rows])
            dz = dz.mul_(ctx.scale).to(hidden.dtype) if ctx.scale != 1.0 else dz.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(dz, weight, out=grad_hidden[start:stop])
            if grad_weight is not None:
                _accumulate(grad_weight, dz, hidden[start:stop])
        return grad_hidden, _as(grad_weight, weight), None, None


class _ChunkBuffer:
    """Computes logits chunk by chunk into reused memory: fresh pages cost more than the arithmetic on them."""

    def __init__(self, hidden: Tensor, weight: Tensor, *, keep: bool) -> None:
        self.hidden, self.weight_t, self.keep = hidden, weight.t(), keep
        rows = CHUNK_ROWS
        if hidden.device.type == "cpu":
            rows = min(CHUNK_ROWS, max(MIN_ROWS_CPU, CHUNK_ELEMENTS_CPU // weight.shape[0]))
        n_chunks = 1 if keep else -(-hidden.shape[0] // rows)
        self.rows = -(-hidden.shape[0] // max(1, n_chunks))
        self._logits: Tensor | None = None
        self._scratch: Tensor | None = None

    def chunks(self) -> list[tuple[int, int]]:
        total = self.hidden.shape[0]
        return [(start, min(total, start + self.rows)) for start in range(0, total, self.rows)] if total else []

    def logits(self, start: int, stop: int, scale: float) -> Tensor:
        """Float32 ``[stop - start, V]``; valid until the next call."""
        rows = self.hidden[start:stop]
        if rows.dtype == torch.float32:
            if self._logits is None:
                self._logits = rows.new_empty((self.rows, self.weight_t.shape[1]))
            z = torch.mm(rows, self.weight_t, out=self._logits[: stop - start])
        else:
            z = torch.mm(rows, self.weight_t).float()
        return z.mul_(scale) if scale != 1.0 else z

    def scratch(self, like: Tensor) -> Tensor:
        """Uninitialised float32 memory of the shape of ``like``; valid until the next call."""
        if self._scratch is None:
            self._scratch = like.new_empty((self.rows, like.shape[1]))
        return self._scratch[: like.shape[0]]


def _logit_gradient(p: Tensor, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, entropy: Tensor) -> Tensor:
    """Gradient of a chunk's scaled logits ``[C, V]`` but for the label's own; overwrites the probabilities ``p``."""
    if grad_entropy is None:
        assert grad_logprobs is not None
        return p.mul_(-grad_logprobs[:, None])
    # clamp: p underflows to 0 for hopeless tokens, and p log p must be 0 there.
    log_p = p.clamp_min(torch.finfo(p.dtype).tiny).log_()
    dz = log_p.add_(entropy[:, None]).mul_(p).mul_(-grad_entropy[:, None])
    return dz if grad_logprobs is None else dz.sub_(p.mul_(grad_logprobs[:, None]))


def _rows(x: Tensor | None, rows: slice) -> Tensor | None:
    return None if x is None else x[rows]


def _accumulate(grad_weight: Tensor, dz: Tensor, rows: Tensor) -> None:
    if dz.dtype == grad_weight.dtype:
        grad_weight.addmm_(dz.t(), rows)
    else:
        grad_weight.add_(torch.mm(dz.t(), rows))


def _as(grad_weight: Tensor | None, weight: Tensor) -> Tensor | None:
    return None if grad_weight is None else grad_weight.to(weight.dtype)
