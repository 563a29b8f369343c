"""Adapters in every layout of both engines against one process of the FSDP engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM

from areal.api.config.fsdp import FSDPEngineConfig
from tests.torchrun import lora_cells as cells
from tests.torchrun.layout_cells import LENGTHS
from tests.torchrun.live_group import LiveGroup
from tests.torchrun.tree_cells import TREES

pytestmark = [pytest.mark.slow, pytest.mark.ci]

EVERYTHING = list(range(len(LENGTHS)))
SHARDS = {"1": [EVERYTHING], "d2": [EVERYTHING[:5], EVERYTHING[5:]], "c2": [EVERYTHING]}

OTHER_SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "bfloat16": ("fsdp:d2", {"dtype": "bfloat16"}),
    "first rank reads": ("fsdp:d2", {"fsdp": FSDPEngineConfig(memory_efficient_load=True)}),
    "layer by layer": ("fsdp:d2", {"fsdp": FSDPEngineConfig(per_layer_optim_step=True)}),
    "fsdp recomputed": ("fsdp:d2", {"gradient_checkpointing": True}),
    "archon recomputed": ("archon:d2", {"gradient_checkpointing": True}),
    "fsdp trees": ("fsdp:d2", TREES),
    "archon trees": ("archon:d2", TREES),
}


def _assert_equal(ours: cells.Outcome, expected: cells.Outcome) -> None:
    assert ours.losses == pytest.approx(expected.losses, rel=2e-5)
    assert ours.norms == pytest.approx(expected.norms, rel=2e-5)
    for found, wanted in ((ours.adapter, expected.adapter), (ours.merged, expected.merged)):
        assert found.keys() == wanted.keys()
        for key, tensor in wanted.items():
            np.testing.assert_allclose(found[key], tensor, rtol=1e-5, atol=1e-5, err_msg=key)


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_lora_archon_one_process_equals_fsdp(model_dirs: dict[str, str], name: str, tmp_path: Path) -> None:
    start = cells.save_start(model_dirs[name], str(tmp_path / "start"))
    expected = cells.two_steps(model_dirs[name], "fsdp:d1", SHARDS["1"], start)

    _assert_equal(cells.two_steps(model_dirs[name], "archon:d1", SHARDS["1"], start), expected)


@pytest.mark.parametrize("name", ["tied", "untied"])
@pytest.mark.parametrize("backend", ["fsdp:d2", "fsdp:c2", "archon:d2", "archon:c2"])
def test_lora_two_ranks_equal_one_process(
    two_ranks: LiveGroup, model_dirs: dict[str, str], backend: str, name: str, tmp_path: Path
) -> None:
    kind, _, layout = backend.partition(":")
    start = cells.save_start(model_dirs[name], str(tmp_path / "start"))
    expected = cells.two_steps(model_dirs[name], "fsdp:d1", SHARDS["1"], start)

    results = two_ranks.run(
        cells.two_steps,
        path=model_dirs[name],
        backend=backend,
        shards=SHARDS[layout],
        start=start,
        out=str(tmp_path / "out"),
    )

    for ours in results:
        _assert_equal(ours, expected)
    resumed = cells.second_step(model_dirs[name], f"{kind}:d1", SHARDS["1"], str(tmp_path / "out"))
    assert resumed == pytest.approx([expected.losses[1], expected.norms[1]], rel=2e-5)
    plain = AutoModelForCausalLM.from_pretrained(model_dirs[name])
    adapted = PeftModel.from_pretrained(plain, str(tmp_path / "out" / "adapter"))
    merged = dict(adapted.merge_and_unload().named_parameters())
    exported = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "merged").named_parameters())
    assert exported.keys() == merged.keys()
    for key, tensor in merged.items():
        np.testing.assert_allclose(exported[key].detach(), tensor.detach(), rtol=0, atol=1e-6, err_msg=key)


@pytest.mark.parametrize("kind", ["fsdp", "archon"])
def test_lora_every_layout_starts_with_the_same_adapter(
    two_ranks: LiveGroup, model_dirs: dict[str, str], kind: str
) -> None:
    expected = cells.fresh(model_dirs["tied"], f"{kind}:d1")
    for layout in ("d2", "c2"):
        for found in two_ranks.run(cells.fresh, path=model_dirs["tied"], backend=f"{kind}:{layout}"):
            assert found.keys() == expected.keys()
            for key, tensor in expected.items():
                np.testing.assert_array_equal(found[key], tensor, err_msg=f"{layout} {key}")


@pytest.mark.parametrize("case", OTHER_SETTINGS)
def test_lora_two_ranks_other_settings_equal_one_process(
    two_ranks: LiveGroup, model_dirs: dict[str, str], case: str, tmp_path: Path
) -> None:
    backend, settings = OTHER_SETTINGS[case]
    start = cells.save_start(model_dirs["tied"], str(tmp_path / "start"))
    plain = settings if case == "bfloat16" else {}
    expected = cells.two_steps(model_dirs["tied"], "fsdp:d1", SHARDS["1"], start, **plain)
    tolerance = 1e-2 if case == "bfloat16" else 2e-5  # three digits of bfloat16

    results = two_ranks.run(
        cells.two_steps, path=model_dirs["tied"], backend=backend, shards=SHARDS["d2"], start=start, **settings
    )

    for ours in results:
        if case != "bfloat16":
            _assert_equal(ours, expected)
        assert ours.losses == pytest.approx(expected.losses, rel=tolerance)
        assert ours.norms == pytest.approx(expected.norms, rel=5 * tolerance)


@pytest.mark.parametrize("backend", ["fsdp:t2", "archon:t2", "archon:p2"])
def test_lora_layout_that_cuts_layers_is_refused_by_name(
    two_ranks: LiveGroup, model_dirs: dict[str, str], backend: str
) -> None:
    for message in two_ranks.run(cells.refusal, path=model_dirs["tied"], backend=backend):
        assert message.startswith("UnsupportedFeatureError: use_lora=true")
        assert "use d and c" in message
