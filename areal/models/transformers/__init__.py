"""Additions to Hugging Face transformers models (attention for packed batches)."""
