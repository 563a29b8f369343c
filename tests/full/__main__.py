"""The nightly tier's command: ``python -m tests.full [--kinds accuracy,chaos,kill] [--only PATTERN] [--seeds N]``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tests.full.runner import Runner, select
from tests.full.table import SEEDS, build_table


def main(argv: list[str]) -> int:
    """Run the selected cells; 0 if all passed, 1 if one failed, 2 if the selection is empty or wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.full", description=__doc__)
    parser.add_argument("--kinds", default="", help="kinds to run, separated by commas; default: all")
    parser.add_argument("--only", metavar="PATTERN", help="cells whose name contains PATTERN or matches it as a glob")
    parser.add_argument("--seeds", type=int, default=SEEDS, metavar="N", help="chaos and kill runs, each (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("outputs/full/summary.json"), help="summary (%(default)s)")
    parser.add_argument("--reuse", action="store_true", help="keep the warm start and reference run of an earlier call")
    parser.add_argument("--list", action="store_true", help="print the names of the selected cells and stop")
    options = parser.parse_args(argv)
    table = build_table(options.seeds)
    known = list(dict.fromkeys(cell.kind for cell in table))
    kinds = [kind for kind in options.kinds.split(",") if kind]
    if unknown := [kind for kind in kinds if kind not in known]:
        parser.error(f"--kinds {','.join(unknown)}: known kinds are {', '.join(known)}")
    cells = select(table, options.only, kinds)
    if not cells:
        parser.error("no cell is selected; --list shows the names")
    if options.list:
        print(*(cell.name for cell in cells), sep="\n")
        return 0
    summary = Runner(options.out, reuse=options.reuse, say=say).run(cells)
    print(json.dumps(summary, indent=1))
    say(f"{summary['passed']} of {len(cells)} cells passed in {summary['seconds']:.0f} s; summary: {options.out}")
    return 0 if summary["failed"] == 0 else 1


def say(line: str) -> None:
    """Progress goes to standard error, so that standard output is the JSON summary alone."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
