"""The code base passes its own layer and size checks, and the checks find what they are for."""

import subprocess
import sys
from pathlib import Path

import pytest

from areal.tools import check_layers, check_sizes

ROOT = Path(__file__).resolve().parents[1]


def write_tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def test_layers_of_this_package_hold():
    assert check_layers.check(ROOT) == []


def test_sizes_of_this_project_hold():
    assert check_sizes.check(ROOT) == []


@pytest.mark.parametrize(
    ("importer", "line", "allowed"),
    [
        ("areal/trainer/a.py", "from areal.engine import b", True),
        ("areal/engine/a.py", "import areal.trainer.b", False),
        ("areal/engine/a.py", "def f():\n    from areal.trainer import b", False),
        ("areal/engine/a.py", "try:\n    import areal.trainer.b\nexcept ImportError:\n    pass", False),
        ("areal/engine/a.py", "from areal.workflow import b", False),
        ("areal/engine/a.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import areal.trainer.b", True),
        (
            "areal/engine/a.py",
            "import typing\nif typing.TYPE_CHECKING:\n    import os\nelse:\n    import areal.cli",
            False,
        ),
        ("areal/utils/a.py", "from areal.api.io_struct import X", True),
        ("areal/utils/a.py", "from areal.api.config.ppo import X", True),
        ("areal/utils/a.py", "from areal.api import trajectory", False),
        ("areal/utils/a.py", "import numpy", True),
        ("areal/api/io_struct.py", "from areal.utils import errors", True),
        ("areal/api/io_struct.py", "from areal.utils import logging", False),
        ("areal/api/config/ppo.py", "import numpy", False),
        ("areal/api/config/ppo.py", "def f():\n    import numpy", True),
        ("areal/api/config/ppo.py", "import dataclasses", True),
    ],
)
def test_layers_one_import_is_judged_by_rank(tmp_path, importer, line, allowed):
    others = ["areal/utils/errors.py", "areal/utils/logging.py", "areal/api/trajectory.py", "areal/trainer/b.py"]
    root = write_tree(tmp_path, dict.fromkeys(others, "") | {importer: line + "\n"})

    problems = check_layers.check(root)

    assert (problems == []) == allowed, problems


def test_layers_relative_import_is_resolved(tmp_path):
    root = write_tree(tmp_path, {"areal/engine/sub/a.py": "from ...trainer import b\n", "areal/trainer/b.py": ""})

    problems = check_layers.check(root)

    assert len(problems) == 1
    assert "areal.trainer.b (trainer)" in problems[0]


def test_layers_module_ring_is_found_but_deferred_import_is_not(tmp_path):
    ring = {"areal/utils/a.py": "import areal.utils.b\n", "areal/utils/b.py": "from areal.utils import a\n"}
    deferred = {
        "areal/utils/c.py": "import areal.utils.d\n",
        "areal/utils/d.py": "def f():\n    import areal.utils.c\n",
    }
    root = write_tree(tmp_path, ring | deferred)

    assert check_layers.check(root) == ["import ring: areal.utils.a -> areal.utils.b"]


def test_layers_alias_is_exempt_and_must_exist(tmp_path):
    files = {"areal/utils/old.py": "from areal.trainer import b\n", "areal/trainer/b.py": ""}
    root = write_tree(tmp_path, files | {"tools/layer_aliases.txt": "areal.utils.old  path of 1.x\nareal.gone  x\n"})

    assert check_layers.check(root) == ["tools/layer_aliases.txt: areal.gone is no module"]


def test_layers_unknown_package_is_reported(tmp_path):
    problems = check_layers.check(write_tree(tmp_path, {"areal/misc/a.py": ""}))

    assert len(problems) == 1
    assert "areal.misc.a has no layer" in problems[0]


def test_sizes_each_kind_over_its_limit_is_reported(tmp_path):
    method = "    def m{0}(self):\n        return {0}\n"
    files = {
        "areal/long.py": "x = 1\n" * 501,
        "areal/function.py": "def f():\n" + "    x = 1\n" * 81,
        "areal/kind.py": "class C:\n" + "".join(method.format(i) for i in range(21)),
        "areal/proto.py": "class P(Protocol):\n" + "".join(method.format(i) for i in range(13)),
        "tests/fine.py": "def f():\n" + "    x = 1\n" * 81,
    }

    problems = check_sizes.check(write_tree(tmp_path, files))

    assert sorted(problems) == [
        "areal/function.py:1: function f has 82 lines, limit 80",
        "areal/kind.py:1: class C has 21 methods, limit 20",
        "areal/long.py:1: file areal/long.py has 501 lines, limit 500",
        "areal/proto.py:1: contract P has 13 methods, limit 12",
    ]


def test_sizes_docstring_and_overloads_do_not_count(tmp_path):
    text = 'def f():\n    """One.\n' + "    more\n" * 90 + '    """\n    return 1\n'
    overloads = "class C:\n" + "    @overload\n    def m(self): ...\n" * 21

    assert check_sizes.check(write_tree(tmp_path, {"areal/a.py": text, "areal/b.py": overloads})) == []


def test_sizes_exception_raises_the_limit_until_it_is_stale(tmp_path):
    files = {"areal/long.py": "x = 1\n" * 510, "areal/short.py": "x = 1\n"}
    listed = "# comment\nareal/long.py  520  generated table\nareal/short.py  600  once long\n"
    root = write_tree(tmp_path, files | {"tools/size_exceptions.txt": listed})

    assert check_sizes.check(root) == [
        "tools/size_exceptions.txt: areal/short.py is within the limits, remove its line"
    ]


def test_sizes_exception_without_reason_is_refused(tmp_path):
    root = write_tree(tmp_path, {"areal/a.py": "", "tools/size_exceptions.txt": "areal/a.py 600\n"})

    with pytest.raises(ValueError, match=r"size_exceptions.txt:1.*name  limit  reason"):
        check_sizes.check(root)


def test_sizes_soft_limits_are_printed_without_failing(tmp_path, capsys):
    root = write_tree(tmp_path, {"areal/a.py": "x = 1\n" * 301})

    assert check_sizes.main(["--root", str(root), "--soft"]) == 0
    assert "has 301 lines, soft limit 300" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("feat: add a workflow\n\nWhy.\n", 0),
        ("fix(rollout)!: wait for the bound\n", 0),
        ("gov: name a maintainer\n", 0),
        ("Merge branch 'main'\n", 0),
        ("added things\n", 1),
        ("feat: no blank line\nbody\n", 1),
        ("feat: " + "x" * 90 + "\n", 1),
    ],
)
def test_commit_message_hook_accepts_conventional_commits(tmp_path, message, code):
    path = tmp_path / "message"
    path.write_text(message, encoding="utf-8")

    done = subprocess.run([sys.executable, ROOT / "tools/check_commit_msg.py", path], capture_output=True, text=True)

    assert done.returncode == code, done.stderr
