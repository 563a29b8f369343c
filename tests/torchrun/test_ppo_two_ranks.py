"""A PPO step on two data-parallel ranks equals the same step in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes import tiny_model
from tests.torchrun import ppo_cells
from tests.torchrun.live_group import LiveGroup

SAME_STATS = (
    "n_seqs",
    "n_valid_tokens",
    "task_reward/avg",
    "advantages/max",
    "update/n_valid_tokens",
    "update/grad_norm",
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(path)
    return str(path)


M2PO = {"use_decoupled_loss": True, "m2_threshold": 10.0}  # the log-probs of these trajectories are noise


@pytest.mark.parametrize(
    ("first_groups", "options"),
    [
        (1, {}),
        (2, {}),
        (1, {"loss_agg": "seq-mean-token-mean"}),
        (1, {"loss_agg": "seq-mean-token-sum-norm", "loss_agg_constant": 8}),
        (1, {"use_sapo_loss": True, "importance_sampling_level": "sequence"}),
        (1, {"loss_fn": "cispo"}),
        (1, M2PO),
    ],
)
def test_ppo_step_uneven_shards_equal_one_process(
    two_ranks: LiveGroup, model_dir: str, first_groups: int, options: dict[str, Any]
) -> None:
    settings = {"ppo_n_minibatches": 1, **options}
    expected = ppo_cells.ppo_step(model_dir, "fsdp:d1", first_groups, **settings)

    results = two_ranks.run(
        ppo_cells.ppo_step, path=model_dir, backend="fsdp:d2", first_groups=first_groups, **settings
    )

    for result in results:
        for name, value in expected["weights"].items():
            torch.testing.assert_close(result["weights"][name], value, rtol=1e-5, atol=1e-5)
        for key in SAME_STATS:
            assert result["stats"][f"ppo_actor/{key}"] == pytest.approx(expected["stats"][f"ppo_actor/{key}"], rel=1e-5)
    if options is M2PO:
        assert 0.1 < expected["stats"]["ppo_actor/m2po_kept_fraction/avg"] < 0.9


def test_ppo_mini_batches_are_as_many_on_every_rank(two_ranks: LiveGroup, model_dir: str) -> None:
    # Rank 1 has 4 sequences, so both take 4 optimizer steps although rank 0 could take 6.
    results = two_ranks.run(ppo_cells.ppo_step, path=model_dir, backend="fsdp:d2", first_groups=2, ppo_n_minibatches=6)

    assert [r["stats"]["ppo_actor/update/grad_norm__count"] for r in results] == [8, 8]  # 4 steps on 2 ranks
    assert all(torch.equal(results[0]["weights"][k], results[1]["weights"][k]) for k in results[0]["weights"])
