"""Malformed messages: whatever the bytes are, decoding gives a value or WireError, soon and without growing."""

from __future__ import annotations

import contextlib
import datetime
import functools
import pathlib
import random
import struct
import time
from typing import Any

import msgspec
import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from areal.infra.rpc.errors import WireError
from areal.infra.rpc.serialization import decode, encode
from tests.rpc_fakes import Counter, doubled
from tests.test_rpc_serialization import ARRAYS, OUR_VALUES, PLAIN_VALUES, TENSORS


def build(tree: Any, buffers: list[bytes] = [], sizes: Any = None, parked: Any = ()) -> bytes:  # noqa: B006
    """A message with any header."""
    header = msgspec.msgpack.encode([tree, [len(b) for b in buffers] if sizes is None else sizes, parked])
    raw = struct.pack("<4sI", b"AR\x01\x00", len(header)) + header
    raw += bytes(-len(raw) % 16)
    return raw + b"".join(b + bytes(-len(b) % 16) for b in buffers)


MALFORMED = {
    "empty": b"",
    "short": b"AR\x01",
    "magic": b"XXXX\x00\x00\x00\x00",
    "version": b"AR\x02\x00\x00\x00\x00\x00",
    "cut": bytes(encode({"a": [1, 2, 3]}))[:-9],
    "header size": struct.pack("<4sI", b"AR\x01\x00", 0xFFFFFFFF),
    "no list": struct.pack("<4sI", b"AR\x01\x00", 1) + b"\x05",
    "huge array": struct.pack("<4sI", b"AR\x01\x00", 5) + b"\xdd\xff\xff\xff\xf0",
    "deep": struct.pack("<4sI", b"AR\x01\x00", 5000) + b"\x91" * 5000,
    "nested": build(functools.reduce(lambda inner, _: [inner], range(150), 1)),
    "tag": build({"?": 1}),
    "two tags": build({"t": [], "s": []}),
    "tag type": build({"t": 5}),
    "map": build({"m": [1]}),
    "odd pairs": build({"d": [1]}),
    "unhashable key": build({"d": [[1], 2]}),
    "unhashable set": build({"s": [[1]]}),
    "buffer": build({"b": 0}),
    "negative buffer": build({"b": -1}, [b"x"]),
    "sizes": build(1, [b"x"], sizes=[2**40]),
    "negative size": build(1, [b"x"], sizes=[-16]),
    "size type": build(1, [], sizes=["a"]),
    "tensor shape": build({"T": ["float32", [3], 0]}, [b"1234"]),
    "tensor huge shape": build({"T": ["float32", [2**40, 2**40], 0]}, [b"1234"]),
    "tensor empty huge": build({"T": ["float32", [0, 2**62, 2**62], 0]}, [b""]),
    "tensor negative": build({"T": ["float32", [-1, -4], 0]}, [b"1234" * 4]),
    "tensor type": build({"T": ["nn", [1], 0]}, [b"1234"]),
    "tensor type function": build({"T": ["load", [1], 0]}, [b"1234"]),
    "tensor quantized": build({"T": ["quint8", [4], 0]}, [b"1234"]),
    "numpy object": build({"n": ["|O", [1], 0]}, [b"12345678"]),
    "numpy struct": build({"n": ["f4,f4", [1], 0]}, [b"12345678"]),
    "numpy scalar": build({"N": ["<f8", b"1"]}),
    "image": build({"P": [0]}, [b"\x89PNG\r\n\x1a\nnonsense"]),
    "tokenizer": build({"K": ["tokenizer", None, {"tokenizer.json": 0}]}, [b"nonsense"]),
    "tokenizer path": build({"K": ["tokenizer", None, {"../../x": 0}]}, [b"x\x9c\x03\x00\x00\x00\x00\x01"]),
    "code": build({"c": "no_colon"}),
    "code module": build({"c": "no_such_module_here:x"}),
    "code value": build({"c": "sys:path"}),
    "code through module": build({"c": "areal.infra.rpc.heavy:sys.exit"}),
    "code main": build({"c": {"main": "/no/such.py", "module": None, "name": "f"}}),
    "code main both": build({"c": {"main": None, "module": None, "name": "f"}}),
    "enum foreign": build({"e": ["socket:AddressFamily", "AF_INET"]}),
    "enum member": build({"e": ["areal.api.alloc_mode.strategy:AllocationType", "NOPE"]}),
    "enum class": build({"e": ["areal.api.io_struct:ModelRequest", "x"]}),
    "dataclass foreign": build({"o": ["dataclasses:Field", {"m": {}}]}),
    "dataclass fields": build({"o": ["areal.api.io_struct:StepInfo", {"epoch": 1}]}),
    "dataclass unknown field": build({"o": ["areal.api.remote:ObjectRef", {"name": "x", "extra": 1}]}),
    "dataclass through import": build({"o": ["areal.infra.rpc.heavy:tokenizers", {}]}),
    "dataclass of another module": build({"o": ["areal.infra.rpc.hosting:ObjectRef", {"name": "x"}]}),
    "dataclass refused": build({"o": ["areal.api.cli_args:NormConfig", {"eps": -1}]}),
    "no dataclass": build({"o": ["areal.infra.rpc.lanes:EngineLane", {}]}),
    "main module": build({"o": ["areal.__main__:X", {}]}),
    "marked": build({"v": ["areal.api.config.fields:DefaultInt", "text"]}),
    "integer": build({"i": "f" * 200_000}),
    "integer text": build({"i": "zz"}),
    "surrogates": build({"u": b"\xff\xff"}),
    "timestamp": build(datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)),
    "extension": build(msgspec.msgpack.Ext(5, b"x")),
    "parked": build({"p": 0}),
    "parked form": build({"p": 0}, parked=[["k"]]),
    "parked shape": build({"p": 0}, parked=[["k", "float32", [-1]]]),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_decode_malformed_message_raises_wire_error(name):
    with pytest.raises(WireError):
        decode(MALFORMED[name])


TYPES = ["float32", "bool", "<f4", "|O", "tokenizer"]
NAMES = ["areal.api.io_struct:StepInfo", "areal.api.remote:ObjectRef", "areal.x:y", "areal:areal"]
nodes = st.recursive(
    st.one_of(st.none(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(max_size=8), st.binary(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from("mdtsfbiu/evocTpnNyDPK?"), inner, min_size=1, max_size=1),
        st.tuples(st.sampled_from(TYPES), st.lists(inner, max_size=3), inner).map(list),
        st.tuples(st.sampled_from(NAMES), st.dictionaries(st.sampled_from(["name", "epoch"]), inner, max_size=2)).map(
            list
        ),
    ),
    max_leaves=12,
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(nodes, st.lists(st.binary(max_size=20), max_size=3), st.binary(max_size=4))
def test_decode_random_tree_gives_value_or_wire_error(tree, buffers, tail):
    data = build(tree, buffers) + tail

    with contextlib.suppress(WireError):
        decode(data)


def samples() -> list[bytes]:
    """Valid messages of every kind, to be damaged."""
    from areal.dataset.char_tokenizer import build_char_tokenizer

    kept = [
        PLAIN_VALUES,
        {"a": [1, 2, {"b": (3, "x" * 50)}], 5: {1, 2}},
        OUR_VALUES,
        TENSORS[:10],
        ARRAYS,
        [doubled, Counter, torch.float32, pathlib.Path("/x")],
        [Image.new("L", (5, 5))],
        [build_char_tokenizer()],
        b"z" * 3000,
    ]
    return [bytes(encode(value)) for value in kept] + [MALFORMED[name] for name in ("deep", "huge array", "sizes")]


def damaged(source: bytes, others: list[bytes], rng: random.Random) -> bytes:
    """One of several kinds of damage."""
    data = bytearray(source)
    kind = rng.randrange(6)
    if kind == 0:
        for _ in range(rng.randint(1, 8)):
            data[rng.randrange(len(data))] = rng.randrange(256)
    elif kind == 1:
        del data[rng.randrange(len(data)) :]
    elif kind == 2:
        start = rng.randrange(len(data))
        del data[start : start + rng.randint(1, 16)]
    elif kind == 3:
        start = rng.randrange(len(data))
        data[start:start] = rng.randbytes(rng.randint(1, 16))
    elif kind == 4:
        other = others[rng.randrange(len(others))]
        data = data[: rng.randrange(len(data))] + other[rng.randrange(len(other)) :]
    else:
        head = min(len(data), 300)  # the header is where it matters
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(min(8, head), head) if head > 8 else 0] ^= 1 << rng.randrange(8)
    return bytes(data)


def decode_damaged(count: int, seed: int) -> tuple[int, float]:
    """Decode that many damaged messages; returns how many were refused and the slowest, in seconds."""
    rng, sources = random.Random(seed), samples()
    refused, slowest = 0, 0.0
    for _ in range(count):
        data = damaged(sources[rng.randrange(len(sources))], sources, rng)
        began = time.perf_counter()
        try:
            decode(data)
        except WireError:
            refused += 1
        slowest = max(slowest, time.perf_counter() - began)
    return refused, slowest


@pytest.mark.filterwarnings("ignore")
def test_decode_damaged_messages_raise_only_wire_error():
    refused, slowest = decode_damaged(400, seed=0)

    assert refused > 100
    assert slowest < 5.0


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.filterwarnings("ignore")
def test_decode_20000_damaged_messages_neither_hang_nor_grow():
    decode_damaged(2000, seed=1)  # imports and caches
    before = psutil.Process().memory_info().rss

    refused, slowest = decode_damaged(20_000, seed=2)

    assert refused > 5_000
    assert slowest < 5.0
    assert psutil.Process().memory_info().rss - before < 100 << 20
