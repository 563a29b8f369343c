"""The forward pass of the native engine: one token for many requests, or many tokens for a few.

:meth:`CausalLM.decode` advances the first ``B`` slots by one token; :meth:`CausalLM.extend` runs any mix of prompts and
continuations as one packed batch. Both write keys and values into the :class:`SlotCache` and return hidden states
after the final norm; :meth:`CausalLM.logits` applies the head. Called by ``scheduler`` inside ``torch.inference_mode``.

Each call is a plain list of tensor operations, because Python between them is most of a small model's step, and
because other threads of the process want the interpreter too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from areal.engine.native.kv_cache import SlotCache
from areal.engine.native.weights import LayerWeights, ModelSpec, Weights, attention_scale, cis_table


@dataclass(frozen=True)
class Span:
    """``count`` new tokens of the request in ``slot``, after ``past`` positions that are stored already."""

    slot: int
    past: int
    count: int


@dataclass
class Block:
    """Slots ``begin`` to ``end - 1``, whose attention reads ``length`` positions each."""

    begin: int
    end: int
    length: int  # the largest of their positions + 1


@dataclass
class DecodeInput:
    """One token for each of the first ``B`` slots."""

    tokens: Tensor  # [B] int64, the newest token of each request
    positions: Tensor  # [B] int64, where it stands; as many positions are stored
    blocks: list[Block]  # in order, together all slots
    ragged: bool  # whether positions differ


@dataclass
class _Reading:
    """What the attention of one block needs in every layer; a row is a slot's KV head."""

    rows: slice
    length: int
    bias: Tensor  # [rows, group, length], or a zero
    bag: Tensor | None  # [rows * group * length] int32, places of the values
    ends: Tensor | None  # [rows * group + 1] int32


@dataclass
class _Bucket:
    """Spans of similar length whose attention runs as one padded batch."""

    query: Tensor  # [b, N] row of each query in the packed batch; padding repeats row 0
    real: Tensor  # [rows] places of b * N that are real
    rows: Tensor  # [rows] where their results go
    slots: Tensor  # [b]
    mask: Tensor  # [b, 1, group * N, L] zero where a key is visible, else minus infinity
    length: int  # L


class CausalLM:
    """Qwen2, Qwen3 and Llama as functions of a :class:`Weights`.

    Args:
        spec: model shape.
        max_positions: longest sequence, for the rotary table.
        device: where everything lies.
        dtype: dtype of weights, activations and cache.
    """

    def __init__(self, spec: ModelSpec, max_positions: int, device: torch.device, dtype: torch.dtype) -> None:
        self.spec, self.device, self.dtype = spec, device, dtype
        self.scale = attention_scale(spec)
        self.cis = cis_table(spec, max_positions, device)
        self._positions = torch.arange(max_positions, dtype=torch.int64, device=device)
        self._zero = torch.zeros((), dtype=dtype, device=device)
        self._minus_inf = torch.full((), float("-inf"), dtype=dtype, device=device)
        self._bags = device.type == "cpu" and dtype is torch.float32

    def decode(self, weights: Weights, step: DecodeInput, cache: SlotCache) -> Tensor:
        """Advance the first ``B`` slots by one token; ``cache`` holds one more position of each afterwards.

        Returns: ``[B, hidden]`` after the final norm.
        """
        tokens, positions = step.tokens, step.positions
        spec = self.spec
        count, rows, group, dim = tokens.shape[0], tokens.shape[0] * spec.kv_heads, spec.group, spec.head_dim
        width, inter, eps, shape = spec.heads * dim, spec.intermediate, spec.norm_eps, (spec.hidden,)
        cis = self.cis.index_select(0, positions)[:, None, None]
        index = (cache.decode_index(positions),) if step.ragged else None
        readings = [self._reading(block, positions if step.ragged else None, cache) for block in step.blocks]
        x = weights.embed.index_select(0, tokens)
        for layer, w in enumerate(weights.layers):
            qkv = w.qkv(F.rms_norm(x, shape, w.norm1, eps))
            self._rotate(qkv.view(count, spec.kv_heads, group + 2, dim)[:, :, : group + 1], cis, w.qk_norm)
            heads = qkv.view(rows, group + 2, dim)
            if index is None:
                cache.pairs[layer][:rows, :, step.blocks[0].length - 1] = heads[:, group:]
            else:
                cache.flat[layer].index_put_(index, heads[:, group:])
            mixed = [self._read(heads[reading.rows, :group], reading, cache, layer) for reading in readings]
            x = w.out.plus((mixed[0] if len(mixed) == 1 else torch.cat(mixed)).view(count, width), x)
            x = self._mlp(x, w, inter)
        return F.rms_norm(x, shape, weights.norm, eps)

    def _reading(self, block: Block, positions: Tensor | None, cache: SlotCache) -> _Reading:
        """Prepare the attention of a block; ``positions`` [B] where they differ."""
        spec, count, length = self.spec, block.end - block.begin, block.length
        rows, bias, bag, ends = count * spec.kv_heads, self._zero, None, None
        if positions is not None:
            seen = self._positions[:length] <= positions[block.begin : block.end, None]
            seen = seen[:, None].expand(count, spec.heads, length)
            bias = torch.where(seen, self._zero, self._minus_inf).view(rows, spec.group, length)
        if self._bags:
            bag = cache.value_index(block.begin, block.end, spec.group, length)
            ends = torch.arange(rows * spec.group + 1, dtype=torch.int32) * length
        return _Reading(slice(block.begin * spec.kv_heads, block.end * spec.kv_heads), length, bias, bag, ends)

    def _read(self, query: Tensor, reading: _Reading, cache: SlotCache, layer: int) -> Tensor:
        """Attention of one token per row, ``[rows, group, head_dim]``, over what is stored; as many output elements."""
        keys = cache.keys[layer][reading.rows, : reading.length].transpose(1, 2)
        beta = 0 if reading.bias is self._zero else 1
        shares = torch.softmax(torch.baddbmm(reading.bias, query, keys, beta=beta, alpha=self.scale), -1)
        if reading.bag is None:
            return torch.bmm(shares, cache.values[layer][reading.rows, : reading.length])
        # a sum of weighted rows reads them in place; bmm packs them first, at up to twice the time
        return torch.embedding_bag(
            cache.flat[layer],
            reading.bag,
            reading.ends,
            mode=0,
            per_sample_weights=shares.view(-1),
            include_last_offset=True,
        )[0]

    def _mlp(self, x: Tensor, w: LayerWeights, inter: int) -> Tensor:
        """Residual plus the gated feed-forward block."""
        both = w.gate_up(F.rms_norm(x, (self.spec.hidden,), w.norm2, self.spec.norm_eps))
        return w.down.plus(F.silu(both[:, :inter]).mul_(both[:, inter:]), x)

    def _rotate(self, heads: Tensor, cis: Tensor, qk_norm: Tensor | None) -> None:
        """Norm (Qwen3) and rotary embedding of queries and keys ``[..., group + 1, head_dim]``, in place."""
        pairs = (*heads.shape[:-1], self.spec.head_dim // 2, 2)
        source = heads
        if qk_norm is not None:
            source = F.rms_norm(heads, (self.spec.head_dim,), None, self.spec.norm_eps) * qk_norm
        if heads.dtype is torch.float32:
            turned = torch.view_as_complex(heads.view(pairs))
            if source is heads:
                turned.mul_(cis)
            else:
                torch.mul(torch.view_as_complex(source.view(pairs)), cis, out=turned)
        else:
            rotated = torch.view_as_complex(source.float().reshape(pairs)) * cis
            heads.copy_(torch.view_as_real(rotated).view(heads.shape))

    def extend(self, weights: Weights, tokens: list[int], spans: list[Span], cache: SlotCache) -> Tensor:
        """Run the tokens of ``spans``, packed in their order, and store their keys and values.

        Args:
            weights: current weights.
            tokens: ``sum(count)`` ids.
            spans: at most one per slot; the cache already has room.
            cache: read for the past of each span, written for its tokens.

        Returns: ``[len(spans), hidden]`` after the final norm, of each span's last token.
        """
        spec, device = self.spec, self.device
        group, dim, shape = spec.group, spec.head_dim, (spec.hidden,)
        counts = torch.tensor([span.count for span in spans])
        starts = counts.cumsum(0) - counts
        past = torch.tensor([span.past for span in spans])
        positions = torch.arange(len(tokens)) + (past - starts).repeat_interleave(counts)
        slots = torch.tensor([span.slot for span in spans]).repeat_interleave(counts)
        positions, slots = positions.to(device), slots.to(device)
        index = (cache.extend_index(slots, positions),)
        cis = self.cis.index_select(0, positions)[:, None, None]
        buckets = self._buckets(spans, starts.tolist())
        x = weights.embed.index_select(0, torch.tensor(tokens).to(device))
        for layer, w in enumerate(weights.layers):
            qkv = w.qkv(F.rms_norm(x, shape, w.norm1, spec.norm_eps))
            heads = qkv.view(-1, spec.kv_heads, group + 2, dim)
            self._rotate(heads[:, :, : group + 1], cis, w.qk_norm)
            cache.flat[layer].index_put_(index, heads[:, :, group:])
            mixed = self._attend(heads[:, :, :group], cache.data[layer], buckets)
            x = w.out.plus(mixed, x)
            if layer == spec.layers - 1:
                x = x.index_select(0, (starts + counts - 1).to(device))
            x = self._mlp(x, w, spec.intermediate)
        return F.rms_norm(x, shape, weights.norm, spec.norm_eps)

    def _buckets(self, spans: list[Span], starts: list[int]) -> list[_Bucket]:
        """Group spans whose token counts lie within a factor of two, so that padding at most doubles attention."""
        order = sorted(range(len(spans)), key=lambda i: spans[i].count)
        groups: list[list[int]] = []
        for i in order:
            if groups and spans[i].count <= 2 * spans[groups[-1][0]].count:
                groups[-1].append(i)
            else:
                groups.append([i])
        return [self._bucket([spans[i] for i in members], [starts[i] for i in members]) for members in groups]

    def _bucket(self, spans: list[Span], starts: list[int]) -> _Bucket:
        width = max(span.count for span in spans)
        length = max(span.past + span.count for span in spans)
        count = torch.tensor([[span.count] for span in spans])
        past = torch.tensor([[span.past] for span in spans])
        steps = torch.arange(width)
        real = steps < count
        query = torch.where(real, torch.tensor(starts)[:, None] + steps, 0)
        hidden = torch.arange(length) > (past + steps)[..., None]
        mask = torch.zeros(hidden.shape, dtype=self.dtype).masked_fill_(hidden, float("-inf"))
        mask = mask[:, None].expand(-1, self.spec.group, -1, -1).reshape(len(spans), 1, -1, length)
        return _Bucket(
            query=query.to(self.device),
            real=real.view(-1).nonzero().view(-1).to(self.device),
            rows=query[real].to(self.device),
            slots=torch.tensor([span.slot for span in spans]).to(self.device),
            mask=mask.to(self.device),
            length=length,
        )

    def _attend(self, query: Tensor, stored: Tensor, buckets: list[_Bucket]) -> Tensor:
        """Causal attention of packed queries ``[T, kv_heads, group, head_dim]`` over one layer's stored slots."""
        spec = self.spec
        width = spec.heads * spec.head_dim
        mixed = torch.empty((query.shape[0], width), dtype=query.dtype, device=query.device)
        for bucket in buckets:
            batch, steps = bucket.query.shape
            # queries of one group share keys: stack them along the query axis
            padded = query[bucket.query].permute(0, 2, 3, 1, 4).reshape(batch, spec.kv_heads, -1, spec.head_dim)
            kept = stored[:, :, :, : bucket.length].index_select(0, bucket.slots)
            out = F.scaled_dot_product_attention(
                padded, kept[:, :, 0], kept[:, :, 1], attn_mask=bucket.mask, scale=self.scale
            )
            out = out.reshape(batch, spec.kv_heads, spec.group, steps, spec.head_dim).permute(0, 3, 1, 2, 4)
            mixed.index_copy_(0, bucket.rows, out.reshape(-1, width).index_select(0, bucket.real))
        return mixed

    def logits(self, weights: Weights, hidden: Tensor) -> Tensor:
        """``[n, hidden]`` -> float32 ``[n, vocab]``."""
        return weights.head(hidden).float()
