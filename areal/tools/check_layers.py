"""Checks that run-time imports inside ``areal`` only point down the layers, and that modules form no import ring.

In: the source tree (parsed with ``ast``, nothing is imported) and ``tools/layer_aliases.txt``. Out: one line per
violation, exit code 1 if there is any. Called by ``tools/check.sh``, the pre-commit hook and
tests/test_project_checks.py.

Layers, low to high::

    base < utils < api < {dataset, reward, models} < infra < {engine, workflow} < trainer < {experimental, tools} < cli

``base`` are the pure data modules ``areal.api.io_struct``, ``areal.api.config.*`` and ``areal.utils.errors``; importing
them loads only the standard library. Packages in braces share a rank and may not import each other. Imports inside
functions count too: they also run. Imports under ``if TYPE_CHECKING`` do not run and may look up.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LAYERS: tuple[tuple[str, ...], ...] = (
    ("base",),
    ("utils",),
    ("api",),
    ("dataset", "reward", "models"),
    ("infra",),
    ("engine", "workflow"),
    ("trainer",),
    ("experimental", "tools"),
    ("areal",),  # the root package: lazy names of the trainers
    ("cli",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
BASE_MODULES = ("areal.api.io_struct", "areal.api.config", "areal.utils.errors")


@dataclass(frozen=True)
class Import:
    """One run-time import."""

    importer: str
    imported: str
    line: int
    deferred: bool  # inside a function: runs later, so it cannot close a ring at import time


def layer_of(module: str) -> str:
    """Returns the layer's name of a dotted module name; unknown packages are named as they are."""
    if any(module == base or module.startswith(base + ".") for base in BASE_MODULES):
        return "base"
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "areal"


def find_modules(root: Path) -> dict[str, Path]:
    """Maps dotted names to files, for every module below ``root/areal``."""
    modules = {}
    for path in sorted((root / "areal").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def _place(module: str) -> str:
    return f"{module} ({layer_of(module)})" if module.split(".")[0] == "areal" else f"{module} (not standard library)"


def _is_type_checking(test: ast.expr) -> bool:
    name = test.attr if isinstance(test, ast.Attribute) else test.id if isinstance(test, ast.Name) else ""
    return name == "TYPE_CHECKING"


def _run_time_imports(node: ast.AST, deferred: bool = False) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Yields import statements that can run, with whether they stand inside a function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, deferred
        elif isinstance(child, ast.If) and _is_type_checking(child.test):
            for statement in child.orelse:
                yield from _run_time_imports(ast.Module([statement], []), deferred)
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _run_time_imports(child, deferred or inside)


def _targets(statement: ast.Import | ast.ImportFrom, importer: str, is_package: bool, known: set[str]) -> set[str]:
    """Resolves one statement to module names; ``from areal.x import y`` is ``areal.x.y`` if that is a module."""
    if isinstance(statement, ast.Import):
        return {alias.name for alias in statement.names}
    source = statement.module or ""
    if statement.level:
        parts = importer.split(".")
        kept = parts[: len(parts) - statement.level + (1 if is_package else 0)]
        source = ".".join([*kept, source] if source else kept)
    names = {f"{source}.{alias.name}" for alias in statement.names}
    return {name if name in known else source for name in names}


def collect_imports(modules: dict[str, Path]) -> list[Import]:
    """Reads every module and returns its run-time imports, of other packages too."""
    known = set(modules)
    found = []
    for importer, path in modules.items():
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        for statement, deferred in _run_time_imports(tree):
            for imported in _targets(statement, importer, path.name == "__init__.py", known):
                if imported != importer:
                    found.append(Import(importer, imported, statement.lineno, deferred))
    return found


def points_down(edge: Import) -> bool:
    """True where the import stays inside its layer or goes to a lower one; base loads only stdlib."""
    above, below = layer_of(edge.importer), layer_of(edge.imported)
    package = edge.imported.split(".")[0]
    if package != "areal":
        return above != "base" or edge.deferred or package in sys.stdlib_module_names
    return above == below or RANK[above] > RANK[below]


def find_rings(imports: list[Import]) -> list[list[str]]:
    """Returns groups of modules that import each other while being imported (strongly connected components > 1)."""
    graph: dict[str, set[str]] = {}
    for edge in imports:
        if not edge.deferred:
            graph.setdefault(edge.importer, set()).add(edge.imported)

    def reachable(start: str) -> set[str]:
        seen: set[str] = set()
        stack = [start]
        while stack:
            for target in graph.get(stack.pop(), ()):
                if target not in seen:
                    seen.add(target)
                    stack.append(target)
        return seen

    reach = {module: reachable(module) for module in graph}
    looping = [module for module in graph if module in reach[module]]
    rings = {frozenset(other for other in looping if other in reach[one] and one in reach[other]) for one in looping}
    return sorted(sorted(ring) for ring in rings)


def read_aliases(path: Path) -> set[str]:
    """Reads module names of alias files for old import paths: ``module  reason`` per line, ``#`` starts a comment."""
    if not path.exists():
        return set()
    lines = (line.split("#")[0].split() for line in path.read_text(encoding="utf-8").splitlines())
    return {words[0] for words in lines if words}


def check(root: Path) -> list[str]:
    """Returns one message per violation under ``root`` (the directory that holds ``areal`` and ``tools``)."""
    modules = find_modules(root)
    aliases = read_aliases(root / "tools" / "layer_aliases.txt")
    problems = [f"tools/layer_aliases.txt: {name} is no module" for name in sorted(aliases - set(modules))]
    imports = [edge for edge in collect_imports(modules) if edge.importer not in aliases]
    unknown = sorted({m for m in modules if layer_of(m) not in RANK})
    problems += [f"{modules[m].relative_to(root)}: package of {m} has no layer" for m in unknown]
    for edge in imports:
        ours = edge.imported.split(".")[0] == "areal"
        if edge.importer in unknown or (ours and layer_of(edge.imported) not in RANK) or points_down(edge):
            continue
        where = f"{modules[edge.importer].relative_to(root)}:{edge.line}"
        problems.append(
            f"{where}: {_place(edge.importer)} imports {_place(edge.imported)}, which is not below it; "
            f"move the code down, or name it by a string in a registry"
        )
    problems += [f"import ring: {' -> '.join(ring)}" for ring in find_rings(imports)]
    return problems


def main(argv: list[str] | None = None) -> int:
    """Prints the violations; returns the exit code."""
    parser = argparse.ArgumentParser(description="Check that imports point down the layers.")
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="directory that holds areal/ and tools/")
    problems = check(parser.parse_args(argv).root.resolve())
    for problem in problems:
        sys.stdout.write(problem + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
