"""Weights of the Megatron engine and those of Hugging Face checkpoints: names, shapes, and the way between them.

Own tensors are megatron's, whole: with all layers, experts and shards of the model, so that names and shapes do not
depend on the layout or on the layer spec. Two of them are several tensors of a checkpoint::

    linear_qkv   [G * (q + 2) * D, ...]  for each of G groups: its q query heads, its key head, its value head
    linear_fc1   [2, F, H]               gate, up; megatron keeps a rank's shares of both together
    others       as the checkpoint has them

In: ``ModelShape``. Out: ``NameMap`` and, for a directory, ``MegatronSource``. Called by ``weights.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from areal.engine.core.checkpoint import check_names
from areal.engine.core.hf_checkpoint import HfDirectory
from areal.engine.core.tensor_parts import Index
from areal.engine.core.value_head import VALUE_HEAD
from areal.engine.megatron_utils.shape import ModelShape
from areal.utils.errors import CheckpointError

__all__ = ["EMBEDDING", "HEAD", "MegatronSource", "NameMap", "cut_dimension", "own_name"]

EMBEDDING: Final = "embedding.word_embeddings.weight"
HEAD: Final = "output_layer.weight"
FINAL_NORM: Final = "decoder.final_layernorm.weight"
_MODEL = {
    EMBEDDING: "model.embed_tokens.weight",
    FINAL_NORM: "model.norm.weight",
    HEAD: "lm_head.weight",
    VALUE_HEAD: VALUE_HEAD,
}
_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.router.weight": "mlp.gate.weight",
}
# Transformer Engine keeps a norm with the linear layer behind it.
_FUSED = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
# Parameters that tensor parallelism cuts, and along which dimension.
_CUT = {
    "linear_qkv.weight": 0,
    "linear_qkv.bias": 0,
    "linear_proj.weight": 1,
    "linear_fc1.weight": 0,
    "linear_fc2.weight": 1,
    "word_embeddings.weight": 0,
    "output_layer.weight": 0,
}
_OWN_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(linear_fc[12])\.weight")
_LOCAL_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight")
_GROUPED_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12])\.weight(\d+)")
_BASE_PREFIX = "model."  # checkpoints of a base model, without its head, lack it
_NEVER_LOADED = "rotary_emb.inv_freq"  # buffers of old checkpoints that models compute now


def own_name(name: str, layer: int | None, first_expert: int) -> str:
    """Name of a parameter in the whole model.

    Args:
        name: in the module of a stage.
        layer: number in the whole model of the layer that it is in, from 0.
        first_expert: number of the first expert of this rank.
    """
    found = _OWN_LAYER.fullmatch(name)
    if found is None:
        return name
    inner = _FUSED.get(found[2], found[2])
    if local := _LOCAL_EXPERT.fullmatch(inner):
        inner = f"mlp.experts.{first_expert + int(local[1])}.{local[2]}.weight"
    elif grouped := _GROUPED_EXPERT.fullmatch(inner):
        inner = f"mlp.experts.{first_expert + int(grouped[2])}.{grouped[1]}.weight"
    return f"decoder.layers.{layer}.{inner}"


def cut_dimension(name: str) -> int | None:
    """Dimension along which tensor parallelism cuts a parameter; None: every rank has it whole."""
    kind = ".".join(name.rstrip("0123456789").split(".")[-2:])  # grouped experts are weight0, weight1, …
    return _CUT.get(kind)


@dataclass(frozen=True)
class _Rows:
    """Rows of an own tensor that are rows of a checkpoint tensor."""

    key: str
    own_start: int
    start: int
    count: int


class NameMap:
    """Own tensors of one model and what a checkpoint has for them.

    Attributes:
        shapes: of every own tensor of the whole model, in model order.
    """

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape
        self.shapes: dict[str, tuple[int, ...]] = dict(self._tensors())

    def keys(self, name: str) -> dict[str, tuple[int, ...]]:
        """Checkpoint names and shapes of one own tensor."""
        shape = self.shapes[name]
        if name in _MODEL:
            return {_MODEL[name]: shape}
        prefix, inner = self._layer(name)
        if inner in _LAYER:
            return {f"{prefix}.{_LAYER[inner]}": shape}
        if inner.startswith("self_attention.linear_qkv."):
            kind = inner.rpartition(".")[2]
            q, kv = self.shape.n_heads * self.shape.head_dim, self.shape.n_kv_heads * self.shape.head_dim
            sizes = {"q_proj": q, "k_proj": kv, "v_proj": kv}
            return {f"{prefix}.self_attn.{part}.{kind}": (size, *shape[1:]) for part, size in sizes.items()}
        expert = _EXPERT.fullmatch(inner)
        block = f"{prefix}.mlp" if expert is None else f"{prefix}.mlp.experts.{expert[1]}"
        if shape[0] == 2 and len(shape) == 3:
            return {f"{block}.{part}.weight": shape[1:] for part in ("gate_proj", "up_proj")}
        return {f"{block}.down_proj.weight": shape}

    def split(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """``(checkpoint name, tensor)`` of one whole own tensor, which they may alias."""
        keys = list(self.keys(name))
        if len(keys) == 1:
            return [(keys[0], tensor)]
        if len(keys) == 2:
            return list(zip(keys, tensor.unbind(0), strict=True))
        groups, per_group = self.shape.n_kv_heads, self.shape.n_heads // self.shape.n_kv_heads
        blocks = tensor.view(groups, per_group + 2, self.shape.head_dim, *tensor.shape[1:])
        parts = blocks.split([per_group, 1, 1], dim=1)
        rest = tensor.shape[1:]
        return [(key, part.reshape(-1, *rest)) for key, part in zip(keys, parts, strict=True)]

    def rows(self, name: str, start: int, stop: int) -> Iterator[_Rows]:
        """Where the rows ``start`` to ``stop`` of a ``linear_qkv`` are."""
        keys, dim = list(self.keys(name)), self.shape.head_dim
        per_group = self.shape.n_heads // self.shape.n_kv_heads
        heads = [(keys[0], per_group), (keys[1], 1), (keys[2], 1)]
        block = (per_group + 2) * dim
        for group in range(start // block, -(-stop // block)):
            own = group * block
            for key, count in heads:
                first, last = max(start, own), min(stop, own + count * dim)
                if first < last:
                    yield _Rows(key, first, group * count * dim + first - own, last - first)
                own += count * dim

    def _tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        s = self.shape
        yield EMBEDDING, (s.vocab_size, s.dim)
        qkv = (s.n_heads + 2 * s.n_kv_heads) * s.head_dim
        for layer in range(s.n_layers):
            prefix = f"decoder.layers.{layer}"
            yield f"{prefix}.input_layernorm.weight", (s.dim,)
            yield f"{prefix}.self_attention.linear_qkv.weight", (qkv, s.dim)
            if s.qkv_bias:
                yield f"{prefix}.self_attention.linear_qkv.bias", (qkv,)
            if s.qk_norm:
                yield f"{prefix}.self_attention.q_layernorm.weight", (s.head_dim,)
                yield f"{prefix}.self_attention.k_layernorm.weight", (s.head_dim,)
            yield f"{prefix}.self_attention.linear_proj.weight", (s.dim, s.n_heads * s.head_dim)
            yield f"{prefix}.pre_mlp_layernorm.weight", (s.dim,)
            if not s.has_experts(layer):
                yield f"{prefix}.mlp.linear_fc1.weight", (2, s.ffn_dim, s.dim)
                yield f"{prefix}.mlp.linear_fc2.weight", (s.dim, s.ffn_dim)
                continue
            assert s.moe is not None
            yield f"{prefix}.mlp.router.weight", (s.moe.num_experts, s.dim)
            for expert in range(s.moe.num_experts):
                yield f"{prefix}.mlp.experts.{expert}.linear_fc1.weight", (2, s.moe.ffn_dim, s.dim)
                yield f"{prefix}.mlp.experts.{expert}.linear_fc2.weight", (s.dim, s.moe.ffn_dim)
        yield FINAL_NORM, (s.dim,)
        if s.is_critic:
            yield VALUE_HEAD, (1, s.dim)
        elif not s.tied:
            yield HEAD, (s.vocab_size, s.dim)

    def _layer(self, name: str) -> tuple[str, str]:
        found = _OWN_LAYER.fullmatch(name)
        assert found is not None, name
        return f"model.layers.{found[1]}", found[2]


class MegatronSource:
    """A directory of safetensors files under own names; see ``TensorSource``.

    Attributes:
        shapes: of the own tensors that it has.
        unexpected: checkpoint names that the model has no place for.
    """

    def __init__(self, directory: HfDirectory, names: NameMap, wanted: list[str], optional: set[str]) -> None:
        """Args:
            wanted: own names that are going to be read.
            optional: of these, those that may be missing.

        Raises:
            CheckpointError: tensors are missing or of another shape; all of them are listed.
        """
        self.directory, self.names = directory, names
        self.shapes: dict[str, tuple[int, ...]] = {}
        needed: dict[str, tuple[int, ...]] = {}
        for name in wanted:
            keys = {self._key(key): shape for key, shape in self._stored(name).items()}
            if name in optional and not any(key in directory.shapes for key in keys):
                continue
            needed.update(keys)
            self.shapes[name] = names.shapes[name]
        check_names(directory.path, needed, directory.shapes)
        if names.shape.tied and EMBEDDING in self.shapes:
            self._check_tied()
        known = {self._key(key) for name in names.shapes for key in self._stored(name)}
        if names.shape.tied or names.shape.is_critic:
            known |= {_MODEL[HEAD], _MODEL[EMBEDDING]}
        self.unexpected = [key for key in directory.shapes if key not in known and not key.endswith(_NEVER_LOADED)]

    def pieces(self, name: str, index: Index) -> Iterator[tuple[Index, Tensor]]:
        """See ``TensorSource``; a part that cuts rows is read alone."""
        if name.endswith(("linear_qkv.weight", "linear_qkv.bias")):
            for part in self.names.rows(name, index[0].start, index[0].stop):
                rows = slice(part.start, part.start + part.count)
                tensor = self.directory.read(self._key(part.key), (rows, *index[1:]))
                yield (slice(part.own_start, part.own_start + part.count), *index[1:]), tensor
            return
        keys = [self._key(key) for key in self.names.keys(name)]  # noqa: SIM118 - not a dict
        if len(keys) == 1:
            yield index, self._read(name, keys[0], 0, index)
            return
        for half in range(index[0].start, index[0].stop):
            place = (slice(half, half + 1), *index[1:])
            yield place, self._read(name, keys[half], half, index[1:])[None]

    def _read(self, name: str, key: str, half: int, index: Index) -> Tensor:
        """One checkpoint tensor, which may be a part of one that holds all experts."""
        expert = self._fused_expert(name)
        if expert is None or key in self.directory.shapes:
            return self.directory.read(self._tied_key(name, key), index)
        fused = next(iter(self._stored(name)))
        rows, rest = index[0], index[1:]
        offset = half * self.names.shapes[name][1] if name.endswith("linear_fc1.weight") else 0
        moved = slice(rows.start + offset, rows.stop + offset)
        return self.directory.read(self._key(fused), (slice(expert, expert + 1), moved, *rest))[0]

    def _stored(self, name: str) -> dict[str, tuple[int, ...]]:
        """Checkpoint tensors that hold one own tensor here, with their shapes."""
        plain = self.names.keys(name)
        if name == EMBEDDING:
            [(key, shape)] = plain.items()
            return {self._tied_key(name, self._key(key)): shape}
        if self._fused_expert(name) is None or all(self._key(key) in self.directory.shapes for key in plain):
            return plain
        moe, shape = self.names.shape.moe, self.names.shapes[name]
        assert moe is not None
        block = next(iter(plain)).partition(".experts.")[0] + ".experts"
        if name.endswith("linear_fc1.weight"):
            fused, size = f"{block}.gate_up_proj", (moe.num_experts, 2 * shape[1], shape[2])
        else:
            fused, size = f"{block}.down_proj", (moe.num_experts, *shape)
        return {fused: size} if self._key(fused) in self.directory.shapes else plain

    def _fused_expert(self, name: str) -> int | None:
        """Number of the expert that an own tensor belongs to."""
        found = _OWN_LAYER.fullmatch(name)
        expert = None if found is None else _EXPERT.fullmatch(found[2])
        return None if expert is None else int(expert[1])

    def _key(self, key: str) -> str:
        """``key`` as the directory has it."""
        short = key.removeprefix(_BASE_PREFIX)
        return short if key not in self.directory.shapes and short in self.directory.shapes else key

    def _tied_key(self, name: str, key: str) -> str:
        """Where an embedding is that is the head too: some checkpoints have it as the head only."""
        tied = self.names.shape.tied and name == EMBEDDING and key not in self.directory.shapes
        return _MODEL[HEAD] if tied and _MODEL[HEAD] in self.directory.shapes else key

    def _check_tied(self) -> None:
        keys = [key for key in (self._key(_MODEL[EMBEDDING]), _MODEL[HEAD]) if key in self.directory.shapes]
        if len(keys) == 2 and not torch.equal(*(self.directory.read(key) for key in keys)):
            raise CheckpointError(
                f"{self.directory.path}: {keys[0]} and {keys[1]} differ, but the config ties them; "
                "set tie_word_embeddings=false in its config.json"
            )
