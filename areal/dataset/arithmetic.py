"""Procedural arithmetic: ``12+34=`` -> ``46``. No download, any size, and disjoint parts by construction.

All problems of a setting (``ops``, ``digits``, ``low``) are numbered, and a keyed permutation shuffles the numbers. A
dataset is the stretch ``[start, start + size)`` of that order, so datasets of one seed whose stretches do not overlap
have no problem in common. ``a+b`` and ``b+a`` count as two problems.

``dataset_kwargs`` (all optional): ``size`` (default: all that are left), ``start`` (default 0 for the split ``train``;
other splits end at the end of the order, so that they stay clear of a training set that starts at 0), ``seed``, ``ops``
(any of ``+-*``), ``digits``, ``low`` (smallest operand; default: the smallest number of ``digits`` digits),
``template``.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from areal.dataset.rows import (
    DatasetRequest,
    RowDataset,
    RowDict,
    encode_all,
    finish_rl,
    finish_sft,
    prompt_and_target,
    require_tokenizer,
    require_type,
    take_options,
)
from areal.utils.errors import DataError
from areal.utils.hf_utils import apply_chat_template

_SOLVE = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}
_DEFAULTS: dict[str, Any] = {
    "size": None,
    "start": None,
    "seed": 1,
    "ops": "+",
    "digits": 2,
    "low": None,
    "template": "{a}{op}{b}=",
}
_ROUNDS = 4


@dataclass(frozen=True)
class ArithmeticSpace:
    """All problems of one setting, in a seeded order.

    Args:
        ops: operators, any of ``+-*``.
        digits: digits of the largest operand.
        low: smallest operand.
        seed: of the order.
    """

    ops: str
    digits: int
    low: int
    seed: int

    @property
    def operands(self) -> int:
        """Number of values an operand can take."""
        return int(10**self.digits) - self.low

    def __len__(self) -> int:
        return len(self.ops) * self.operands**2

    def problem(self, position: int) -> tuple[int, str, int, int]:
        """``(a, op, b, result)`` at ``position`` of the seeded order."""
        number = permute(position, len(self), self.seed)
        number, b = divmod(number, self.operands)
        op, a = divmod(number, self.operands)
        a, b = a + self.low, b + self.low
        return a, self.ops[op], b, _SOLVE[self.ops[op]](a, b)


def permute(index: int, size: int, seed: int) -> int:
    """A keyed permutation of ``range(size)``: a Feistel network that walks on until it lands inside the range."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for r in range(_ROUNDS):
            digest = hashlib.sha256(f"{seed}/{r}/{right}".encode()).digest()
            left, right = right, left ^ (int.from_bytes(digest[:8], "big") & mask)
        index = left << half | right
        if index < size:
            return index


def build_arithmetic(request: DatasetRequest) -> RowDataset:
    """Rows ``{messages, answer}`` for RL, ``{input_ids, loss_mask}`` for supervised training.

    Supervised rows hold exactly the prompt tokens an RL workflow sends (chat template if the tokenizer has one), then
    the answer and eos.

    Raises:
        DataError: a setting is out of range, or the stretch leaves the problem space.
    """
    require_type(request)
    options = take_options(request, _DEFAULTS)
    space = _space(options, request.path)
    start, size = _stretch(options, request, len(space))
    rows = []
    for position in range(start, start + size):
        a, op, b, result = space.problem(position)
        text = options["template"].format(a=a, op=op, b=b)
        rows.append({"messages": [{"role": "user", "content": text}], "answer": str(result)})
    return finish_rl(rows, request) if request.type == "rl" else finish_sft(_supervised(rows, request), request)


def _space(options: dict[str, Any], path: str) -> ArithmeticSpace:
    ops, digits, low = str(options["ops"]), options["digits"], options["low"]
    if not ops or set(ops) - set(_SOLVE) or len(set(ops)) != len(ops):
        raise DataError(f"dataset {path!r}: ops={ops!r} must be distinct characters out of {''.join(_SOLVE)}")
    if not isinstance(digits, int) or not 1 <= digits <= 12:
        raise DataError(f"dataset {path!r}: digits={digits!r} must be a number from 1 to 12")
    if low is None:
        low = 0 if digits == 1 else 10 ** (digits - 1)
    if not isinstance(low, int) or not 0 <= low < 10**digits:
        raise DataError(f"dataset {path!r}: low={low!r} must be from 0 to {10**digits - 1}")
    return ArithmeticSpace(ops, digits, low, int(options["seed"]))


def _stretch(options: dict[str, Any], request: DatasetRequest, total: int) -> tuple[int, int]:
    start, size = options["start"], options["size"]
    if size is not None and (not isinstance(size, int) or size < 1):
        raise DataError(f"dataset {request.path!r}: size={size!r} must be a number >= 1")
    if start is None:
        if request.split == "train":
            start = 0
        elif size is None:
            raise DataError(f"dataset {request.path!r}: split {request.split!r} needs dataset_kwargs.size or start")
        else:
            start = total - size
    size = total - start if size is None else size
    if not isinstance(start, int) or start < 0 or size < 1 or start + size > total:
        raise DataError(f"dataset {request.path!r}: rows {start} to {start + size} lie outside its {total} problems")
    return start, size


def _supervised(rows: list[RowDict], request: DatasetRequest) -> list[RowDict]:
    tokenizer = require_tokenizer(request, "type=sft")
    if getattr(tokenizer, "chat_template", None) is None:
        prompts = encode_all(tokenizer, [row["messages"][0]["content"] for row in rows])
    else:
        prompts = [apply_chat_template(tokenizer, row["messages"], add_generation_prompt=True) for row in rows]
    answers = encode_all(tokenizer, [row["answer"] for row in rows], add_special_tokens=False)
    return [prompt_and_target(p, [*a, tokenizer.eos_token_id]) for p, a in zip(prompts, answers, strict=True)]
