"""Hugging Face tokenizers and processors in messages: the files they save, compressed, and the name they came from.

The files are what counts: a tokenizer that was changed after loading arrives as it is, and no file system need be
shared. Both sides remember what they packed or loaded, so that a tokenizer sent with many requests costs once.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from areal.infra.rpc.errors import WireError

MAX_FILES = 64
MAX_FILE_BYTES = 128 << 20  # of one file, unpacked
_KEPT = 8

_lock = threading.Lock()
_packed: OrderedDict[tuple[Any, ...], tuple[Any, dict[str, bytes]]] = OrderedDict()
_loaded: OrderedDict[str, Any] = OrderedDict()


def pack(value: Any, add: Callable[[memoryview], int]) -> dict[str, Any] | None:
    """The node of a tokenizer or processor; None for anything else."""
    kind = _kind(value)
    if kind is None:
        return None
    files = _saved_files(value)
    name = getattr(value, "name_or_path", None)
    numbered = {file: add(memoryview(data)) for file, data in files.items()}
    return {"K": [kind, name if isinstance(name, str) else None, numbered]}


def unpack(content: Any, get: Callable[[Any], memoryview]) -> Any:
    """The tokenizer or processor of a node; the same object as before when the files are the same."""
    kind, name, numbered = content
    if kind not in ("tokenizer", "processor") or not isinstance(numbered, dict) or len(numbered) > MAX_FILES:
        raise WireError("malformed tokenizer")
    files = {file: bytes(get(number)) for file, number in numbered.items()}
    digest = hashlib.sha256(repr((kind, name)).encode())
    for file, data in sorted(files.items()):
        digest.update(repr((file, len(data))).encode() + data)
    with _lock:
        key = digest.hexdigest()
        if key not in _loaded:
            _remember(_loaded, key, _load(kind, files))
            if isinstance(name, str) and kind == "tokenizer":
                _loaded[key].name_or_path = name
        return _loaded[key]


def _kind(value: Any) -> str | None:
    if "transformers" not in sys.modules or not hasattr(type(value), "save_pretrained"):
        return None
    from transformers import PreTrainedTokenizerBase
    from transformers.processing_utils import ProcessorMixin

    if isinstance(value, PreTrainedTokenizerBase):
        return "tokenizer"
    return "processor" if isinstance(value, ProcessorMixin) else None


def _saved_files(value: Any) -> dict[str, bytes]:
    inner = getattr(value, "tokenizer", value)
    key = (id(value), len(inner), str(getattr(inner, "chat_template", None)), str(inner.special_tokens_map))
    with _lock:
        entry = _packed.get(key)
        if entry is not None and entry[0] is value:
            return entry[1]
    with tempfile.TemporaryDirectory(prefix="areal-tokenizer-") as directory:
        value.save_pretrained(directory)
        paths = [path for path in sorted(Path(directory).rglob("*")) if path.is_file()]
        files = {str(path.relative_to(directory)): zlib.compress(path.read_bytes(), 1) for path in paths}
    with _lock:
        _remember(_packed, key, (value, files))
    return files


def _load(kind: str, files: dict[str, bytes]) -> Any:
    from transformers import AutoProcessor, AutoTokenizer

    with tempfile.TemporaryDirectory(prefix="areal-tokenizer-") as directory:
        root = Path(directory).resolve()
        for file, data in files.items():
            target = (root / file).resolve()
            if root not in target.parents:
                raise WireError(f"tokenizer file {file!r} leads out of its directory")
            unpacker = zlib.decompressobj()
            text = unpacker.decompress(data, MAX_FILE_BYTES)
            if not unpacker.eof:
                raise WireError(f"tokenizer file {file!r} is cut off or larger than {MAX_FILE_BYTES} bytes")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(text)
        loader = AutoTokenizer if kind == "tokenizer" else AutoProcessor
        try:
            return loader.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as exc:  # noqa: BLE001 - the library's Rust part panics with a BaseException
            raise WireError(f"the {kind} cannot be loaded from its files ({type(exc).__name__}: {exc})") from exc


def _remember(cache: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    cache[key] = value
    while len(cache) > _KEPT:
        cache.popitem(last=False)
