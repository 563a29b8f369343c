"""Conversations with branches, and trees worked out by hand, for the tests of prefix sharing."""

from __future__ import annotations

import random

import torch

from areal.utils.batch import PackedBatch, pack
from tests.fakes import VOCAB


def branches(seed: int = 0, roots: int = 2) -> list[list[int]]:
    """For each root: a prompt, three answers of which two go on, and two continuations of each; one ends in between."""
    rng = random.Random(seed)

    def draw(low: int, high: int) -> list[int]:
        return [rng.randrange(2, VOCAB) for _ in range(rng.randint(low, high))]

    sequences = []
    for _ in range(roots):
        prompt = draw(6, 12)
        answers = [prompt + draw(3, 7) for _ in range(3)]
        turns = [answer + draw(2, 4) for answer in answers[:2]]
        leaves = [turn + draw(3, 6) for turn in turns for _ in range(2)]
        sequences += [answers[2], *leaves, turns[0]]
    return sequences


def packed(sequences: list[list[int]], prompt: int = 4, groups: list[int] | None = None) -> PackedBatch:
    """A batch whose positions from ``prompt - 1`` on are trained, but for the last of each sequence."""
    width = max(map(len, sequences))
    ids = torch.zeros(len(sequences), width, dtype=torch.int64)
    mask = torch.zeros(len(sequences), width, dtype=torch.bool)
    trained = torch.zeros_like(ids)
    for i, tokens in enumerate(sequences):
        ids[i, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        mask[i, : len(tokens)] = True
        trained[i, prompt - 1 : max(0, len(tokens) - 1)] = 1
    fields = {"input_ids": ids, "attention_mask": mask, "loss_mask": trained}
    if groups is not None:
        fields["group_id"] = torch.tensor(groups)
    return pack(fields)


def trie(sequences: list[list[int]]) -> tuple[list[tuple[int, ...]], list[int]]:
    """Distinct prefixes in the order in which they come, and the number of the prefix that each token ends."""
    rows: dict[tuple[int, ...], int] = {}
    source = [rows.setdefault(tuple(s[: i + 1]), len(rows)) for s in sequences for i in range(len(s))]
    return list(rows), source
