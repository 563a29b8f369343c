"""The cell that runs every pytest test, the slow ones too."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Sequence

from tests.full.cell import ROOT, CellContext


def run(context: CellContext, arguments: Sequence[str] = ()) -> None:
    """All of ``tests/``, or what pytest's ``arguments`` say; its report gives the counts, its output is the log."""
    report = context.work / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", f"--basetemp={context.work / 'tmp'}"]
    code = subprocess.run([*command, *arguments], cwd=ROOT, check=False).returncode
    if not context.expect(report.is_file(), f"pytest ended with exit code {code} and wrote no report"):
        return
    cases = list(ET.parse(report).getroot().iter("testcase"))
    bad = [f"{case.get('classname')}.{case.get('name')}" for case in cases if _has(case, "failure", "error")]
    context.facts |= {
        "tests": len(cases),
        "failed": len(bad),
        "skipped": sum(_has(case, "skipped") for case in cases),
    }
    context.expect(not bad, f"{len(bad)} tests failed: {', '.join(bad[:10])}")
    context.expect(code == 0 or bool(bad), f"pytest ended with exit code {code}")


def _has(case: ET.Element, *tags: str) -> bool:
    return any(case.find(tag) is not None for tag in tags)
