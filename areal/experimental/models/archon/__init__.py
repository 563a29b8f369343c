"""Archon: model families in plain PyTorch, one file to read each, and their Hugging Face names.

Importing the package registers every family; ``model_spec.get_model_spec`` finds them. Read ``base.py`` first.
"""

from areal.experimental.models.archon import llama, qwen2, qwen3

__all__ = ["llama", "qwen2", "qwen3"]
