"""The documents are true: their Python blocks run, their YAML blocks load, their commands exist."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest

from areal.api import cli_args
from areal.api.cli_args import GRPOConfig, load_expr_config

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "en").rglob("*.md"))]
OTHER_PAGES = ("AGENTS.md", "CLAUDE.md", "CONTRIBUTING.md", "benchmark/README.md")
REQUIRED = """
experiment_name: docs
trial_name: t0
cluster: {{fileroot: {root}}}
train_dataset: {{path: arithmetic, type: rl, batch_size: 4}}
gconfig: {{n_samples: 4}}
actor: {{path: {root}/model, backend: "fsdp:d1"}}
rollout: {{backend: "native:d1"}}
"""


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)


def each(language: str) -> list:
    found = [(page, text) for page in PAGES if page.name != "cli_reference.md" for text in blocks(page, language)]
    return [pytest.param(text, id=f"{page.stem}-{i}") for i, (page, text) in enumerate(found)]


@pytest.fixture
def _registry_restored(monkeypatch):
    """A block may register a data set; later tests must not see it."""
    from areal.dataset import DATASETS

    monkeypatch.setattr(DATASETS, "_entries", dict(DATASETS._entries))


@pytest.mark.usefixtures("_registry_restored")
@pytest.mark.parametrize("text", each("python"))
def test_docs_python_block_runs(text):
    namespace = {"__name__": "docs_block"}

    exec(compile(text, "docs", "exec"), namespace)

    assert len(namespace) > 1


@pytest.mark.parametrize("text", each("yaml"))
def test_docs_yaml_block_loads(text, tmp_path):
    import yaml

    def merge(into, values):
        for key, value in values.items():
            into[key] = merge(into.get(key) or {}, value) if isinstance(value, dict) else value
        return into

    named = re.search(r"# of an? (\w+Config)\b", text)
    cls = getattr(cli_args, named.group(1)) if named else GRPOConfig
    required = yaml.safe_load(REQUIRED.format(root=tmp_path))
    required = {key: value for key, value in required.items() if key in cls.__dataclass_fields__}
    config = merge(required, yaml.safe_load(text))
    path = tmp_path / "docs.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")

    loaded, _ = load_expr_config(["--config", str(path)], cls)

    assert loaded.experiment_name == config["experiment_name"]


def test_docs_workflow_block_makes_a_valid_trajectory():
    from areal.api.config.rollout import GenerationHyperparameters
    from areal.api.trajectory import check_trajectory
    from areal.reward.gsm8k import gsm8k_reward_fn
    from tests.fakes import InstantEngine, char_tokenizer

    namespace = {"__name__": "docs_block"}
    exec(blocks(ROOT / "docs/en/customization/workflow.md", "python")[0], namespace)
    workflow = namespace["OneAnswerWorkflow"](gsm8k_reward_fn, GenerationHyperparameters(), char_tokenizer())
    row = {"messages": [{"role": "user", "content": "1+1="}], "answer": "2"}

    trajectory = asyncio.run(workflow.arun_episode(InstantEngine(), row))

    check_trajectory(trajectory)


def test_readme_table_of_algorithms_names_files_that_exist_and_sources():
    def exists(name):
        return (ROOT / name).exists() if "/" in name else any(ROOT.glob(f"examples/*/{name}"))

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"^\| algorithm .*\n\|[-| ]+\n((?:\|.*\n)+)", text, re.M)
    missing, without_source = [], []
    for row in table.splitlines():
        _, name, example, tests, source, _ = (cell.strip() for cell in row.split("|"))
        for word in re.findall(r"`([^`]+(?:\.py|\.yaml|/))`", example + tests):
            start, names, rest = re.fullmatch(r"([^{]*)\{?([^}]*)\}?(.*)", word).groups()
            missing += [f"{name}: {start}{n}{rest}" for n in names.split(",") if not exists(f"{start}{n}{rest}")]
        if not re.search(r"\d{4}\.\d{5}|\(\d{4}\)|\]\(", source) and not name.startswith("supervised"):
            without_source.append(name)

    assert len(table.splitlines()) > 10
    assert missing == []
    assert without_source == []


def test_docs_links_lead_to_pages_and_headings_that_exist():
    def headings(page):
        found = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
        return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in found}

    broken = []
    for page in [*PAGES, *(ROOT / name for name in OTHER_PAGES)]:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            if "://" in link:
                continue
            file, _, anchor = link.partition("#")
            target = (page.parent / file).resolve() if file else page
            if not target.exists() or (anchor and target.suffix == ".md" and anchor not in headings(target)):
                broken.append(f"{page.relative_to(ROOT)}: {link}")

    assert broken == []


def test_docs_shell_blocks_name_files_and_commands_that_exist():
    help_text = subprocess.run(
        [sys.executable, "-m", "areal.cli", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60
    ).stdout
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    missing = []
    for page in [*PAGES, *(ROOT / name for name in OTHER_PAGES)]:
        for line in "".join(blocks(page, "bash")).splitlines():
            words = line.split("#")[0].split()
            paths = [w for w in words if re.fullmatch(r"(\./)?(areal|docs|examples|benchmark|tools)/[\w./-]+", w)]
            missing += [f"{page.name}: {p}" for p in paths if not (ROOT / p).exists()]
            if words[:1] == ["make"] and words[1] not in targets:
                missing.append(f"{page.name}: make {words[1]}")
            if words[:1] == ["areal"] and not re.search(rf"\b{words[1]}\b", help_text):
                missing.append(f"{page.name}: areal {words[1]}")

    assert missing == []
