"""Writes what the CPU variants here need: a tiny model, preference pairs and conversations. No download.

    python examples/alignment/make_toy_data.py [DIRECTORY]

The preference is planted: of two answers to a sum, the right one is preferred to one that is ten too large. A
conversation asks for two sums, one after the other.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from areal.dataset.char_tokenizer import VOCAB_SIZE, build_char_tokenizer

DEFAULT = "outputs/alignment/toy"
SPLITS = {"train": 2000, "test": 200}


def save_model(path: Path) -> None:
    """A randomly initialised model of 0.2 million parameters and its character tokenizer."""
    tokenizer = build_char_tokenizer()
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(1)
    Qwen2ForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)


def pairs(draw: random.Random, n: int) -> Iterator[dict[str, Any]]:
    """Rows with ``prompt``, ``chosen`` and ``rejected``."""
    for _ in range(n):
        a, b = draw.randrange(10), draw.randrange(10)
        yield {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 10)}


def conversations(draw: random.Random, n: int) -> Iterator[dict[str, Any]]:
    """Rows with ``messages`` of two turns each."""
    for _ in range(n):
        messages = []
        for _ in range(2):
            a, b = draw.randrange(10), draw.randrange(10)
            messages += [{"role": "user", "content": f"{a}+{b}="}, {"role": "assistant", "content": str(a + b)}]
        yield {"messages": messages}


def main(root: Path) -> None:
    """Write everything under ``root``."""
    save_model(root / "model")
    for name, make in (("pairs", pairs), ("chat", conversations)):
        (root / name).mkdir(parents=True, exist_ok=True)
        for split, size in SPLITS.items():
            rows = make(random.Random(f"{name}/{split}"), size)
            (root / name / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else DEFAULT))
