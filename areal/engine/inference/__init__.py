"""Inference engines as workflows see them: a sampler plus the rollout executor."""
