"""Writes the golden numbers anew: ``python -m tests.golden.regenerate``. Say in the commit why they changed."""

from __future__ import annotations

import json

from tests.golden.runs import RUNS, golden_file, run_golden


def main() -> None:
    """Run each and store it."""
    for name in RUNS:
        golden_file(name).write_text(json.dumps(run_golden(name), indent=1) + "\n")
        print(golden_file(name))


if __name__ == "__main__":
    main()
