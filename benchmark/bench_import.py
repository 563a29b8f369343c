"""Start-up time: ``import areal`` and ``areal --help`` against a bare ``python -c pass``; neither may load torch.

Usage: python benchmark/bench_import.py [--repeats N]
"""

from __future__ import annotations

import subprocess
import sys
import time

from common import alternate, arguments, emit, ratio, summary

HELP = "import sys; sys.argv = ['areal', '--help']; from areal.cli import main; main()"
COMMANDS = {
    "bare": [sys.executable, "-c", "pass"],
    "import_areal": [sys.executable, "-c", "import areal"],
    "areal_help": [sys.executable, "-c", HELP],
}
LIMIT_RATIO = 10.0
LIMIT_S = 0.5


def seconds(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def loads_torch(command: list[str]) -> bool:
    """Runs the command's code with an exit hook that reports whether torch was loaded."""
    code = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr)); " + command[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stderr.strip().splitlines()[-1] == "True"


def main() -> int:
    parser = arguments("Start-up time of the package and of its command line.")
    parser.set_defaults(repeats=15)
    args = parser.parse_args()
    for command in COMMANDS.values():
        seconds(command)  # files into the page cache, bytecode written
    measured = alternate({name: lambda c=command: seconds(c) for name, command in COMMANDS.items()}, args.repeats)
    result: dict = {"seconds": {name: summary(values) for name, values in measured.items()}, "passed": True}
    for name in ("import_areal", "areal_help"):
        times = ratio(measured[name], measured["bare"])
        torch_loaded = loads_torch(COMMANDS[name])
        result[name] = {"ratio_to_bare": times, "loads_torch": torch_loaded}
        fast = times["median"] <= LIMIT_RATIO and result["seconds"][name]["median"] < LIMIT_S
        result["passed"] = result["passed"] and fast and not torch_loaded
    result["target"] = f"ratio <= {LIMIT_RATIO:g}, < {LIMIT_S:g} s, no torch"
    emit("import", result, args.out)
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
