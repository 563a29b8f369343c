"""The role object of one rank in a worker process: it keeps the rank's share of a step and computes on it.

Hosted as ``actor/<rank>`` beside ``actor/<rank>.engine``; called by ``areal.infra.controller.train_controller``. A
share is fetched from the workers that made it and packed once; log-probs, advantages and updates then work on the
packed batch. One class per kind of role; those of supervised learners are in ``learner_workers``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from areal.api.remote import remote
from areal.engine.core.weight_sender import WeightSender
from areal.infra.controller.tables import TableHandle, load_tables, store_table
from areal.infra.rpc.rtensor import RTensor, local_store
from areal.trainer.ppo.teacher import Teacher, require_untaught
from areal.utils.batch import PackedBatch, split_like
from areal.utils.errors import EngineError
from areal.utils.ranks import is_first_rank

if TYPE_CHECKING:
    from areal.api.config.ppo import PPOActorConfig
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


class BatchWorker(RoleWorker):
    """A role of the PPO family on one rank: it keeps the rank's share of each batch.

    Args:
        config: section of the role.
        engine: this rank's engine.
        role: packs and annotates batches.
        score: its results for a list of tables, one ``[n, S]`` each.
    """

    _beside: Mapping[str, Any] = {}
    """Values that every table gets with the column that :meth:`score` computes."""

    def __init__(self, config: Any, engine: TrainEngine, role: Any, score: Callable[..., Any]) -> None:
        super().__init__(config, engine)
        self._role, self._score = role, score
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
        self._batches[number] = self._role.pack(tables)

    @remote(idempotent=True)
    def extend(self, number: int, share: Share) -> None:
        """Add columns that another role computed to a loaded share; comes before :meth:`annotate`."""
        self._batch(number)
        tables = self._tables[number]
        for table, columns in zip(tables, load_tables(share), strict=True):
            table.update(columns)
        self._batches[number] = self._role.pack(tables)

    @remote
    def annotate(self, number: int, key: str) -> None:
        """Log-probs (values) under the current weights as token field ``key``."""
        self._batches[number] = self._role.annotate(self._batch(number), key)

    @remote
    def score(self, number: int, key: str) -> list[RTensor]:
        """Log-probs (values) under the current weights as a stored column ``key`` per table, in the share's order."""
        self._batch(number)
        return [store_table({key: column, **self._beside}) for column in self._score(self._tables[number])]

    @remote(idempotent=True)
    def drop(self, number: int) -> None:
        """Forget a batch."""
        self._batches.pop(number, None)
        self._tables.pop(number, None)

    @remote(concurrent=True, idempotent=True)
    def free(self, shard_ids: list[str]) -> None:
        """Drop columns that this rank stored for other roles."""
        local_store().free(shard_ids)

    def _batch(self, number: int) -> PackedBatch:
        if number not in self._batches:
            raise EngineError(f"batch {number} is not loaded on this rank")
        return self._batches[number]


class PPOActorWorker(BatchWorker):
    """A policy on one rank."""

    def __init__(self, config: Any, engine: TrainEngine) -> None:
        from areal.trainer.ppo.actor import PPOActor

        self.actor = PPOActor(config, engine)
        super().__init__(config, engine, self.actor, self.actor.compute_logp)

    @remote
    def compute_advantages(self, number: int) -> None:
        """Shape rewards and compute advantages."""
        self._batches[number] = self.actor.compute_advantages(self._batch(number))

    @remote
    def targets(self, number: int) -> list[RTensor]:
        """What a value model learns from, as stored columns per table: ``returns`` and ``aligned_mask``."""
        batch, tables = self._batch(number), self._tables[number]
        returns, masks = (split_like(batch.tokens[key], batch.lens, tables) for key in ("returns", "loss_mask"))
        return [store_table({"returns": r, "aligned_mask": m}) for r, m in zip(returns, masks, strict=True)]

    @remote
    def ppo_update(self, number: int) -> None:
        """One optimizer step per mini-batch."""
        self.actor.ppo_update(self._batch(number))

    @remote
    def probe_logprobs(self, sequences: list[list[int]], prompt_len: int) -> list[list[float]]:
        """Log-probs of what samplers drew after a prompt; every rank is called. See ``areal.trainer.weight_probe``."""
        from areal.trainer.weight_probe import score_tokens

        return score_tokens(self.actor, sequences, prompt_len)


class PPOCriticWorker(BatchWorker):
    """A value model on one rank."""

    def __init__(self, config: Any, engine: TrainEngine) -> None:
        from areal.trainer.ppo.critic import PPOCritic

        self.critic = PPOCritic(config, engine)
        super().__init__(config, engine, self.critic, self.critic.compute_values)

    @remote
    def ppo_update(self, number: int) -> None:
        """One optimizer step per mini-batch on a batch that was extended by :meth:`PPOActorWorker.targets`."""
        batch = self._batch(number)
        self.critic.ppo_update(batch.with_tokens(loss_mask=batch.tokens["aligned_mask"]))

    @remote(idempotent=True)
    def load_answers(self, number: int, share: Share) -> None:
        """As :meth:`load`, for :meth:`evaluate`: only the columns that it reads, whatever else workflows returned."""
        self._batches[number] = self.critic.pack_answers(load_tables(share))

    @remote
    def evaluate(self, number: int, actor: PPOActorConfig) -> None:
        """See :meth:`areal.trainer.ppo.critic.PPOCritic.evaluate`; every rank is called."""
        self.critic.evaluate(self._batch(number), actor)


class TeacherWorker(BatchWorker):
    """A teacher on one rank."""

    def __init__(self, config: Any, engine: TrainEngine) -> None:
        teacher = Teacher(config, engine)
        super().__init__(config, engine, teacher, teacher.compute_logp)
        self._beside = config.loss_settings()

    @remote
    def score(self, number: int, key: str) -> list[RTensor]:
        """See :meth:`BatchWorker.score`.

        Raises:
            ConfigError: the workflow brought a teacher's log-probs already.
        """
        require_untaught(self._batch(number), key)
        return super().score(number, key)
