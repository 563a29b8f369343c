"""Weights of the native engine: what a checkpoint must hold, and where each of its tensors lies here.

In: a Hugging Face config, and ``(checkpoint name, tensor)`` pairs from a directory, a model or a trainer. Out: a
:class:`Weights` laid out for the forward pass. Callers: ``engine`` (loading, receiving), ``model`` (reading).

Layout. Query, key and value projections of a layer are one matrix whose rows are grouped by KV head:
``[kv_heads, group + 2, head_dim, hidden]`` = the group's queries, its key, its value. So queries, keys and values of
a step are views of one product. Within a head, rotary halves ``(i, i + D/2)`` lie next to each other, so that rotary
embedding is one complex product; attention does not notice, because queries and keys are permuted alike.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from areal.engine.core.weight_sync import ParamRecord
from areal.engine.core.weight_threads import TASK_BYTES, torch_threads
from areal.engine.native.products import LowRank, Product, packs
from areal.utils.errors import UnsupportedFeatureError, WeightSyncError
from areal.utils.runs import in_runs

ARCHITECTURES = ("qwen2", "qwen3", "llama")
_LATER_FROM = 2**20  # elements of a lasting tensor whose copy is left for the first step
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class ModelSpec:
    """Shape of one causal LM, read from its Hugging Face config."""

    arch: str
    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    norm_eps: float
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    tied: bool
    max_positions: int
    inv_freq: tuple[float, ...] = field(repr=False)
    rope_scale: float

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    @classmethod
    def from_hf_config(cls, config: Any) -> ModelSpec:
        """Read ``config``; raises UnsupportedFeatureError for what this engine cannot run."""
        arch = config.model_type
        if arch not in ARCHITECTURES:
            raise UnsupportedFeatureError(f"model_type={arch!r}: the native engine runs {', '.join(ARCHITECTURES)}")
        if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
            raise UnsupportedFeatureError("layer_types: the native engine runs full attention only, no sliding window")
        if config.hidden_act != "silu":
            raise UnsupportedFeatureError(f"hidden_act={config.hidden_act!r}: the native engine runs silu only")
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        inv_freq, rope_scale = _rope(config, head_dim)
        bias = bool(getattr(config, "attention_bias", False))
        return cls(
            arch=arch,
            vocab_size=config.vocab_size,
            hidden=config.hidden_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            intermediate=config.intermediate_size,
            norm_eps=config.rms_norm_eps,
            qkv_bias=arch == "qwen2" or bias,
            out_bias=bias and arch != "qwen2",
            mlp_bias=arch == "llama" and bool(config.mlp_bias),
            tied=bool(config.tie_word_embeddings),
            max_positions=config.max_position_embeddings,
            inv_freq=inv_freq,
            rope_scale=rope_scale,
        )


def _rope(config: Any, head_dim: int) -> tuple[tuple[float, ...], float]:
    """Inverse frequencies ``[head_dim / 2]`` and the factor on cos and sin."""
    parameters = config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind not in _ROPE_TYPES:
        raise UnsupportedFeatureError(f"rope_type={kind!r}: the native engine knows {', '.join(_ROPE_TYPES)}")
    if kind == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        return tuple((1.0 / parameters["rope_theta"] ** exponents).tolist()), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    inv_freq, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return tuple(inv_freq.float().tolist()), float(scale)


@dataclass
class LayerWeights:
    """One decoder layer; see the module docstring for the rows of ``qkv``."""

    norm1: Tensor
    qkv: Product
    qk_norm: Tensor | None
    out: Product
    norm2: Tensor
    gate_up: Product
    down: Product

    @property
    def products(self) -> tuple[Product, ...]:
        """Every matrix of the layer."""
        return self.qkv, self.out, self.gate_up, self.down


class _Matrix:
    """Weight of one product, made of one or several checkpoint tensors.

    A small one has memory of its own. A large one is read in a packed layout, and is plain only while its parts arrive.

    Attributes:
        memory: of a small one, else None.
        placeholder: stands for the weight where only shape and dtype count.
        product: set once it is made.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.placeholder = torch.zeros((), dtype=dtype, device=device).expand(shape)
        self.memory = None if packs(self.placeholder) else torch.zeros(shape, dtype=dtype, device=device)
        self.product: Product | None = None
        self.parts: set[str] = set()
        self.arrived: dict[str, Tensor | None] = {}  # the tensor where it can be read later
        self.landing: Tensor | None = None

    @property
    def weight(self) -> Tensor:
        """What the product is made with."""
        return self.placeholder if self.memory is None else self.memory


class _LandingPlaces:
    """Memory in which the parts of packed matrices meet; one per shape is enough where they come in model order."""

    def __init__(self) -> None:
        self._free: dict[torch.Size, list[Tensor]] = {}

    def take(self, like: Tensor) -> Tensor:
        """Plain memory of the shape and dtype of ``like``."""
        free = self._free.setdefault(like.shape, [])
        return free.pop() if free else torch.empty(like.shape, dtype=like.dtype, device=like.device)

    def give(self, place: Tensor) -> None:
        """It can be used again."""
        free = self._free.setdefault(place.shape, [])
        if not free:
            free.append(place)


@dataclass(frozen=True)
class Target:
    """Where one checkpoint tensor goes: ``part(memory).copy_(src.reshape(shape).permute(order))``."""

    matrix: _Matrix | None  # None: a tensor with memory of its own
    memory: Tensor | None
    part: Callable[[Tensor], Tensor]
    shape: tuple[int, ...]
    order: tuple[int, ...]
    source_shape: tuple[int, ...]

    @property
    def whole(self) -> bool:
        """Whether the tensor as it is makes the matrix."""
        return self.matrix is not None and self.matrix.placeholder.shape == self.source_shape


class Weights:
    """One complete set of weights on one device; two of them make a double buffer.

    Args:
        spec: model shape.
        dtype: dtype of every tensor here; what arrives is cast.
        device: where they lie.
        twin: the other buffer, if it is there already.

    Attributes:
        targets: where each checkpoint tensor goes, by name.
        products: of all layers, and the head's.
    """

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device, twin: Weights | None = None) -> None:
        self.spec, self.dtype, self.device = spec, dtype, device
        self.targets: dict[str, Target] = {}
        self._lock = threading.Lock()
        self._left: list[Callable[[], object]] = []  # for the first step
        self._places: _LandingPlaces = _LandingPlaces() if twin is None else twin._places
        self.embed = self._new("model.embed_tokens.weight", spec.vocab_size, spec.hidden)
        self.norm = self._new("model.norm.weight", spec.hidden)
        self.layers = [self._new_layer(f"model.layers.{i}.") for i in range(spec.layers)]
        if spec.tied:
            self.head = Product(self.embed)
        else:
            self.head = self._new_matrix("lm_head.weight", spec.vocab_size, spec.hidden)
        self.products = [product for layer in self.layers for product in layer.products] + [self.head]

    @property
    def names(self) -> list[str]:
        """Checkpoint names that make a complete set."""
        return list(self.targets)

    @property
    def packs(self) -> bool:
        """Whether a matrix is kept in a packed layout."""
        return any(product.packs for product in self.products)

    def settle(self) -> None:
        """Do what was left for the first step; the tensors that were loaded are not read any more."""
        left, self._left = self._left, []
        for job in left:
            job()

    def take_memory(self, previous: Weights) -> None:
        """Take over the packed memory of the weights that were in service before, if there is something to pack."""
        if self._left:
            for product, old in zip(self.products, previous.products, strict=True):
                product.take_memory(old)

    def load(self, name: str, tensor: Tensor, lasting: bool = False) -> None:
        """Copy ``tensor`` (any dtype or device) to its place; a tied head has none.

        Args:
            name: checkpoint name.
            tensor: whole.
            lasting: it stays as it is until :meth:`settle`, which packs a large matrix.

        Raises:
            WeightSyncError: unknown name or wrong shape.
        """
        if name == "lm_head.weight" and self.spec.tied:
            return
        target = self.targets.get(name)
        if target is None:
            raise WeightSyncError(f"{name!r} is not a weight of this {self.spec.arch} model")
        if tuple(tensor.shape) != target.source_shape:
            raise WeightSyncError(f"{name}: shape {tuple(tensor.shape)}, this model has {target.source_shape}")
        tensor = tensor.detach()
        matrix = target.matrix
        if matrix is None or matrix.memory is not None:
            memory = target.memory if matrix is None else matrix.memory
            assert memory is not None
            place, source = target.part(memory), tensor.reshape(target.shape).permute(target.order)
            if lasting and source.numel() >= _LATER_FROM:
                self._left.append(lambda: place.copy_(source))
            else:
                place.copy_(source)
            return
        if not lasting and self._is_matrix(name, tensor):
            self._pack(matrix, {name: tensor})
            return
        if not lasting:
            self._land(matrix, name, tensor)
        with self._lock:
            matrix.arrived[name] = tensor if lasting else None
            if matrix.arrived.keys() != matrix.parts:
                return
            arrived, matrix.arrived = matrix.arrived, {}
        if lasting:
            self._left.append(lambda: self._pack(matrix, arrived))
        else:
            self._pack(matrix, arrived)

    def _land(self, matrix: _Matrix, name: str, tensor: Tensor) -> None:
        """Copy a part to where the parts of a matrix meet."""
        with self._lock:
            if matrix.landing is None:
                matrix.landing = self._places.take(matrix.placeholder)
            landing = matrix.landing
        target = self.targets[name]
        target.part(landing).copy_(tensor.reshape(target.shape).permute(target.order))

    def _pack(self, matrix: _Matrix, parts: dict[str, Tensor | None]) -> None:
        """Bring a matrix whose parts have arrived into its packed layout."""
        assert matrix.product is not None
        for name, tensor in parts.items():
            if tensor is not None and self._is_matrix(name, tensor):
                matrix.product.refresh(tensor)
                return
            if tensor is not None:
                self._land(matrix, name, tensor)
        landing, matrix.landing = matrix.landing, None
        assert landing is not None
        matrix.product.refresh(landing)
        with self._lock:
            self._places.give(landing)

    def _is_matrix(self, name: str, tensor: Tensor) -> bool:
        """Whether a tensor can be packed as it is."""
        alike = tensor.dtype == self.dtype and tensor.device == self.device and tensor.is_contiguous()
        return alike and self.targets[name].whole

    def load_all(
        self, pairs: Iterable[tuple[str, Tensor]], threads: int = 1, lasting: bool = False
    ) -> list[ParamRecord]:
        """Load every pair; returns the record of each.

        Args:
            pairs: a list of them may be loaded by several threads.
            threads: so many, on a CPU.
            lasting: as of :meth:`load`.

        Raises:
            WeightSyncError: a name or shape is wrong, or a weight is missing at the end.
        """
        self._forget_parts()
        adapt(self, ())

        def one(pair: tuple[str, Tensor]) -> ParamRecord:
            self.load(*pair, lasting=lasting)
            return ParamRecord.of(*pair)

        if self.device.type != "cpu":
            records = [one(pair) for pair in pairs]
        else:
            with torch_threads(threads) as pool:
                if isinstance(pairs, Sequence):
                    runs = in_runs(pairs, lambda pair: pair[1].nbytes, TASK_BYTES)
                    records = [r for found in pool.map(lambda run: [one(pair) for pair in run], runs) for r in found]
                else:
                    records = pool.submit(lambda: [one(pair) for pair in pairs]).result()
        missing = set(self.targets) - {record.name for record in records}
        if missing:
            shown = ", ".join(sorted(missing)[:5])
            raise WeightSyncError(f"{len(missing)} of {len(self.targets)} weights did not arrive: {shown}")
        if self.spec.tied and lasting:
            self._left.append(self.head.refresh)
        elif self.spec.tied:
            self.head.refresh()
        return records

    def _forget_parts(self) -> None:
        """Drop what an earlier, failed load left."""
        self._left.clear()
        for target in self.targets.values():
            if target.matrix is not None:
                target.matrix.landing = None
                target.matrix.arrived = {}

    def _empty(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def _new(self, name: str, *shape: int) -> Tensor:
        tensor = self._empty(*shape)
        self._bind(name, tensor, lambda memory: memory, shape, None, shape)
        return tensor

    def _matrix(self, *shape: int) -> _Matrix:
        return _Matrix(shape, self.dtype, self.device)

    def _product(self, matrix: _Matrix, bias: Tensor | None = None) -> Product:
        matrix.product = Product(matrix.weight, bias)
        return matrix.product

    def _new_matrix(self, name: str, *shape: int, bias: Tensor | None = None) -> Product:
        matrix = self._matrix(*shape)
        self._bind(name, matrix, lambda memory: memory, shape, None, shape)
        return self._product(matrix, bias)

    def _bind(  # noqa: PLR0913 - the fields of a target
        self,
        name: str,
        home: Tensor | _Matrix,
        part: Callable[[Tensor], Tensor],
        shape: tuple[int, ...],
        order: tuple[int, ...] | None,
        source: tuple[int, ...],
    ) -> None:
        matrix, memory = (home, None) if isinstance(home, _Matrix) else (None, home)
        if matrix is not None:
            matrix.parts.add(name)
        self.targets[name] = Target(matrix, memory, part, shape, order or tuple(range(len(shape))), source)

    def _new_layer(self, at: str) -> LayerWeights:
        spec = self.spec
        hidden, inter, width = spec.hidden, spec.intermediate, spec.heads * spec.head_dim
        attn, mlp = at + "self_attn.", at + "mlp."
        gate_up = self._matrix(2 * inter, hidden)
        gate_up_bias = self._empty(2 * inter) if spec.mlp_bias else None
        for part, name in enumerate(("gate_proj", "up_proj")):
            rows = slice(part * inter, (part + 1) * inter)
            self._bind(f"{mlp}{name}.weight", gate_up, itemgetter(rows), (inter, hidden), None, (inter, hidden))
            if gate_up_bias is not None:
                self._bind(f"{mlp}{name}.bias", gate_up_bias, itemgetter(rows), (inter,), None, (inter,))
        qkv_rows = spec.kv_heads * (spec.group + 2) * spec.head_dim
        qkv = self._matrix(qkv_rows, hidden)
        self._bind_qkv(attn, "weight", qkv, (hidden,))
        qkv_bias = self._empty(qkv_rows) if spec.qkv_bias else None
        if qkv_bias is not None:
            self._bind_qkv(attn, "bias", qkv_bias, ())
        out_bias = self._new(attn + "o_proj.bias", hidden) if spec.out_bias else None
        down_bias = self._new(mlp + "down_proj.bias", hidden) if spec.mlp_bias else None
        return LayerWeights(
            norm1=self._new(at + "input_layernorm.weight", hidden),
            qkv=self._product(qkv, qkv_bias),
            qk_norm=self._new_qk_norm(attn) if spec.arch == "qwen3" else None,
            out=self._new_matrix(attn + "o_proj.weight", hidden, width, bias=out_bias),
            norm2=self._new(at + "post_attention_layernorm.weight", hidden),
            gate_up=self._product(gate_up, gate_up_bias),
            down=self._new_matrix(mlp + "down_proj.weight", hidden, inter, bias=down_bias),
        )

    def _bind_qkv(self, attn: str, kind: str, home: Tensor | _Matrix, tail: tuple[int, ...]) -> None:
        """Bind q, k, v of ``kind`` to the fused tensor ``[kv_heads * (group + 2) * head_dim, *tail]``."""
        spec = self.spec
        kv, group, dim, half = spec.kv_heads, spec.group, spec.head_dim, spec.head_dim // 2

        def paired(fused: Tensor) -> Tensor:  # of any width: adapters have rows like these
            return fused.view(kv, group + 2, half, 2, *fused.shape[1:])

        rest = tuple(range(4, 4 + len(tail)))
        self._bind(
            f"{attn}q_proj.{kind}", home, lambda fused: paired(fused)[:, :group], (kv, group, 2, half, *tail),
            (0, 1, 3, 2, *rest), (spec.heads * dim, *tail),
        )  # fmt: skip
        rest = tuple(range(3, 3 + len(tail)))
        self._bind(
            f"{attn}k_proj.{kind}", home, lambda fused: paired(fused)[:, group], (kv, 2, half, *tail),
            (0, 2, 1, *rest), (kv * dim, *tail),
        )  # fmt: skip
        self._bind(
            f"{attn}v_proj.{kind}", home, lambda fused: fused.view(kv, group + 2, dim, *fused.shape[1:])[:, group + 1],
            (kv, dim, *tail), None, (kv * dim, *tail),
        )  # fmt: skip

    def _new_qk_norm(self, attn: str) -> Tensor:
        """Norm weights ``[group + 1, head_dim]``: one row per query head of a group, then the key's."""
        spec = self.spec
        group, half = spec.group, spec.head_dim // 2
        fused = self._empty(group + 1, spec.head_dim)
        paired = fused.view(group + 1, half, 2)
        for name, rows in (("q_norm", slice(0, group)), ("k_norm", slice(group, group + 1))):
            self._bind(f"{attn}{name}.weight", paired, itemgetter(rows), (1, 2, half), (0, 2, 1), (spec.head_dim,))
        return fused


def adapt(weights: Weights, terms: Iterable[tuple[Product, LowRank]]) -> None:
    """Compute with an adapter from here on instead of the one before; with no terms without any."""
    for product in weights.products:
        product.adapter = None
    for product, term in terms:
        product.adapter = term


def cis_table(spec: ModelSpec, length: int, device: torch.device) -> Tensor:
    """Rotary factors ``exp(i * position * frequency)``, complex64 ``[length, head_dim / 2]``."""
    frequencies = torch.tensor(spec.inv_freq, dtype=torch.float32, device=device)
    angles = torch.arange(length, dtype=torch.float32, device=device)[:, None] * frequencies
    return torch.polar(torch.full_like(angles, spec.rope_scale), angles)


def attention_scale(spec: ModelSpec) -> float:
    """Factor on query-key products."""
    return 1.0 / math.sqrt(spec.head_dim)
