"""Checks that files, functions, classes and contracts stay within the sizes of the style guide.

In: Python files below the given directories (parsed with ``ast``) and ``tools/size_exceptions.txt``. Out: one line
per violation, exit code 1 if a hard limit is broken or an exception is not needed any more. Called by
``tools/check.sh``, the pre-commit hook and tests/test_project_checks.py.

Counting: a file's lines are its physical lines; a function's are from ``def`` to its end without its docstring; a
class's methods are the ``def`` in its body without overloads; a contract is a Protocol or has abstract methods.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDERS = ("areal", "tests", "examples", "benchmark", "docs", "tools")
# kind: (soft, hard) limit. Files are limited everywhere, the rest in the package only.
LIMITS = {"file": (300, 500), "function": (40, 80), "class": (12, 20), "contract": (12, 12)}
UNITS = {"file": "lines", "function": "lines", "class": "methods", "contract": "methods"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Size:
    """One measured thing. ``name`` is ``path`` or ``path::Qualified.name``."""

    name: str
    kind: str
    value: int
    line: int


def _decorators(node: Function) -> set[str]:
    names = set()
    for decorator in node.decorator_list:
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        names.add(target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", ""))
    return names


def _function_lines(node: Function) -> int:
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    if ast.get_docstring(node, clean=False) is not None:
        docstring = node.body[0]
        lines -= (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1
    return lines


def _is_contract(node: ast.ClassDef, methods: list[Function]) -> bool:
    bases = {base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "") for base in node.bases}
    return "Protocol" in bases or any("abstractmethod" in _decorators(method) for method in methods)


def _walk(node: ast.AST, prefix: str) -> Iterator[Size]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            name = f"{prefix}{child.name}"
            methods = [m for m in child.body if isinstance(m, Function) and "overload" not in _decorators(m)]
            kind = "contract" if _is_contract(child, methods) else "class"
            yield Size(name, kind, len(methods), child.lineno)
            yield from _walk(child, f"{name}.")
        elif isinstance(child, Function):
            name = f"{prefix}{child.name}"
            yield Size(name, "function", _function_lines(child), child.lineno)
            yield from _walk(child, f"{name}.")
        else:
            yield from _walk(child, prefix)


def measure(root: Path, folders: tuple[str, ...] = FOLDERS) -> list[Size]:
    """Measures every Python file below ``root``'s ``folders``."""
    sizes = []
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            text = path.read_text(encoding="utf-8")
            sizes.append(Size(name, "file", len(text.splitlines()), 1))
            if folder == "areal":
                sizes += list(_walk(ast.parse(text, filename=name), f"{name}::"))
    return sizes


def read_exceptions(path: Path) -> dict[str, int]:
    """Reads ``name  limit  reason`` lines; the reason is required.

    Raises:
        ValueError: a line without a limit or a reason.
    """
    exceptions = {}
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for number, line in enumerate(lines, 1):
        words = line.split(maxsplit=2)
        if not words or words[0].startswith("#"):
            continue
        if len(words) < 3 or not words[1].isdigit():
            raise ValueError(f"{path.name}:{number}: {line!r} is not 'name  limit  reason'")
        exceptions[words[0]] = int(words[1])
    return exceptions


def check(root: Path, *, soft: bool = False) -> list[str]:
    """Returns one message per violated hard limit (``soft``: per soft limit) and per exception that nothing needs."""
    exceptions = read_exceptions(root / "tools" / "size_exceptions.txt")
    problems, needed = [], set()
    for size in measure(root):
        soft_limit, hard_limit = LIMITS[size.kind]
        if size.value > hard_limit:
            needed.add(size.name)
        limit = soft_limit if soft else exceptions.get(size.name, hard_limit)
        if size.value > limit:
            where = size.name.split("::")[0]
            problems.append(
                f"{where}:{size.line}: {size.kind} {size.name.split('::')[-1]} has {size.value} {UNITS[size.kind]}, "
                f"{'soft ' if soft else ''}limit {limit}"
            )
    if not soft:
        stale = sorted(set(exceptions) - needed)
        problems += [f"tools/size_exceptions.txt: {name} is within the limits, remove its line" for name in stale]
    return problems


def main(argv: list[str] | None = None) -> int:
    """Prints the violations; returns the exit code (always 0 with ``--soft``)."""
    parser = argparse.ArgumentParser(description="Check the sizes of files, functions and classes.")
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="directory that holds areal/ and tools/")
    parser.add_argument("--soft", action="store_true", help="report the soft limits, without failing")
    args = parser.parse_args(argv)
    problems = check(args.root.resolve(), soft=args.soft)
    for problem in problems:
        sys.stdout.write(problem + "\n")
    return 1 if problems and not args.soft else 0


if __name__ == "__main__":
    sys.exit(main())
