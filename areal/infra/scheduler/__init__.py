"""Schedulers: who hosts the objects of a run."""
