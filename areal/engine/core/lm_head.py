"""Log-probs and entropy from hidden states and the output head, in row chunks, so that full logits never exist.

In: hidden states ``[N, H]``, head weight ``[V, H]``, labels ``[N]``. Out: log-prob of each label and entropy of each
distribution, float32 ``[N]``, differentiable in hidden states and weight. Called by ``engine/core/loop.py``.

Backward recomputes each chunk's logits. For one row with z = logits / temperature, p = softmax(z), H = entropy:
d logp[y] / dz = onehot(y) - p and dH / dz = -p (log p + H).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK_ROWS = 1024
CHUNK_ELEMENTS_CPU = 1 << 25  # 128 MiB of float32 logits
KEEP_ELEMENTS = 1 << 22  # logits this small are kept for backward instead of being computed twice


@dataclass
class TokenOutput:
    """Per-token results of a micro-batch, float32 ``[T]``; 0 where nothing was computed."""

    logprobs: Tensor
    entropy: Tensor
    vocab_min_logits: Tensor
    vocab_max_logits: Tensor


def token_output(  # noqa: PLR0913 - the pieces of one formula
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    rows: Tensor | None,
    temperature: float,
    source: Tensor | None = None,
) -> TokenOutput:
    """Log-probs, entropy and logit range of ``labels`` at the selected rows.

    Args:
        hidden: ``[T, H]``, or ``[U, H]`` with ``source``.
        head: ``[V, H]``.
        labels: int64 ``[T]``, the token that each position predicts.
        rows: int64 ``[N]`` positions to compute; None: all. The other positions get 0 and no gradient.
        temperature: logits are divided by it, > 0.
        source: int64 ``[T]``, row of ``hidden`` of each position; None when they are one to one.
    """
    n_tokens = labels.shape[0]
    if rows is not None:
        labels = labels.index_select(0, rows)
        hidden = hidden.index_select(0, rows if source is None else source.index_select(0, rows))
    elif source is not None:
        hidden = hidden.index_select(0, source)
    logprobs, entropy, low, high = _ChunkedHead.apply(hidden, head, labels, 1.0 / temperature)
    if rows is not None:
        logprobs, entropy, low, high = (
            torch.zeros(n_tokens, dtype=x.dtype, device=x.device).index_copy(0, rows, x)
            for x in (logprobs, entropy, low, high)
        )
    return TokenOutput(logprobs, entropy, low, high)


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        n_rows = hidden.shape[0]
        logprobs, log_sum, entropy, low, high = hidden.new_zeros((5, n_rows), dtype=torch.float32).unbind(0)
        needs_grad = any(ctx.needs_input_grad[:2])
        keep = needs_grad and n_rows * weight.shape[0] <= KEEP_ELEMENTS
        buffer = _ChunkBuffer(hidden, weight, keep=keep)
        kept = None
        for start, stop in buffer.chunks():
            z = buffer.logits(start, stop, scale)
            top = z.amax(-1)
            torch.amin(z, -1, out=low[start:stop])
            high[start:stop] = top
            # From here on logits are relative to the row's largest one. H = log sum exp(z) - E_p[z].
            z.sub_(top[:, None])
            chosen = z.gather(1, labels[start:stop, None]).squeeze(1)
            p = torch.exp(z, out=buffer.scratch(z))
            total = p.sum(-1)
            log_total = total.log()
            log_sum[start:stop] = top + log_total
            logprobs[start:stop] = chosen - log_total
            entropy[start:stop] = log_total - z.mul_(p).sum(-1) / total
            if keep:
                kept = p.div_(total[:, None])
        ctx.save_for_backward(hidden, weight, labels, log_sum, entropy, kept)
        ctx.scale = scale
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(low, high)
        return logprobs, entropy, low, high

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad_logprobs, grad_entropy = grads[:2]
        hidden, weight, labels, log_sum, entropy, kept = ctx.saved_tensors
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
            dz = _logit_gradient(p, labels[rows], _rows(grad_logprobs, rows), _rows(grad_entropy, rows), entropy[rows])
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
            rows = max(64, min(CHUNK_ROWS, CHUNK_ELEMENTS_CPU // weight.shape[0]))
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


def _logit_gradient(
    p: Tensor, labels: Tensor, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, entropy: Tensor
) -> Tensor:
    """Gradient of a chunk's scaled logits, ``[C, V]``; overwrites the probabilities ``p`` where it can."""
    if grad_entropy is None:
        assert grad_logprobs is not None
        g = grad_logprobs[:, None]
        return p.mul_(-g).scatter_add_(1, labels[:, None], g)
    # clamp: p underflows to 0 for hopeless tokens, and p log p must be 0 there.
    log_p = p.clamp_min(torch.finfo(p.dtype).tiny).log_()
    dz = log_p.add_(entropy[:, None]).mul_(p).mul_(-grad_entropy[:, None])
    if grad_logprobs is not None:
        g = grad_logprobs[:, None]
        dz.sub_(p.mul_(g)).scatter_add_(1, labels[:, None], g)
    return dz


def _rows(x: Tensor | None, rows: slice) -> Tensor | None:
    return None if x is None else x[rows]


def _accumulate(grad_weight: Tensor, dz: Tensor, rows: Tensor) -> None:
    if dz.dtype == grad_weight.dtype:
        grad_weight.addmm_(dz.t(), rows)
    else:
        grad_weight.add_(torch.mm(dz.t(), rows))


def _as(grad_weight: Tensor | None, weight: Tensor) -> Tensor | None:
    return None if grad_weight is None else grad_weight.to(weight.dtype)
