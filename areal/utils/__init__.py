"""Cross-cutting helpers: the lowest layer of run-time code.

Modules here import the standard library, third-party packages, ``areal.api.io_struct`` and ``areal.api.config`` only.
Nothing is imported eagerly: ``from areal.utils import logging`` loads the logging module and nothing else.
"""
