"""The generated CLI reference is up to date and names every field."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_cli_docs", ROOT / "docs" / "generate_cli_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_cli_reference_is_up_to_date(generator: ModuleType) -> None:
    assert generator.TARGET.read_text(encoding="utf-8") == generator.render(), "run python docs/generate_cli_docs.py"


def test_cli_reference_names_every_config_class(generator: ModuleType) -> None:
    from areal.api import cli_args

    shown = {name for names in generator.GROUPS.values() for name in names}
    classes = {
        name
        for name, value in vars(cli_args).items()
        if isinstance(value, type) and dataclasses.is_dataclass(value) and not name.startswith("_")
    }

    assert shown == classes


def test_cli_reference_shows_help_and_default_of_each_field(generator: ModuleType) -> None:
    from areal.api import cli_args

    page = generator.render()

    for spec in dataclasses.fields(cli_args.OptimizerConfig):
        assert f"| `{spec.name}` |" in page
        assert spec.metadata["help"] in page
    assert "| required |" in page
