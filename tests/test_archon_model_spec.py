"""The registry of Archon's model families."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from areal.experimental.engine.archon_engine import ArchonEngine
from areal.experimental.models.archon import model_spec
from areal.experimental.models.archon.base import ArchonModel
from areal.experimental.models.archon.llama import LLAMA
from areal.experimental.models.archon.model_spec import (
    get_model_spec,
    get_supported_model_types,
    is_supported_model,
    register_model_spec,
)
from areal.experimental.models.archon.qwen3 import QWEN3
from tests.archon_fakes import hf_model
from tests.engine_fakes import engine_config


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, model_spec.ModelSpec]:
    """A copy of the table, so that a test leaves no entry behind."""
    table = dict(model_spec._specs)
    monkeypatch.setattr(model_spec, "_specs", table)
    return table


def test_importing_the_package_registers_every_family() -> None:
    program = (
        "from areal.experimental.models.archon.model_spec import get_supported_model_types\n"
        "print(*get_supported_model_types())"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)

    assert done.stdout.split() == ["llama", "qwen2", "qwen3", "qwen3_moe"]


@pytest.mark.parametrize(("model_type", "family"), [("qwen3", "qwen3"), ("qwen3_moe", "qwen3"), ("llama", "llama")])
def test_get_model_spec_of_a_known_type_gives_its_family(model_type: str, family: str) -> None:
    assert is_supported_model(model_type)
    assert get_model_spec(model_type).name == family
    assert model_type in get_model_spec(model_type).supported_model_types


@pytest.mark.parametrize("kind", [KeyError, ValueError])
def test_get_model_spec_of_an_unknown_type_names_the_known_ones_and_fsdp(kind: type[Exception]) -> None:
    assert not is_supported_model("mamba")

    with pytest.raises(kind) as caught:
        get_model_spec("mamba")

    for part in ("'mamba'", "FSDP", *get_supported_model_types()):
        assert part in str(caught.value)


def test_register_model_spec_of_a_new_type_makes_it_known(registry: dict[str, model_spec.ModelSpec]) -> None:
    spec = replace(LLAMA, name="mistral", supported_model_types=frozenset({"mistral"}))

    assert register_model_spec(spec) is spec

    assert get_model_spec("mistral") is spec
    assert "mistral" in get_supported_model_types()


def test_register_model_spec_of_a_taken_type_raises_and_registers_nothing(
    registry: dict[str, model_spec.ModelSpec],
) -> None:
    before = dict(registry)

    with pytest.raises(ValueError, match="'qwen3_moe' is already registered by 'qwen3'"):
        register_model_spec(replace(QWEN3, name="other", supported_model_types=frozenset({"new", "qwen3_moe"})))
    with pytest.raises(ValueError, match="'llama' is already registered"):
        register_model_spec(LLAMA)

    assert registry == before


def test_engine_of_a_family_with_a_layout_of_its_own_uses_it(registry: dict[str, Any], tmp_path: Path) -> None:
    seen: list[ArchonModel] = []

    def lay_out(model: ArchonModel, *arguments: Any) -> None:
        seen.append(model)

    registry["qwen3"] = replace(QWEN3, parallelize_fn=lay_out)
    hf_model("qwen3").save_pretrained(tmp_path)
    engine = ArchonEngine(engine_config(str(tmp_path), backend="archon:d1"))

    engine.initialize()

    assert seen == engine.parts
    engine.destroy()
