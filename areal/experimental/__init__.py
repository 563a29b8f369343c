"""Engines and models that are new: reached by import path from a registry, never imported by the layers below."""
