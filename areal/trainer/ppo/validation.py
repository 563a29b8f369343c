"""Which validation answers a critic can be measured on, and which of their columns that takes.

In: the tables of an evaluation, as the sampler gave them; workflows of users may leave columns out, or add their own.
Out: those that can be compared. Nothing here fetches a table that stays with its maker, so that the decision is one for
all ranks. Called by ``PPOTrainer`` (the choice) and ``PPOCritic`` (the columns).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from areal.infra.controller.tables import RemoteTable
from areal.utils import logging

if TYPE_CHECKING:
    from areal.api.config.ppo import NormConfig

Table = Mapping[str, Any]

logger = logging.getLogger("CriticEvaluation")

_NEEDED = ("input_ids", "attention_mask", "loss_mask", "rewards")
_READ = (*_NEEDED, "truncated", "group_id", "position_ids", "mm_token_type_ids", "multi_modal_input")


class ValidationAnswers:
    """Chooses what the critic of a run is measured on; says what it leaves out, and why.

    Args:
        reward_norm: of the policy; None where rewards are not normalised.
    """

    def __init__(self, reward_norm: NormConfig | None) -> None:
        levels = () if reward_norm is None else (reward_norm.mean_level, reward_norm.std_level)
        # With group_size=1 groups of one are by design and keep their raw reward.
        self._needs_groups = reward_norm is not None and "group" in levels and reward_norm.group_size > 1
        self._told = False

    def choose(self, tables: Sequence[Table], least: int) -> list[Table]:
        """The tables to measure on, one per group; none where there are fewer than ``least``, or no target.

        Left out: tables without rewards, masks or tokens, and those whose columns differ from the first good one's.
        """
        good = [table for table in tables if set(_NEEDED) <= set(_columns(table))]
        alike = [table for table in good if _read_of(table) == _read_of(good[0])]
        if left_out := len(tables) - len(alike):
            logger.warning(
                f"the critic is evaluated without {left_out} of {len(tables)} validation groups: they lack one of "
                f"{', '.join(_NEEDED)}, or have other columns than the rest"
            )
        if len(alike) < least:
            logger.warning(
                f"the critic is not evaluated this time: {len(alike)} validation groups, and it takes {least}, one for "
                "every data-parallel rank"
            )
            return []
        if self._needs_groups and all(_sequences(table) < 2 for table in alike):
            if not self._told:
                logger.warning(
                    "the critic is not evaluated: actor.reward_norm compares the answers of a group, and no validation "
                    "group has two, so every target would be 0. Set eval_gconfig.n_samples to 2 or more (as "
                    "gconfig.n_samples), or actor.reward_norm to the batch level"
                )
            self._told = True
            return []
        return alike


def answer_columns(table: Table) -> dict[str, Any]:
    """The columns of a table that an evaluation of the critic reads."""
    return {key: table[key] for key in _READ if key in table}


def _read_of(table: Table) -> set[str]:
    return set(_READ) & set(_columns(table))


def _columns(table: Table) -> Collection[str]:
    return table.columns if isinstance(table, RemoteTable) else table.keys()


def _sequences(table: Table) -> int:
    return table.sequences if isinstance(table, RemoteTable) else len(table["input_ids"])
