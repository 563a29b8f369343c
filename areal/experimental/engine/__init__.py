"""Engines that are still being built."""
