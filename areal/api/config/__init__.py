"""Configuration dataclasses, one module per owner; standard library only.

``areal.api.cli_args`` re-exports all of them together with the loader, and is where users import them from.
"""
