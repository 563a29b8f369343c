"""What every train engine does, written once: batches in, micro-batches, forward/backward, step, checkpoints.

A backend (``areal/engine/fsdp_engine.py`` and later ones) supplies its sharded model, its process groups and its
sharded checkpoint; everything else is here.
"""
