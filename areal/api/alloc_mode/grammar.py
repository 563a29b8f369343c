"""Parser of allocation strings: text to components, nothing interpreted.

In: ``"sglang[rollout]:d2+fsdp[actor]:d4|fsdp[critic]:d4"``. Out: groups of :class:`Component` (here: one group of one
component and one of two). Called by ``areal.api.alloc_mode.strategy``. Whitespace is ignored
everywhere; matching is case sensitive.

    text      := group ( "+" group )*                   separate devices
    group     := component ( "|" component )*           share the devices of the first one
    component := inference | training
    inference := ("sglang"|"vllm"|"native") [ "[" NAME "]" ] ":" (d|t|p)N ...
    training  := ("fsdp"|"megatron"|"archon") [ "[" NAME "]" ] ":" (d|t|p|c|e)N ...
               | ("fsdp"|"megatron"|"archon") ":" [ "(" ] "attn:" (d|t|p|c)N ... "|" "ffn:" (d|t|p|e)N ... [ ")" ]
    N         := [1-9][0-9]*
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from areal.utils.errors import ConfigError

INFERENCE_BACKENDS = ("native", "vllm", "sglang")
TRAIN_BACKENDS = ("fsdp", "archon", "megatron")


class AllocationSyntaxError(ConfigError):
    """The text does not follow the grammar."""


@dataclass(frozen=True)
class Component:
    """One parsed component.

    Attributes:
        backend: parsed prefix; None when the text has none.
        name: role in square brackets, if any.
        dims: size by letter; the attention part of a hybrid layout.
        ffn: size by letter of the feed-forward part, None unless hybrid.
    """

    backend: str | None
    name: str | None
    dims: dict[str, int]
    ffn: dict[str, int] | None = None


def _dims(letters: str) -> str:
    return rf"(?:[{letters}][1-9][0-9]*)+"


_NAME = r"(?:\[(?P<name>[A-Za-z_][A-Za-z0-9_]*)\])"
_TRAIN = "|".join(TRAIN_BACKENDS)
_INFERENCE_FORM = re.compile(rf"(?P<backend>{'|'.join(INFERENCE_BACKENDS)}){_NAME}?:(?P<dims>{_dims('dtp')})")
_TRAINING_FORM = re.compile(rf"(?P<backend>{_TRAIN}){_NAME}?:(?P<dims>{_dims('dtpce')})")
_HYBRID_FORM = re.compile(
    rf"(?:(?P<backend>{_TRAIN}){_NAME}?:)?\(?attn:(?P<dims>{_dims('dtpc')})\|ffn:(?P<ffn>{_dims('dtpe')})\)?"
)
_BARE_FORM = re.compile(rf"(?:{_NAME}:)?(?P<dims>{_dims('dtpce')})")


def parse(text: str) -> list[list[Component]]:
    """Parse ``text`` into groups of components.

    Raises:
        AllocationSyntaxError: the text does not follow the grammar.
    """
    compact = re.sub(r"\s+", "", text)
    return [[_component(part, text) for part in _split_group(group)] for group in compact.split("+")]


def _split_group(group: str) -> list[str]:
    """Split at ``|``, except at the one inside a hybrid layout."""
    parts: list[str] = []
    for part in group.split("|"):
        if part.startswith("ffn:") and parts:
            parts[-1] = f"{parts[-1]}|{part}"
        else:
            parts.append(part)
    return parts


def _component(part: str, text: str) -> Component:
    for form in (_INFERENCE_FORM, _TRAINING_FORM, _HYBRID_FORM, _BARE_FORM):
        match = form.fullmatch(part)
        if match is None:
            continue
        found = match.groupdict()
        if found.get("ffn") and found["name"]:
            raise AllocationSyntaxError(f"{text!r}: a name cannot be combined with a hybrid (attn|ffn) layout")
        ffn = _sizes(found["ffn"]) if found.get("ffn") else None
        return Component(found.get("backend"), found["name"], _sizes(found["dims"]), ffn)
    raise AllocationSyntaxError(
        f"{text!r}: cannot read {part!r}; expected backend, colon, sizes, such as 'fsdp:d4' or 'vllm:d2t4'. Backends: "
        f"{', '.join(INFERENCE_BACKENDS)} with d, t, p; {', '.join(TRAIN_BACKENDS)} with d, t, p, c, e"
    )


def _sizes(dims: str) -> dict[str, int]:
    """Read ``d4t2``; a repeated letter keeps its last value."""
    return {letter: int(size) for letter, size in re.findall(r"([a-z])([0-9]+)", dims)}
