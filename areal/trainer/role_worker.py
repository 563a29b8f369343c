"""The role object of one rank in a worker process: it keeps the rank's share of a step and computes on it.

Hosted as ``actor/<rank>`` beside ``actor/<rank>.engine``; called by ``areal.infra.controller.train_controller``. A
share is fetched from the workers that made it and packed once; log-probs, advantages and updates then work on the
packed batch. One class per kind of role.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from areal.api.remote import remote
from areal.engine.core.weight_sender import WeightSender
from areal.infra.controller.tables import TableHandle, load_tables, store_table
from areal.infra.rpc.rtensor import RTensor, local_store
from areal.utils.batch import PackedBatch
from areal.utils.errors import EngineError
from areal.utils.ranks import is_first_rank

if TYPE_CHECKING:
    from areal.api.engine_api import TrainEngine
    from areal.api.io_struct import ParamSpec, SaveLoadMeta
    from areal.engine.core.shared_weights import WeightManifest
    from areal.engine.core.weight_sources import WeightGroup
    from areal.engine.core.weight_sync import ParamRecord

Share = Sequence[TableHandle | Mapping[str, Any]]


class WeightDuties:
    """One rank's part in a weight update; see :class:`areal.engine.core.weight_sender.WeightSender`."""

    weights: WeightSender

    @remote
    def publish_weights(self, version: int, keep: int | None = None) -> WeightManifest | None:
        """Write the weights where samplers can map them; every rank is called, the first one returns the manifest.

        ``keep``: descriptor of the buffer that is not touched.
        """
        return self.weights.write_shared(version, keep)

    @remote
    def save_weights(self, path: str) -> list[ParamRecord] | None:
        """Write them as a Hugging Face directory; every rank is called, the first one returns what is in it."""
        return self.weights.write_directory(path)

    @remote(concurrent=True, idempotent=True)
    def keep_only_weights(self, path: str) -> None:
        """Remove older directories beside ``path``; first rank."""
        self.weights.keep_only(path)

    @remote(concurrent=True, idempotent=True)
    def remove_weights(self, path: str) -> None:
        """Remove the directory of a version that was given up; first rank."""
        self.weights.remove_directory(path)

    @remote
    def weight_specs(self) -> list[ParamSpec] | None:
        """What will be sent, in order; every rank is called."""
        return self.weights.specs()

    @remote
    def weight_records(self) -> list[ParamRecord] | None:
        """Records of the current weights; every rank is called."""
        return self.weights.records()

    @remote(concurrent=True)
    def open_weight_store(self, host: str | None, timeout_s: float) -> tuple[str, int, str]:
        """Where a weight group meets, and with which backend; first rank."""
        return self.weights.open_store(host, timeout_s)

    @remote(concurrent=True)
    def join_weight_group(self, group: WeightGroup) -> None:
        """Become its rank 0; returns when every receiver has joined; first rank."""
        self.weights.join_group(group)

    @remote(concurrent=True, idempotent=True)
    def leave_weight_group(self, name: str) -> None:
        """Leave it, also while it is joined or sent in; first rank."""
        self.weights.leave_group(name)

    @remote
    def send_weights(self, name: str, buckets: list[list[ParamSpec]]) -> list[ParamRecord] | None:
        """Broadcast the weights; every rank is called, the first one returns what it sent."""
        return self.weights.send(name, buckets)


class RoleWorker(WeightDuties):
    """What every role offers: its place, its statistics, its weights, its checkpoints.

    Args:
        config: section of the role.
        engine: this rank's engine; initialised before any other call.
    """

    def __init__(self, config: Any, engine: TrainEngine) -> None:
        self.config = config
        self.engine = engine
        self.weights = WeightSender(engine, is_first_rank)
        self._staged: Callable[[], None] | None = None

    @remote(idempotent=True)
    def data_place(self) -> tuple[int, int]:
        """(data-parallel rank, data-parallel size)."""
        return self.engine.data_parallel_rank, self.engine.data_parallel_world_size

    @remote
    def export_stats(self) -> dict[str, float]:
        """Statistics since the last call, those of all ranks; every rank is called."""
        return dict(self.engine.export_stats())

    @remote
    def stage_save(self, meta: SaveLoadMeta) -> None:
        """Copy to host memory what ``save`` would write; :meth:`write_staged` writes it."""
        stage = getattr(self.engine, "stage_save", None)
        if stage is None:
            raise EngineError(f"{type(self.engine).__name__} cannot save in the background; set saver.mode=sync")
        self._staged = stage(meta)

    @remote(concurrent=True)
    def write_staged(self) -> None:
        """Write the staged checkpoint while training goes on; every rank is called."""
        if self._staged is None:
            raise EngineError("write_staged: nothing is staged")
        write, self._staged = self._staged, None
        write()

    def status(self) -> dict[str, Any]:
        """For people: which version this rank holds."""
        return {"version": self.engine.get_version()}

    def destroy(self) -> None:
        """Free the published weights; the engine is an object of its own."""
        self.weights.close()


class PPOActorWorker(RoleWorker):
    """A policy on one rank."""

    def __init__(self, config: Any, engine: TrainEngine) -> None:
        from areal.trainer.ppo.actor import PPOActor

        super().__init__(config, engine)
        self.actor = PPOActor(config, engine)
        self._batches: dict[int, PackedBatch] = {}
        self._tables: dict[int, list[dict[str, Any]]] = {}

    @remote(idempotent=True)
    def load(self, number: int, share: Share) -> None:
        """Fetch and pack this rank's share of batch ``number``; the same number again replaces it.

        Raises:
            TensorLostError: a worker that holds a trajectory is gone.
        """
        tables = load_tables(share)
        self._tables[number] = tables
        self._batches[number] = self.actor.pack(tables)

    @remote(idempotent=True)
    def extend(self, number: int, share: Share) -> None:
        """Add columns that another role computed to a loaded share; comes before :meth:`annotate`."""
        self._batch(number)
        tables = self._tables[number]
        for table, columns in zip(tables, load_tables(share), strict=True):
            table.update(columns)
        self._batches[number] = self.actor.pack(tables)

    @remote
    def annotate(self, number: int, key: str) -> None:
        """Log-probs under the current weights as token field ``key``."""
        self._batches[number] = self.actor.annotate(self._batch(number), key)

    @remote
    def score(self, number: int, key: str) -> list[RTensor]:
        """Log-probs under the current weights as a stored column ``key`` per table, in the order of the share."""
        self._batch(number)
        found = self.actor.compute_logp(self._tables[number])
        return [store_table({key: column}) for column in found]

    @remote
    def compute_advantages(self, number: int) -> None:
        """Shape rewards and compute advantages."""
        self._batches[number] = self.actor.compute_advantages(self._batch(number))

    @remote
    def ppo_update(self, number: int) -> None:
        """One optimizer step per mini-batch."""
        self.actor.ppo_update(self._batch(number))

    @remote(idempotent=True)
    def drop(self, number: int) -> None:
        """Forget a batch."""
        self._batches.pop(number, None)
        self._tables.pop(number, None)

    @remote(concurrent=True, idempotent=True)
    def free(self, shard_ids: list[str]) -> None:
        """Drop columns that :meth:`score` stored."""
        local_store().free(shard_ids)

    def _batch(self, number: int) -> PackedBatch:
        if number not in self._batches:
            raise EngineError(f"batch {number} is not loaded on this rank")
        return self._batches[number]

    @remote
    def probe_logprobs(self, sequences: list[list[int]], prompt_len: int) -> list[list[float]]:
        """Log-probs of what samplers drew after a prompt; every rank is called. See ``areal.trainer.weight_probe``."""
        from areal.trainer.weight_probe import score_tokens

        return score_tokens(self.actor, sequences, prompt_len)


class LMWorker(RoleWorker):
    """Supervised learning on one rank."""

    def __init__(self, config: Any, engine: TrainEngine) -> None:
        from areal.trainer.sft.learner import LMLearner

        super().__init__(config, engine)
        self.learner = LMLearner(engine)

    @remote
    def train_lm(self, share: Share) -> None:
        """One optimizer step on this rank's rows."""
        self.learner.train_lm(_rows(share))

    @remote
    def evaluate_lm(self, share: Share) -> None:
        """Evaluate this rank's rows; statistics go to ``sft-eval``."""
        self.learner.evaluate_lm(_rows(share))


def _rows(share: Share) -> list[dict[str, Any]]:
    """Rows of a rank; a rank without any gets one token without loss, as it must join the collectives of the step."""
    import torch

    none = {"input_ids": torch.zeros(1, 1, dtype=torch.int64), "loss_mask": torch.zeros(1, 1, dtype=torch.int64)}
    return load_tables(share) or [{**none, "attention_mask": torch.ones(1, 1, dtype=torch.bool)}]
