"""Execution: rollout, schedulers, weight updates."""
