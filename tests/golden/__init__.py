"""Stored numbers of short deterministic training runs, and the code that makes them."""
