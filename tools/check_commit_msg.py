#!/usr/bin/env python3
"""Checks that a commit message follows Conventional Commits; the commit-msg hook calls it with the message file.

In: the path of the file that holds the message. Out: exit code 0, or 1 with the reason on standard error.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

TYPES = ("build", "chore", "ci", "docs", "feat", "fix", "gov", "perf", "refactor", "revert", "style", "test")
MAX_SUBJECT = 88
SUBJECT = re.compile(rf"(?P<type>{'|'.join(TYPES)})(\([\w./-]+\))?!?: \S.*")
GENERATED = re.compile(r"(Merge|Revert|fixup!|squash!) ?")


def problem(message: str) -> str | None:
    """Returns what is wrong with ``message``, or None."""
    lines = [line for line in message.splitlines() if not line.startswith("#")]
    subject = lines[0] if lines else ""
    if GENERATED.match(subject):
        return None
    if not SUBJECT.fullmatch(subject):
        return f"subject {subject!r} is not 'type(scope): text' with a type of {', '.join(TYPES)}"
    if len(subject) > MAX_SUBJECT:
        return f"subject has {len(subject)} characters, at most {MAX_SUBJECT} are allowed (aim at 72)"
    if len(lines) > 1 and lines[1].strip():
        return "the line after the subject must be empty"
    return None


def main() -> int:
    found = problem(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if found:
        print(f"commit message: {found}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
