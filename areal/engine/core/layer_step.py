"""AdamW whose moments live in host memory and visit the device one layer at a time.

In: named float32 leaves. Out: stepped leaves, bit-equal to one AdamW step over all of them. Built by
``engine/core/optimizer.py`` for ``fsdp.per_layer_optim_step``. On a GPU the device then holds the moments of
``prefetch + 1`` layers instead of all (8 bytes a parameter); copies run on a stream of their own. On a CPU the moments
are where they are needed already and nothing is copied.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

__all__ = ["LayerwiseAdamW", "group_by_layer"]

_LAYER = re.compile(r"^(.*?\.\d+)\.")
_MOMENTS = ("exp_avg", "exp_avg_sq")
_Moments = list[list[Tensor]]


def group_by_layer(names: Mapping[str, Tensor]) -> list[list[Tensor]]:
    """Leaves of one numbered block (``model.layers.3.``) together; the others one by one, in order."""
    layers: dict[str, list[Tensor]] = {}
    for name, leaf in names.items():
        found = _LAYER.match(name)
        layers.setdefault(found.group(1) if found else name, []).append(leaf)
    return list(layers.values())


class LayerwiseAdamW(torch.optim.Optimizer):
    """AdamW; state ``step``, ``exp_avg``, ``exp_avg_sq`` in (pinned) host memory.

    Args:
        shards: name to float32 leaf; names tell the layers apart.
        settings: ``lr``, ``betas``, ``eps``, ``weight_decay``.
        prefetch: layers fetched ahead of the one that steps, ≥ 0.
    """

    def __init__(self, shards: Mapping[str, Tensor], settings: dict[str, Any], prefetch: int) -> None:
        super().__init__(list(shards.values()), settings)
        self._layers = group_by_layer(shards)
        self._prefetch = prefetch
        on_gpu = any(leaf.device.type == "cuda" for leaf in shards.values())
        self._stream = torch.cuda.Stream() if on_gpu else None

    def new_state(self, leaf: Tensor) -> dict[str, Tensor]:
        """State of a leaf before its first step, on the host."""
        pin = leaf.device.type == "cuda"
        state = {name: torch.zeros(leaf.shape, dtype=leaf.dtype, pin_memory=pin) for name in _MOMENTS}
        return {"step": torch.zeros((), dtype=torch.float32), **state}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step of every leaf that has a gradient; ``closure`` must be None."""
        assert closure is None, "gradients come from the engine loop"
        layers = [[leaf for leaf in layer if leaf.grad is not None] for layer in self._layers]
        layers = [layer for layer in layers if layer]
        for leaves, moments in self._visiting(layers):
            self._step_layer(leaves, moments)
        if self._stream is not None:
            self._stream.synchronize()  # the host copies are whole before anyone reads them

    def _visiting(self, layers: list[list[Tensor]]) -> Iterator[tuple[list[Tensor], _Moments]]:
        """Each layer with its moments on the device, fetched ahead; they go back when the next is asked for."""
        waiting: deque[tuple[list[Tensor], _Moments, Any]] = deque()
        todo = iter(layers)
        for leaves in todo:
            waiting.append((leaves, *self._fetch(leaves)))
            if len(waiting) > self._prefetch:
                break
        while waiting:
            leaves, moments, ready = waiting.popleft()
            if ready is not None:
                torch.cuda.current_stream().wait_event(ready)
            yield leaves, moments
            self._send_back(leaves, moments)
            upcoming = next(todo, None)
            if upcoming is not None:
                waiting.append((upcoming, *self._fetch(upcoming)))

    def _fetch(self, leaves: list[Tensor]) -> tuple[_Moments, Any]:
        """Moments of ``leaves`` on their device, and the event after which they are there (None: now)."""
        for leaf in leaves:
            if not self.state[leaf]:
                self.state[leaf].update(self.new_state(leaf))
        host = [[self.state[leaf][name] for leaf in leaves] for name in _MOMENTS]
        if self._stream is None:
            return host, None
        with torch.cuda.stream(self._stream):
            moved = [[h.to(p.device, non_blocking=True) for h, p in zip(row, leaves, strict=True)] for row in host]
            return moved, self._stream.record_event()

    def _step_layer(self, leaves: list[Tensor], moments: _Moments) -> None:
        settings = self.param_groups[0]
        steps = [self.state[leaf]["step"] for leaf in leaves]
        if self._stream is not None:
            steps = [step.to(leaf.device) for step, leaf in zip(steps, leaves, strict=True)]
            for leaf in leaves:
                self.state[leaf]["step"] += 1
        adamw(
            leaves,
            [leaf.grad for leaf in leaves],
            moments[0],
            moments[1],
            [],
            steps,  # counted up by the kernel: on a CPU these are the states themselves
            fused=True,
            amsgrad=False,
            beta1=settings["betas"][0],
            beta2=settings["betas"][1],
            lr=settings["lr"],
            weight_decay=settings["weight_decay"],
            eps=settings["eps"],
            maximize=False,
        )

    def _send_back(self, leaves: list[Tensor], moments: _Moments) -> None:
        if self._stream is None:
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for name, row in zip(_MOMENTS, moments, strict=True):
                for leaf, moved in zip(leaves, row, strict=True):
                    self.state[leaf][name].copy_(moved, non_blocking=True)
