"""The nightly tier: whole runs, far beyond a fast test. ``python -m tests.full --help``; ``make full`` runs everything.

``table.py`` lists the cells; ``runner.py`` runs each in a process of its own and writes the JSON summary.
"""
