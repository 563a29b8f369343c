"""Signals as a terminal gives them, wherever the tests were started."""

from __future__ import annotations

import signal


def restore_default_signals() -> None:
    """Undo what a shell does to its background jobs: they, and all their children, ignore Ctrl-C and hang-ups.

    A program that finds a signal ignored leaves it so, hence tests that send one to a child would wait for ever.
    """
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
        (signal.SIGTERM, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
