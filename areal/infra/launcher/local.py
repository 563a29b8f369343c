"""``python -m areal.infra.launcher.local script.py --config c.yaml …``: every process is a child on this machine."""

from __future__ import annotations

import sys

from areal.infra.launcher.base import main
from areal.infra.scheduler.local import LocalScheduler

if __name__ == "__main__":
    sys.exit(main("local", LocalScheduler))
