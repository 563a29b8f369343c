"""Roles of the PPO family: the policy (``actor``), its advantages and its statistics. Each holds an engine."""
