"""What ranks of any layout saw of a few optimizer steps, compared with one process; shared by the engines' suites.

Gradients and parameters are put together here from the parts that the ranks hold; what several ranks hold must be the
same bits, because nothing would bring copies together again that drifted apart.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from areal.engine.core.tensor_parts import Index
from tests.engine_fakes import weight_fn
from tests.torchrun.layout_cells import LENGTHS, LOSSES, Outcome, reference, rows
from tests.torchrun.live_group import LiveGroup

Part = tuple[Index, tuple[int, ...], np.ndarray]  # place in the whole, shape of the whole, values
Arrays = dict[str, np.ndarray]  # arrays travel in the message; each tensor would need a file descriptor

EVERYTHING = list(range(len(LENGTHS)))
UNEVEN = {1: [EVERYTHING], 2: [EVERYTHING[:5], EVERYTHING[5:]], 4: [[0, 1], [2], [3, 4, 5, 6, 7], []]}
ONE_EMPTY = {1: [EVERYTHING], 2: [EVERYTHING, []], 4: [[], EVERYTHING, [], []]}


@dataclass
class RankOutcome:
    """What one rank saw of a few optimizer steps.

    Attributes:
        losses: of ``eval_batch`` before each step.
        norms: gradient norms before clipping.
        results: what ``train_batch`` returned.
        logprobs: of this rank's rows, before the first step.
        entropy: by token number, before the first step; NaN where this rank called no loss.
        gradients: this rank's parts of every gradient, by own name, for each step, before clipping.
        parameters: this rank's parts of every parameter at the end.
        weights: full tensors that the engine gives to publishers, by checkpoint name.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    results: list[dict[str, float]] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    entropy: np.ndarray | None = None
    gradients: list[dict[str, list[Part]]] = field(default_factory=list)
    parameters: dict[str, list[Part]] = field(default_factory=dict)
    weights: Arrays = field(default_factory=dict)


def watched_steps(
    engine: Any,
    loss_name: str,
    own: list[dict[str, Tensor]],
    steps: int,
    gradient_parts: Callable[[Any], dict[str, list[Part]]],
) -> RankOutcome:
    """Take optimizer steps on the rows ``own``; everything that is seen on the way, without the weights at the end."""
    outcome = RankOutcome(logprobs=[x.numpy() for x in engine.forward_batch(own)])
    loss_fn, optimizer = LOSSES[loss_name], engine.loop.optimizer
    entropies = torch.full((sum(n + 2 for n in LENGTHS),), float("nan"))

    def watched(logprobs: Tensor, entropy: Tensor, packed: dict[str, Any]) -> Tensor:
        entropies[packed["token_id"]] = entropy.detach().float()
        return loss_fn(logprobs, entropy, packed)

    def step(inspect: Callable[[float], None] | None = None) -> dict[str, float]:
        def look(norm: float) -> None:  # once the gradients are put together, before they are clipped
            outcome.gradients.append(gradient_parts(engine))
            if inspect is not None:
                inspect(norm)

        return type(optimizer).step(optimizer, look)

    optimizer.step = step
    for index in range(steps):
        outcome.losses.append(engine.eval_batch(own, watched, weight_fn).item())
        if index == 0:
            outcome.entropy = entropies.clone().numpy()
        outcome.results.append(engine.train_batch(own, loss_fn, weight_fn))
        outcome.norms.append(outcome.results[-1]["grad_norm"])
    del optimizer.step
    return outcome


@dataclass(frozen=True)
class Layout:
    """One way to spread a model over ranks.

    Attributes:
        backend: what follows the engine's name and a colon.
        d: ranks with different rows.
        model: ranks that share rows.
        schedule: of Archon's pipeline, if there is one.
        engine: ``archon`` or ``megatron``.
        virtual: stages of each of megatron's pipeline ranks.
    """

    backend: str
    d: int = 1
    model: int = 1
    schedule: str = ""
    engine: str = "archon"
    virtual: int = 1

    def __str__(self) -> str:
        kind = self.schedule or (f"v{self.virtual}" if self.virtual > 1 else "")
        return f"{self.backend}{'-' if kind else ''}{kind}"

    @property
    def arguments(self) -> dict[str, Any]:
        """For the cells."""
        found: dict[str, Any] = {"backend": f"{self.engine}:{self.backend}"}
        if self.virtual > 1:
            found["megatron"] = {"virtual_pipeline_parallel_size": self.virtual}
        return {**found, "archon": {"pp_schedule": self.schedule}} if self.schedule else found

    def shard_of(self, rank: int) -> int:
        """Which rows ``rank`` has: ranks of one pipeline stage that share rows are neighbours, stages are not."""
        stages = self.model if self.backend == "p2" else 2 if "p2" in self.backend else 1
        inner = self.model // stages
        return (rank % (self.d * inner)) // inner


def slow_pairs(layouts: Iterable[Layout], names: Iterable[str], in_ci: Container[tuple[str, str]]) -> list[Any]:
    """Slow tests of every pair; few of them run in CI."""
    return [
        pytest.param(layout, name, marks=[pytest.mark.slow, *([pytest.mark.ci] * ((str(layout), name) in in_ci))])
        for layout in layouts
        for name in names
    ]


def whole_tensors(ranks: list[dict[str, list[Part]]]) -> dict[str, Tensor]:
    """Tensors made of the parts that the ranks hold, by own name."""
    found: dict[str, np.ndarray] = {}
    for parts in ranks:
        for name, (place, shape, values) in ((name, part) for name, pieces in parts.items() for part in pieces):
            whole = found.setdefault(name, np.full(shape, np.nan, dtype=np.float32))
            assert not np.isnan(values).any(), f"{name}: a rank holds NaN in {place}"
            held = ~np.isnan(whole[place])
            assert np.array_equal(whole[place][held], values[held]), f"{name}: ranks hold different values of {place}"
            whole[place] = values
    for name, whole in found.items():
        assert not np.isnan(whole).any(), f"{name}: no rank holds a part of it"
    return {name: torch.from_numpy(whole) for name, whole in found.items()}


def union(ranks: list[Arrays]) -> dict[str, Tensor]:
    found: dict[str, np.ndarray] = {}
    for tensors in ranks:
        for name, tensor in tensors.items():
            assert np.array_equal(found.setdefault(name, tensor), tensor), name
    return {name: torch.from_numpy(tensor) for name, tensor in found.items()}


@dataclass
class Check:
    """Compares what the ranks of one case have with the reference; collects what differs, to show all of it.

    Attributes:
        layout: of the ranks.
        shards: rows of each data-parallel rank.
        expected: gradients and weights under own names.
        optional: own names that the reference has and no rank needs to have.
    """

    layout: Layout
    shards: list[list[int]]
    expected: Outcome
    optional: frozenset[str] = frozenset()
    faults: list[str] = field(default_factory=list)

    def case(self, ranks: list[RankOutcome], n_mbs: int | None) -> None:
        """Everything but the export."""
        for rank, outcome in enumerate(ranks):
            self._numbers(f"rank {rank}: loss", outcome.losses, self.expected.losses)
            self._numbers(f"rank {rank}: grad_norm", outcome.norms[:2], self.expected.norms[:2])
            # In a third step, two attention functions of transformers differ by 4e-5 on the tied Llama, in float32.
            self._numbers(f"rank {rank}: grad_norm", outcome.norms[2:], self.expected.norms[2:], relative=1e-4)
            if n_mbs is not None:
                assert [result["num_micro_batches"] for result in outcome.results] == [n_mbs] * len(
                    self.expected.losses
                )
            assert outcome.results == ranks[0].results
            self._rows(rank, outcome)
        for index in range(len(self.shards)):
            self._entropy(index, [r.entropy for rank, r in enumerate(ranks) if self.layout.shard_of(rank) == index])
        for step in range(len(self.expected.gradients)):
            gradients = whole_tensors([outcome.gradients[step] for outcome in ranks])
            self._tensors(f"step {step}: gradient", gradients, self.expected.gradients[step], relative=1e-4)
        self._tensors("parameter", whole_tensors([r.parameters for r in ranks]), self.expected.weights, absolute=1e-5)

    def _numbers(self, what: str, ours: list[float], expected: list[float], relative: float = 1e-5) -> None:
        if ours != pytest.approx(expected, rel=relative, abs=1e-5):
            self.faults.append(f"{what}: {ours}, expected {expected}")

    def _rows(self, rank: int, outcome: RankOutcome) -> None:
        own = self.shards[self.layout.shard_of(rank)]
        assert len(outcome.logprobs) == len(own), f"rank {rank} has other rows"
        for values, index in zip(outcome.logprobs, own, strict=True):
            last = LENGTHS[index] - 1
            self._close(f"rank {rank}: log-probs of row {index}", values[0, :last], self.expected.logprobs[index])
            assert not values[0, last:].any()

    def _entropy(self, index: int, entropies: list[np.ndarray | None]) -> None:
        """Of the tokens of shard ``index``: the ranks that called a loss saw all of them."""
        assert self.expected.entropy is not None
        starts = np.cumsum([0, *(n + 2 for n in LENGTHS)])
        expected = torch.split(self.expected.entropy, list(LENGTHS))
        seen = [x for x in entropies if x is not None and not np.isnan(x).all()]
        assert seen or not self.shards[index], f"no rank with the rows {self.shards[index]} called a loss"
        for values in seen:
            for row in self.shards[index]:
                found = values[starts[row] : starts[row] + LENGTHS[row]]
                self._close(f"entropy of row {row}", found, expected[row])

    def _tensors(
        self, what: str, ours: dict[str, Tensor], expected: dict[str, Tensor], relative: float = 0, absolute: float = 0
    ) -> None:
        missing = expected.keys() - ours.keys() - self.optional
        assert not missing, f"{what}: no rank has {sorted(missing)}"
        assert ours.keys() <= expected.keys()
        for name, tensor in ours.items():
            limit = max(relative * expected[name].abs().max().item(), absolute, 1e-8)
            self._close(f"{what} of {name}", tensor, expected[name], limit)

    def _close(self, what: str, ours: Any, expected: Tensor, limit: float = 1e-5) -> None:
        difference = (torch.as_tensor(ours) - expected).abs().max().item() if expected.numel() else 0.0
        if not difference <= limit:  # NaN is a fault too
            self.faults.append(f"{what}: differs by {difference:.2e}, at most {limit:.2e} is allowed")


class OneProcess:
    """Stands in for a live group of one rank: this process."""

    @staticmethod
    def run(cell: Any, **kwargs: Any) -> list[Any]:
        return [cell(**kwargs)]


@dataclass(frozen=True)
class Suite:
    """What every layout of one engine must do.

    Attributes:
        cells: what the ranks run: ``compare``, ``save_and_go_on``, ``resume``, ``fresh_weights``, ``reload``.
        to_own: makes own tensors of those of a transformers model, or of a checkpoint, in the directory given first.
        copies: own names, of a model in a directory, whose tensor need not be there as it is another one's.
        steps: optimizer steps of a comparison.
    """

    cells: ModuleType
    to_own: Callable[[str, dict[str, Tensor]], dict[str, Tensor]]
    copies: Callable[[str], dict[str, str]]
    steps: int = 2

    def check(  # noqa: PLR0913 - one comparison
        self,
        group: LiveGroup | OneProcess,
        path: str,
        layout: Layout,
        cases: list[tuple[str, int]],
        shards: dict[int, list[list[int]]],
        masked: tuple[int, ...] = (),
        out: Path | None = None,
        **settings: Any,
    ) -> None:
        """Run ``cases`` on ``layout`` and compare what ranks have with one process; then its export, if asked for."""
        arguments, section = {**layout.arguments, **settings}, layout.engine
        if section in layout.arguments and section in settings:
            arguments[section] = {**layout.arguments[section], **settings[section]}
        ranks = group.run(
            self.cells.compare,
            path=path,
            cases=cases,
            shards=shards[layout.d],
            masked=masked,
            out=None if out is None else str(out),
            **arguments,
        )
        assert len(ranks) == layout.d * layout.model
        copies, faults = self.copies(path), []
        for number, (loss_name, n_mbs) in enumerate(cases):
            outcomes = [rank[number] for rank in ranks]
            check = Check(layout, shards[layout.d], _reference(self, path, loss_name, masked), frozenset(copies))
            check.case(outcomes, None if "mb_spec" in settings else n_mbs)
            faults += [f"{loss_name}, {n_mbs} micro-batches: {fault}" for fault in check.faults]
        assert not faults, f"{len(faults)} faults:\n" + "\n".join(faults[:20])
        published = union([outcome.weights for outcome in outcomes])
        own = whole_tensors([outcome.parameters for outcome in outcomes])
        for name, tensor in self.to_own(path, published).items():
            assert torch.equal(own[name if name in own else copies[name]], tensor), name
        if out is not None:
            self._check_export(path, out, published)

    def _check_export(self, path: str, out: Path, published: dict[str, Tensor]) -> None:
        """The export has the names and shapes of the original directory and the values of the engine, bit by bit."""
        original, exported = load_file(Path(path) / "model.safetensors"), load_file(out / "model.safetensors")
        assert sorted(exported) == sorted(original)
        assert published.keys() == exported.keys()
        for name, tensor in exported.items():
            assert tensor.shape == original[name].shape, name
            assert torch.equal(tensor, published[name]), name
        loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        again = self.to_own(path, dict(loaded.named_parameters()))
        for name, tensor in self.to_own(path, exported).items():
            assert torch.equal(again[name], tensor), name

    def run(self, request: pytest.FixtureRequest, layout: Layout, cell: Any, **kwargs: Any) -> list[Any]:
        """Results by rank of a cell on as many ranks as ``layout`` has."""
        if layout.d * layout.model == 1:
            return OneProcess.run(cell, **layout.arguments, **kwargs)
        group = request.getfixturevalue("two_ranks" if layout.d * layout.model == 2 else "four_ranks")
        return group.run(cell, **layout.arguments, **kwargs)

    def check_recover_point(
        self, request: pytest.FixtureRequest, path: str, first: Layout, second: Layout, out: Path
    ) -> None:
        """A run that ``first`` saves goes on in ``second`` as it does in ``first``."""
        expected = self.run(request, first, self.cells.save_and_go_on, shards=UNEVEN[first.d], path=path, out=str(out))
        resumed = self.run(request, second, self.cells.resume, shards=UNEVEN[second.d], path=path, out=str(out))

        for answer in resumed:
            assert answer["version"] == expected[0]["version"] == 4
            for ours, wanted in zip(answer["results"], expected[0]["results"], strict=True):
                assert ours["lr"] == pytest.approx(wanted["lr"], rel=1e-9)
                assert ours["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5)
        weights, wanted = (union([answer["weights"] for answer in ranks]) for ranks in (resumed, expected))
        assert weights.keys() == wanted.keys()
        for key, tensor in wanted.items():
            difference = (weights[key] - tensor).abs().max().item()
            assert difference <= 1e-5, f"{key} differs by {difference:.2e}"

    def check_fresh_weights(self, request: pytest.FixtureRequest, path: str, one: Layout, others: list[Layout]) -> None:
        """``init_from_scratch`` gives ``one``'s weights in every other layout, and others with another seed."""
        expected, other = (union(self.run(request, one, self.cells.fresh_weights, path=path, seed=s)) for s in (3, 4))

        faults = []
        for layout in others:
            found = union(self.run(request, layout, self.cells.fresh_weights, path=path, seed=3))
            assert found.keys() == expected.keys(), layout
            faults += [f"{layout}: {key}" for key, tensor in expected.items() if not torch.equal(found[key], tensor)]

        assert not faults, f"{len(faults)} tensors differ from one process: {faults[:10]}"
        matrices = {key: tensor for key, tensor in expected.items() if tensor.dim() > 1}
        assert all(0.1 < tensor.std() < 0.3 for tensor in matrices.values())  # initializer_range is 0.2
        assert len({tensor.sum().item() for tensor in matrices.values()}) == len(matrices)
        assert not any(torch.equal(other[key], tensor) for key, tensor in matrices.items())

    def check_reload(self, request: pytest.FixtureRequest, path: str, layout: Layout, out: Path) -> None:
        """An export is read again, bit by bit."""
        for before, after in self.run(request, layout, self.cells.reload, path=path, out=str(out)):
            assert before.keys() == after.keys()
            for key, tensor in before.items():
                assert np.array_equal(after[key], tensor), key


@cache
def _reference(suite: Suite, path: str, loss_name: str, masked: tuple[int, ...]) -> Outcome:
    """Gradients and weights are under own names."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    outcome = reference(model, loss_name, rows(masked=masked), suite.steps)
    outcome.gradients = [suite.to_own(path, gradients) for gradients in outcome.gradients]
    outcome.weights = suite.to_own(path, outcome.weights)
    return outcome
