"""Sequences with common beginnings as one tree: its layout, its attention, and batches cut by its size."""

from areal.models.tree.prefix_tree import PrefixTree, allocate_trees, build_prefix_tree, shared_tokens
from areal.models.tree.tree_attention import TreeAttention

__all__ = ["PrefixTree", "TreeAttention", "allocate_trees", "build_prefix_tree", "shared_tokens"]
