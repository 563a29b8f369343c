"""Chaos: runs in worker processes whose workers, or whose controller, are killed at seeded moments.

``scenario`` draws what happens, ``controller`` is the run (a process of its own), ``play`` starts it and strikes,
``traces`` looks for leftovers, ``books`` adds up what was trained, ``seeds`` puts it together. Three seeds run in CI
(``test_chaos_seeds.py``), twenty in ``make full``.
"""
