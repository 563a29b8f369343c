"""Values that a section takes from the root or from the actor when the user did not write them.

In: an experiment root. Out: the same object, filled in place; calling it twice changes nothing. Called by the roots'
``__post_init__`` and, for user roots that do not call it, by ``areal.api.config_loader``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from areal.api.config.fields import MISSING, is_default, is_section

_FOLLOWERS = ("ref", "critic", "teacher")


def inherit(root: Any) -> None:
    """Fill names, paths and followed values of the sections of ``root``.

    - ``experiment_name``, ``trial_name``, ``fileroot`` of every section: the root's and ``cluster.fileroot``;
    - ``tokenizer_path``, then ``rollout.tokenizer_path``, ``vllm.model``, ``sglang.model_path``: the actor's path;
    - ``vllm.dtype``, ``sglang.dtype``: the actor's;
    - ``ref``, ``critic``, ``teacher``: the actor's backend, dtype, attention and temperature; the first two its path;
    - ``actor.temperature``, ``actor.max_new_tokens``: those of ``gconfig``;
    - ``rollout.consumer_batch_size``: ``train_dataset.batch_size``.
    """
    for spec in dataclasses.fields(root):
        part = getattr(root, spec.name)
        if is_section(part):
            _fill(part, "experiment_name", root.experiment_name)
            _fill(part, "trial_name", root.trial_name)
            if spec.name != "cluster":
                _fill(part, "fileroot", root.cluster.fileroot)
    actor = getattr(root, "actor", None)
    if not is_section(actor):
        return
    _follow_generation(root, actor)
    for name in _FOLLOWERS:
        follower = getattr(root, name, None)
        if is_section(follower):
            _follow_actor(follower, actor, with_path=name != "teacher")
    _fill(root, "tokenizer_path", actor.path)
    for section_name, field_name in (("rollout", "tokenizer_path"), ("vllm", "model"), ("sglang", "model_path")):
        part = getattr(root, section_name, None)
        if is_section(part):
            _fill(part, field_name, root.tokenizer_path if section_name == "rollout" else actor.path)
            if section_name != "rollout":
                _follow(part, "dtype", actor.dtype)


def _fill(part: Any, name: str, value: str) -> None:
    """Set ``part.name`` to ``value`` if the section has that field and nothing was given for it."""
    if hasattr(part, name) and getattr(part, name) in (MISSING, None, "") and value not in (MISSING, ""):
        setattr(part, name, value)


def _follow(part: Any, name: str, value: Any) -> None:
    """Set ``part.name`` to ``value`` if it still holds a default that nobody wrote."""
    if is_default(getattr(part, name, None)):
        setattr(part, name, value)


def _follow_generation(root: Any, actor: Any) -> None:
    gconfig = getattr(root, "gconfig", None)
    if is_section(gconfig):
        if gconfig.temperature > 0:
            _follow(actor, "temperature", gconfig.temperature)
        _follow(actor, "max_new_tokens", max(1, gconfig.max_new_tokens))
    rollout = getattr(root, "rollout", None)
    if is_section(rollout):
        _follow(rollout, "consumer_batch_size", root.train_dataset.batch_size)


def _follow_actor(follower: Any, actor: Any, *, with_path: bool) -> None:
    _fill(follower, "backend", actor.backend)
    if with_path:
        _fill(follower, "path", actor.path)
    for name in ("dtype", "attn_impl", "temperature"):
        _follow(follower, name, getattr(actor, name))
