"""Mixture of experts: router, experts, the layer around them, and their Hugging Face names."""
