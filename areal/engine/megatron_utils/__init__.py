"""What the Megatron engine is made of; see ``areal/engine/megatron_engine.py``."""
