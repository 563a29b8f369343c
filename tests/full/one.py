"""Runs one cell in this process and writes what came of it as JSON; started by ``runner.py``.

python -m tests.full.one '{"name": ..., "kind": ..., "function": ..., "args": {...}}' --work DIR --shared DIR
    --result FILE
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from pathlib import Path

from areal.utils.dynamic_import import import_from_string
from tests.full.cell import Cell, CellContext
from tests.signals import restore_default_signals


def main(argv: list[str]) -> int:
    """Run the cell; 0 if everything held."""
    parser = argparse.ArgumentParser()
    parser.add_argument("cell", type=json.loads)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--shared", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args(argv)
    cell = Cell(**options.cell)
    context = CellContext(options.work, options.shared)
    restore_default_signals()
    try:
        import_from_string(cell.function)(context, **cell.args)
    except Exception as error:  # noqa: BLE001 - a cell ends here; the summary says how
        traceback.print_exc()
        context.failures.append(f"{type(error).__name__}: {error}")
    result = {"facts": context.facts, "failures": context.failures}
    options.result.write_text(json.dumps(result, indent=1, default=str) + "\n")
    return 1 if context.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
