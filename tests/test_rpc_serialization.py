"""Messages: every type comes back as it was, what cannot travel says why, and malformed bytes raise only WireError."""

from __future__ import annotations

import collections
import enum
import pathlib
import struct
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from areal.api.alloc_mode import AllocationType, ModelAllocation
from areal.api.cli_args import GenerationHyperparameters, InferenceEngineConfig
from areal.api.config.fields import is_default
from areal.api.io_struct import ModelRequest, StepInfo, WeightUpdateMeta
from areal.api.remote import ObjectRef
from areal.infra.rpc.errors import WireError
from areal.infra.rpc.rtensor import RTensor
from areal.infra.rpc.serialization import Message, Parked, decode, encode
from tests.rpc_fakes import Counter, doubled


def there_and_back(value: Any) -> Any:
    return decode(bytearray(bytes(encode(value))))


PLAIN_VALUES = [
    None,
    True,
    0,
    -1,
    2**63,
    2**64 - 1,
    2**64,
    -(2**63) - 1,
    10**400,
    1.5,
    float("inf"),
    "",
    "text \u20ac",
    "lone \ud800 surrogate",
    b"",
    b"short",
    b"long" * 1000,
    [],
    [1, "a", None, 2.5],
    [[1], [2, [3]]],
    (),
    (1, (2,)),
    {},
    {"a": 1, "b": {"c": [1, 2]}},
    {1: "a", (2, 3): "b", None: 4, "x": 5, b"k": 6},
    {"m": 1},
    {"T": [1, 2, 3]},
    {1, 2, 3},
    frozenset({"a"}),
    pathlib.Path("/a/b c"),
    [2**70, "\ud800", {"\ud801": 2**70}],
]


@pytest.mark.parametrize("value", PLAIN_VALUES, ids=lambda v: repr(v)[:30])
def test_round_trip_plain_value_keeps_value_and_type(value):
    result = there_and_back(value)

    assert result == value
    assert type(result) is type(value)


def test_round_trip_nan_and_bool_in_list_keep_types():
    result = there_and_back([float("nan"), True, 1, 1.0])

    assert result[0] != result[0]
    assert [type(x) for x in result] == [float, bool, int, float]


OUR_VALUES = [
    ModelRequest(input_ids=[1, 2], metadata={"a": (1,)}, image_data=None, order=(1, 2)),
    StepInfo(1, 2, 3, 4),
    GenerationHyperparameters(n_samples=4),
    InferenceEngineConfig(backend="native:d1"),
    ModelAllocation.from_str("fsdp:d2t2", name="actor"),
    WeightUpdateMeta(type="disk", path="/x"),
    ObjectRef("rollout"),
    RTensor("id", "127.0.0.1:1", "bfloat16", (2, 3), 6),
    next(iter(AllocationType)),
]


@pytest.mark.parametrize("value", OUR_VALUES, ids=lambda v: type(v).__name__)
def test_round_trip_own_type_is_equal(value):
    result = there_and_back({"x": [value]})["x"][0]

    assert result == value
    assert type(result) is type(value)


def test_round_trip_marked_default_keeps_its_mark():
    from areal.api.config.fields import DefaultStr

    result = there_and_back([DefaultStr("sdpa"), "sdpa"])

    assert result == ["sdpa", "sdpa"]
    assert [is_default(x) for x in result] == [True, False]


TENSORS = [
    torch.randn(3, 4),
    torch.randn(3, 4, dtype=torch.bfloat16).t(),
    torch.randn(10)[::2],
    torch.tensor(True),
    torch.tensor(7),
    torch.empty(0, 3),
    torch.tensor([[True, False], [False, True]]),
    torch.tensor([1 + 2j, 3 - 1j]).conj(),
    torch.arange(4).to(torch.uint16),
    torch.randn(3).to(torch.float8_e4m3fn),
    torch.nn.Parameter(torch.randn(2)),
    torch.randn(100_000),
]


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda t: f"{t.dtype}{tuple(t.shape)}")
def test_round_trip_tensor_keeps_type_shape_and_bits(tensor):
    result = there_and_back([tensor])[0]

    assert result.dtype == tensor.dtype
    assert result.shape == tensor.shape
    as_bytes = [t.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8) for t in (result, tensor)]
    assert torch.equal(*as_bytes)


def test_decode_writable_message_uses_its_memory():
    data = bytearray(bytes(encode(torch.zeros(1000))))

    result = decode(data)
    result.fill_(1.0)

    assert bytes(data).count(struct.pack("<f", 1.0)) == 1000


def test_decode_read_only_message_gives_writable_tensor_without_warning(recwarn):
    result = decode(bytes(encode(torch.zeros(10))))

    result += 1
    assert result.sum() == 10
    assert not recwarn.list


def test_encode_same_tensor_twice_sends_it_once():
    tensor = torch.randn(1000)

    message = encode([tensor, tensor])
    first, second = decode(bytes(message))

    assert len(message.buffers) == 1
    assert first is second


def test_encode_large_tensor_does_not_copy_it():
    tensor = torch.zeros(1000)

    message = encode(tensor)
    tensor.fill_(1.0)

    assert torch.equal(decode(bytes(message)), torch.ones(1000))


ARRAYS = [
    np.arange(6).reshape(2, 3),
    np.float32(2.5),
    np.float64(2.5),
    np.bool_(True),
    np.array("2020-01-01", dtype="datetime64[D]"),
    np.array(["ab", "c"]),
    np.zeros((0, 3)),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.array(5),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda a: f"{a.dtype}{a.shape}")
def test_round_trip_numpy_keeps_type_and_values(array):
    result = there_and_back(array)

    assert type(result) is type(array)
    assert result.dtype == array.dtype
    np.testing.assert_array_equal(result, array)


def test_round_trip_other_heavy_values():
    picture = Image.new("RGB", (4, 3), (1, 2, 3))

    result = there_and_back([torch.bfloat16, torch.device("cpu"), picture])

    assert result[:2] == [torch.bfloat16, torch.device("cpu")]
    assert result[2].tobytes() == picture.tobytes()


def test_round_trip_tokenizer_gives_same_tokens_and_name():
    from areal.dataset.char_tokenizer import build_char_tokenizer

    tokenizer = build_char_tokenizer()
    tokenizer.name_or_path = "somewhere/char"
    data = bytes(encode({"tokenizer": tokenizer}))

    result = decode(data)["tokenizer"]

    assert result.encode("1+2=") == tokenizer.encode("1+2=")
    assert result.chat_template == tokenizer.chat_template
    assert result.name_or_path == "somewhere/char"
    assert decode(data)["tokenizer"] is result


@pytest.mark.parametrize("code", [doubled, Counter, Counter.add, len, dict, torch.nn.Linear])
def test_round_trip_code_is_the_same_object(code):
    assert there_and_back(code) is code


def test_round_trip_containers_of_other_classes_become_plain():
    pair = collections.namedtuple("pair", "a b")

    result = there_and_back([collections.OrderedDict(a=1), pair(1, 2), torch.Size([2, 3]), bytearray(b"x")])

    assert result == [{"a": 1}, (1, 2), (2, 3), b"x"]
    assert [type(x) for x in result] == [dict, tuple, tuple, bytes]


def test_round_trip_process_handle_becomes_none():
    process = subprocess.Popen([sys.executable, "-c", "pass"])

    assert there_and_back({"process": process}) == {"process": None}
    process.wait()


class Colour(enum.Enum):
    RED = 1


@dataclass
class Foreign:
    x: int = 0


def make_closure():
    return lambda: None


LOOP: list[Any] = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (lambda: 0, "lambda"),
        (make_closure(), "top level"),
        (object(), "builtins.object"),
        (Foreign(), "only those of areal"),
        (Colour.RED, "only those of areal"),
        (LOOP, "nested deeper"),
        (torch.zeros(2, device="meta"), "dense"),
        (torch.zeros(2, 2).to_sparse(), "dense"),
        (np.array([object()]), "numpy"),
        (Image.new("CMYK", (2, 2)), "convert"),
        (Counter().add, "cannot be sent"),
    ],
    ids=lambda v: str(v)[:20],
)
def test_encode_value_that_cannot_travel_says_why(value, says):
    with pytest.raises(WireError, match=says):
        encode({"a": [value]})


def test_encode_with_park_puts_only_large_tensors_aside_once():
    large, small = torch.randn(100_000), torch.randn(10)
    parked = {}

    def park(tensor: torch.Tensor) -> Parked:
        parked[f"k{len(parked)}"] = tensor
        return Parked(f"k{len(parked) - 1}", "float32", tuple(tensor.shape))

    message = encode([large, small, large, 2**70], park=park)  # the long integer makes a second pass
    result = decode(bytes(message), fetch=lambda wanted: [parked[p.key] for p in wanted])

    assert list(parked) == ["k0"]
    assert result[0] is result[2] is large
    assert message.nbytes < 1000
    assert len(bytes(message)) == message.nbytes


def test_encode_many_small_tensors_parks_those_above_the_inline_limit():
    parked = []

    def park(tensor: torch.Tensor) -> Parked:
        parked.append(tensor)
        return Parked(f"k{len(parked)}", "float32", tuple(tensor.shape))

    message = encode([torch.zeros(10_000) for _ in range(400)], park=park)

    assert message.nbytes < 9 << 20
    assert len(parked) + len(message.buffers) == 400


def test_decode_parked_tensor_without_stream_is_refused():
    message = encode(torch.zeros(100_000), park=lambda t: Parked("k", "float32", (100_000,)))

    with pytest.raises(WireError, match="stream"):
        decode(bytes(message))


keys = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5), st.binary(max_size=5))
values = st.recursive(
    st.one_of(keys, st.floats(allow_nan=False), st.binary(max_size=400)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=5), st.lists(inner, max_size=5).map(tuple), st.dictionaries(keys, inner, max_size=5)
    ),
    max_leaves=20,
)


@settings(max_examples=300, deadline=None)
@given(values)
def test_round_trip_any_nested_value_is_equal(value):
    assert there_and_back(value) == value


def test_message_parts_are_the_message():
    message = encode([b"x" * 300, torch.zeros(5)])

    assert isinstance(message, Message)
    assert b"".join(message.parts()) == bytes(message)
    assert len(bytes(message)) == message.nbytes


def test_import_serialization_loads_no_torch():
    code = (
        "import sys; from areal.infra.rpc.serialization import decode, encode; from areal.infra.rpc import rpc_server;"
        "assert decode(bytes(encode({'a': [1, (2,)]}))) == {'a': [1, (2,)]};"
        "print([m for m in ('torch', 'numpy', 'transformers', 'PIL') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)

    assert done.stdout.strip() == "[]", done.stderr
