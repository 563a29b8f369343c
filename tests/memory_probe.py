"""Memory of this process as the kernel counts it."""

from __future__ import annotations

import threading
import time
from pathlib import Path


def rss_anon() -> int:
    """Bytes of anonymous memory that are resident: what a process made itself, without mapped files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise OSError("no RssAnon in /proc/self/status")


class PeakRssAnon:
    """Context in which the anonymous memory is sampled; ``growth`` is the peak above the start, in bytes."""

    growth = 0

    def __enter__(self) -> PeakRssAnon:
        self._start, self._done = rss_anon(), threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        self._thread.join()
        self.growth = max(self.growth, rss_anon() - self._start)

    def _sample(self) -> None:
        while not self._done.is_set():
            self.growth = max(self.growth, rss_anon() - self._start)
            time.sleep(0.001)
