"""The mismatch of two data-parallel ranks equals that of one process."""

from __future__ import annotations

import pytest

from areal.trainer.ppo.mismatch import MismatchMeter
from tests.torchrun import mismatch_cells, ppo_cells
from tests.torchrun.live_group import LiveGroup


@pytest.mark.parametrize("of_rank_0", [7, 20])
def test_meter_two_ranks_equal_one_process(two_ranks: LiveGroup, of_rank_0: int) -> None:
    alone = MismatchMeter(0.3, 5)
    alone.add(*mismatch_cells.tokens())
    expected = alone.reduce()

    results = two_ranks.run(mismatch_cells.measure, of_rank_0=of_rank_0)  # 20: rank 1 has no tokens, and joins

    assert results[0] == results[1]
    numbers, exported = results[0]
    assert numbers == pytest.approx(expected)
    assert {key: exported[f"ppo_actor/mismatch/{key}"] for key in expected} == pytest.approx(expected)


@pytest.mark.parametrize("recompute", [True, False])
def test_ppo_step_two_ranks_report_the_mismatch_of_one_process(
    two_ranks: LiveGroup, model_dirs: dict[str, str], recompute: bool
) -> None:
    settings = {"ppo_n_minibatches": 1, "use_decoupled_loss": not recompute, "prox_logp_method": "loglinear"}
    expected = ppo_cells.ppo_step(model_dirs["tied"], "fsdp:d1", 1, **settings)["stats"]

    results = two_ranks.run(ppo_cells.ppo_step, path=model_dirs["tied"], backend="fsdp:d2", first_groups=1, **settings)

    keys = [key for key in expected if key.startswith("ppo_actor/mismatch/") and not key.endswith("__count")]
    assert len(keys) > 10
    for result in results:
        assert {key: result["stats"][key] for key in keys} == pytest.approx({k: expected[k] for k in keys}, rel=1e-4)
