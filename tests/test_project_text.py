"""What tracked files may say: no machine paths, registry hosts or open to-dos; what the documents name exists."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Written in two parts so that this file does not find itself.
FORBIDDEN = {
    "path of one machine": ["/wo" + "rk/", "/fa" + "rm/", "/opt/" + "wheels", "/opt/" + "pypi", "/tmp/" + "plan"],
    "registry host": [
        "py" + "pi.org",
        "pythonho" + "sted",
        "registry.npm" + "js",
        "download.py" + "torch.org",
        "deb" + "ian.org",
        "index-" + "url",
    ],
    "open to-do": ["TO" + "DO", "FIX" + "ME", "X" + "XX:"],
}
TEXT_SUFFIXES = {
    "", ".cfg", ".cpu", ".gpu", ".ini", ".ipynb", ".json", ".md", ".py", ".sh", ".toml", ".txt", ".yaml", ".yml",
}  # fmt: skip
MARKDOWN = ["README.md", "CONTRIBUTING.md", "AGENTS.md", "CLAUDE.md", "benchmark/README.md"]


def project_files() -> list[Path]:
    """Files that git tracks or would track."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: nothing says which files belong to the project")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [ROOT / name for name in names if (ROOT / name).is_file() and Path(name).suffix in TEXT_SUFFIXES]


@pytest.mark.parametrize("kind", FORBIDDEN)
def test_project_files_hold_no_forbidden_text(kind):
    found = []
    for path in project_files():
        text = path.read_text(encoding="utf-8", errors="replace")
        found += [f"{path.relative_to(ROOT)}: {word}" for word in FORBIDDEN[kind] if word in text]

    assert found == []


def test_project_files_hold_no_lock_file():
    assert [p.name for p in project_files() if p.suffix == ".lock" or p.name == "package-lock.json"] == []


def test_pyproject_names_no_host_and_pins_torch():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]

    assert re.findall(r"https?://", text) == []
    assert project["requires-python"] == ">=3.11,<3.14"
    assert "torch==2.13.*" in project["dependencies"]
    assert project["scripts"] == {"areal": "areal.cli:main"}
    assert (ROOT / "areal" / "py.typed").exists()


def test_pyproject_dependencies_have_a_range_and_a_comment():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    block = text[text.index("dependencies = [") : text.index("[project.scripts]")]
    lines = [line.strip() for line in block.splitlines()[1:] if line.strip().startswith('"')]

    assert lines
    assert [line for line in lines if not re.match(r'"[\w.-]+[=><~].*",\s+# \S', line)] == []


@pytest.mark.parametrize("name", MARKDOWN)
def test_document_paths_it_names_exist(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    links = {target.split("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target}
    quoted = set(re.findall(r"`((?:areal|docs|examples|tests|tools|benchmark|docker)/[\w./-]+)`", text))

    base = (ROOT / name).parent
    missing = sorted(link for link in links if link and not (base / link).exists())
    missing += sorted(path for path in quoted if not (ROOT / path).exists())

    assert missing == []


@pytest.mark.parametrize("name", MARKDOWN)
def test_document_make_targets_it_names_exist(name):
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    text = (ROOT / name).read_text(encoding="utf-8")

    named = set(re.findall(r"(?:^\s*|`)make ([a-z]+)", text, re.M))

    assert named <= targets


def test_readme_first_screen_has_the_two_commands_and_a_picture():
    first_screen = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:40]
    text = "\n".join(first_screen)

    assert "make quickstart" in text
    assert "make test" in text
    assert "docs/images/reward_curve.png" in text


def test_docs_table_of_contents_lists_every_page():
    toc = (ROOT / "docs" / "en" / "_toc.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r"(?:root|file): (\S+)", toc))
    folder = ROOT / "docs" / "en"
    pages = {page.relative_to(folder).with_suffix("").as_posix() for page in folder.rglob("*.md")}

    assert pages == listed


def test_pre_commit_hooks_are_local_and_download_nothing():
    text = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")

    assert set(re.findall(r"repo: (\S+)", text)) == {"local"}
    assert set(re.findall(r"language: (\S+)", text)) == {"system"}
    for tool in ("ruff", "mdformat", "nbstripout", "check_commit_msg"):
        assert tool in text
