"""Every Archon layout against one process with transformers in float32: the right value is the same number everywhere.

Gradients and parameters are put together here from the parts that the ranks hold; what several ranks hold must be the
same bits, because nothing would bring copies together again that drifted apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from areal.experimental.models.archon.model_spec import get_model_spec
from areal.experimental.models.archon.state_dict import EMBEDDING, HEAD, StateDictAdapter
from tests.archon_fakes import hf_model
from tests.torchrun import archon_cells as cells
from tests.torchrun.archon_cells import Arrays, Part, RankOutcome
from tests.torchrun.layout_cells import LENGTHS, Outcome, reference, rows
from tests.torchrun.live_group import LiveGroup

# Three layers: pipeline stages of different lengths, one of them without a layer where there are four.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {"num_hidden_layers": 3}),
    "qwen2_untied": ("qwen2_untied", {"num_hidden_layers": 3}),
    "qwen3": ("qwen3", {}),
    "llama_tied": ("llama_tied_linear", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe_mixed": ("qwen3_moe_mixed", {}),  # four layers, one of them with experts
}
EXPERTS = ("qwen3_moe", "qwen3_moe_mixed")
SCHEDULES = ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")
DIAGONAL = [("sft", 1), ("ppo", 2), ("value", 3), ("ppo", 5)]
EVERYTHING = list(range(len(LENGTHS)))
UNEVEN = {1: [EVERYTHING], 2: [EVERYTHING[:5], EVERYTHING[5:]], 4: [[0, 1], [2], [3, 4, 5, 6, 7], []]}
ONE_EMPTY = {1: [EVERYTHING], 2: [EVERYTHING, []], 4: [[], EVERYTHING, [], []]}


@dataclass(frozen=True)
class Layout:
    """One way to spread a model over ranks.

    Attributes:
        backend: what follows ``archon:``.
        d: ranks with different rows.
        model: ranks that share rows.
        schedule: of the pipeline, if there is one.
    """

    backend: str
    d: int = 1
    model: int = 1
    schedule: str = ""

    def __str__(self) -> str:
        return f"{self.backend}{'-' if self.schedule else ''}{self.schedule}"

    @property
    def arguments(self) -> dict[str, Any]:
        """For the cells."""
        found: dict[str, Any] = {"backend": f"archon:{self.backend}"}
        return {**found, "archon": {"pp_schedule": self.schedule}} if self.schedule else found

    def shard_of(self, rank: int) -> int:
        """Which rows ``rank`` has: ranks of one pipeline stage that share rows are neighbours, stages are not."""
        stages = self.model if self.backend == "p2" else 2 if "p2" in self.backend else 1
        inner = self.model // stages
        return (rank % (self.d * inner)) // inner


PIPELINES = [Layout("p2", model=2, schedule=schedule) for schedule in SCHEDULES]
TWO_RANKS = [Layout("d2", d=2), Layout("t2", model=2), Layout("c2", model=2), *PIPELINES]
# Experts spread over ranks that hold different rows, slices of rows or shards; each expert whole, or cut.
TWO_RANKS_EXPERTS = [
    Layout("(attn:d2|ffn:e2)", d=2),
    Layout("(attn:c2|ffn:e2)", model=2),
    Layout("(attn:t2|ffn:e2)", model=2),
    Layout("(attn:t2|ffn:t2)", model=2),
]
FOUR_RANKS = [
    Layout("d4", d=4),
    Layout("d2t2", d=2, model=2),
    Layout("d2c2", d=2, model=2),
    Layout("c2t2", model=4),
    *(Layout("d2p2", d=2, model=2, schedule=schedule) for schedule in SCHEDULES),
    *(Layout("p2t2", model=4, schedule=schedule) for schedule in SCHEDULES),
    *(Layout("p2c2", model=4, schedule=schedule) for schedule in ("1F1B", "ZBVZeroBubble")),
]
FOUR_RANKS_EXPERTS = [
    Layout("(attn:d4|ffn:e4)", d=4),
    Layout("(attn:d4|ffn:d2e2)", d=4),
    Layout("(attn:d2t2|ffn:d2e2)", d=2, model=2),  # etp 1: the ranks of t share the tokens out
    Layout("(attn:d2t2|ffn:e4)", d=2, model=2),
    Layout("(attn:d2t2|ffn:e2t2)", d=2, model=2),  # etp = tp
    Layout("(attn:d2c2|ffn:e4)", d=2, model=2),
    Layout("(attn:d2c2|ffn:d2e2)", d=2, model=2),
    Layout("(attn:c2t2|ffn:e4)", model=4),
    Layout("(attn:c2t2|ffn:e2t2)", model=4),
    *(Layout("(attn:d2p2|ffn:p2e2)", d=2, model=2, schedule=schedule) for schedule in SCHEDULES),
    Layout("(attn:p2t2|ffn:p2e2)", model=4, schedule="1F1B"),
    Layout("(attn:p2t2|ffn:p2t2)", model=4, schedule="ZBVZeroBubble"),
    Layout("(attn:p2c2|ffn:p2e2)", model=4, schedule="Interleaved1F1B"),
]

IN_CI = [("d2t2", "qwen2"), ("c2t2", "qwen3"), ("p2t2-1F1B", "qwen2"), ("(attn:d2t2|ffn:e2t2)", "qwen3_moe")]


def _on_four_ranks(layouts: list[Layout], names: Iterable[str]) -> list[Any]:
    """Slow tests of every pair; few of them run in CI."""
    return [
        pytest.param(layout, name, marks=[pytest.mark.slow, *([pytest.mark.ci] * ((str(layout), name) in IN_CI))])
        for layout in layouts
        for name in names
    ]


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("archon")
    for name, (family, settings) in MODELS.items():
        hf_model(family, **settings).save_pretrained(root / name)
    return {name: str(root / name) for name in MODELS}


@cache
def _adapter(path: str) -> StateDictAdapter:
    config = AutoConfig.from_pretrained(path)
    spec = get_model_spec(config.model_type)
    return spec.state_dict_adapter_class(spec.model_args_class.from_hf_config(config))


@cache
def _reference(path: str, loss_name: str, masked: tuple[int, ...] = ()) -> Outcome:
    """Gradients and weights are under Archon's names."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    outcome = reference(model, loss_name, rows(masked=masked))
    to_own = _adapter(path).from_hf
    outcome.gradients = [to_own(gradients) for gradients in outcome.gradients]
    outcome.weights = to_own(outcome.weights)
    return outcome


def _whole(ranks: list[dict[str, Part]]) -> dict[str, Tensor]:
    """Tensors made of the parts that the ranks hold, by own name."""
    found: dict[str, np.ndarray] = {}
    for parts in ranks:
        for name, (place, shape, values) in parts.items():
            whole = found.setdefault(name, np.full(shape, np.nan, dtype=np.float32))
            held = ~np.isnan(whole[place])
            assert np.array_equal(whole[place][held], values[held]), f"{name}: ranks hold different values of {place}"
            whole[place] = values
    for name, whole in found.items():
        assert not np.isnan(whole).any(), f"{name}: no rank holds a part of it"
    return {name: torch.from_numpy(whole) for name, whole in found.items()}


def _union(ranks: list[Arrays]) -> dict[str, Tensor]:
    found: dict[str, np.ndarray] = {}
    for tensors in ranks:
        for name, tensor in tensors.items():
            assert np.array_equal(found.setdefault(name, tensor), tensor), name
    return {name: torch.from_numpy(tensor) for name, tensor in found.items()}


@dataclass
class Check:
    """Compares what the ranks of one case have with the reference; collects what differs, to show all of it."""

    layout: Layout
    shards: list[list[int]]
    expected: Outcome
    tied: bool
    faults: list[str] = field(default_factory=list)

    def case(self, ranks: list[RankOutcome], n_mbs: int | None) -> None:
        """Everything but the export."""
        for rank, outcome in enumerate(ranks):
            self._numbers(f"rank {rank}: loss", outcome.losses, self.expected.losses)
            self._numbers(f"rank {rank}: grad_norm", outcome.norms, self.expected.norms)
            if n_mbs is not None:
                assert [result["num_micro_batches"] for result in outcome.results] == [n_mbs] * 2
            assert outcome.results == ranks[0].results
            self._rows(rank, outcome)
        for index in range(len(self.shards)):
            self._entropy(index, [r.entropy for rank, r in enumerate(ranks) if self.layout.shard_of(rank) == index])
        for step in range(2):
            gradients = _whole([outcome.gradients[step] for outcome in ranks])
            self._tensors(f"step {step}: gradient", gradients, self.expected.gradients[step], relative=1e-4)
        self._tensors("parameter", _whole([r.parameters for r in ranks]), self.expected.weights, absolute=1e-5)

    def _numbers(self, what: str, ours: list[float], expected: list[float]) -> None:
        if ours != pytest.approx(expected, rel=1e-5, abs=1e-5):
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
        missing = expected.keys() - ours.keys() - ({HEAD} if self.tied else set())
        assert not missing, f"{what}: no rank has {sorted(missing)}"
        assert ours.keys() <= expected.keys()
        for name, tensor in ours.items():
            limit = max(relative * expected[name].abs().max().item(), absolute, 1e-8)
            self._close(f"{what} of {name}", tensor, expected[name], limit)

    def _close(self, what: str, ours: Any, expected: Tensor, limit: float = 1e-5) -> None:
        difference = (torch.as_tensor(ours) - expected).abs().max().item() if expected.numel() else 0.0
        if not difference <= limit:  # NaN is a fault too
            self.faults.append(f"{what}: differs by {difference:.2e}, at most {limit:.2e} is allowed")


def _check(
    group: LiveGroup | cells.OneProcess,
    path: str,
    layout: Layout,
    cases: list[tuple[str, int]],
    shards: dict[int, list[list[int]]],
    masked: tuple[int, ...] = (),
    out: Path | None = None,
    **settings: Any,
) -> None:
    """Run ``cases`` on ``layout`` and compare what every rank has with one process; then its export, if asked for."""
    arguments = {**layout.arguments, **settings}
    if "archon" in layout.arguments and "archon" in settings:
        arguments["archon"] = {**layout.arguments["archon"], **settings["archon"]}
    ranks = group.run(
        cells.compare,
        path=path,
        cases=cases,
        shards=shards[layout.d],
        masked=masked,
        out=None if out is None else str(out),
        **arguments,
    )
    assert len(ranks) == layout.d * layout.model
    adapter = _adapter(path)
    faults = []
    for number, (loss_name, n_mbs) in enumerate(cases):
        outcomes = [rank[number] for rank in ranks]
        check = Check(layout, shards[layout.d], _reference(path, loss_name, masked), adapter.args.tied)
        check.case(outcomes, None if "mb_spec" in settings else n_mbs)
        faults += [f"{loss_name}, {n_mbs} micro-batches: {fault}" for fault in check.faults]
    assert not faults, f"{len(faults)} faults:\n" + "\n".join(faults[:20])
    published = _union([outcome.weights for outcome in outcomes])
    own = _whole([outcome.parameters for outcome in outcomes])
    for name, tensor in adapter.from_hf(published).items():
        assert torch.equal(own.get(name, own[EMBEDDING]), tensor), name
    if out is not None:
        _assert_export(path, out, published)


def _assert_export(path: str, out: Path, published: dict[str, Tensor]) -> None:
    """The export has the names and shapes of the original directory and the values of the engine."""
    original, exported = load_file(Path(path) / "model.safetensors"), load_file(out / "model.safetensors")
    assert sorted(exported) == sorted(original)
    assert published.keys() == exported.keys()
    for name, tensor in exported.items():
        assert tensor.shape == original[name].shape, name
        assert torch.equal(tensor, published[name]), name
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    again = _adapter(path).from_hf(dict(loaded.named_parameters()))
    for name, tensor in _adapter(path).from_hf(exported).items():
        assert torch.equal(again[name], tensor), name


@pytest.mark.parametrize("name", MODELS)
def test_one_process_every_model_equals_transformers(model_dirs: dict[str, str], name: str, tmp_path: Path) -> None:
    _check(cells.OneProcess(), model_dirs[name], Layout("d1"), DIAGONAL, UNEVEN, out=tmp_path / "export")


# Layouts are the same code for every model: one with and one without experts stand for them where time is short.
IN_TURN = [
    name if name in ("qwen2", "qwen3_moe") else pytest.param(name, marks=[pytest.mark.slow, pytest.mark.ci])
    for name in MODELS
]


@pytest.mark.parametrize("name", IN_TURN)
@pytest.mark.parametrize("layout", TWO_RANKS, ids=str)
def test_two_ranks_every_model_equals_one_process(
    two_ranks: LiveGroup, model_dirs: dict[str, str], layout: Layout, name: str, tmp_path: Path
) -> None:
    _check(two_ranks, model_dirs[name], layout, DIAGONAL, UNEVEN, out=tmp_path / "export")


@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.parametrize("layout", TWO_RANKS_EXPERTS, ids=str)
def test_two_ranks_spread_experts_equal_one_process(
    two_ranks: LiveGroup, model_dirs: dict[str, str], layout: Layout, name: str, tmp_path: Path
) -> None:
    _check(two_ranks, model_dirs[name], layout, DIAGONAL, UNEVEN, out=tmp_path / "export")


@pytest.mark.parametrize("layout", [Layout("d2", d=2), Layout("(attn:d2|ffn:e2)", d=2)], ids=str)
def test_two_ranks_rank_without_rows_or_loss_equals_one_process(
    two_ranks: LiveGroup, model_dirs: dict[str, str], layout: Layout
) -> None:
    name = "qwen2" if layout.backend == "d2" else "qwen3_moe"
    _check(two_ranks, model_dirs[name], layout, [("sft", 1), ("ppo", 3)], ONE_EMPTY)
    _check(two_ranks, model_dirs[name], layout, [("ppo", 2)], UNEVEN, masked=(5, 6, 7))


@pytest.mark.parametrize("layout", TWO_RANKS[1:], ids=str)
def test_two_ranks_micro_batches_without_loss_equal_one_process(
    two_ranks: LiveGroup, model_dirs: dict[str, str], layout: Layout
) -> None:
    _check(two_ranks, model_dirs["qwen2"], layout, [("value", 5)], UNEVEN, masked=(1, 4, 5, 6, 7))


@pytest.mark.parametrize(
    "settings",
    [
        {"archon": {"attn_type": "sdpa"}},
        {"mb_spec": {"max_tokens_per_mb": 13}},
        {"mb_spec": {"max_tokens_per_mb": 60}, "pad_to_maximum": True},
        {"gradient_checkpointing": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("layout", [TWO_RANKS[1], TWO_RANKS[2], PIPELINES[1]], ids=str)
def test_two_ranks_settings_equal_one_process(
    two_ranks: LiveGroup, model_dirs: dict[str, str], layout: Layout, settings: dict[str, Any]
) -> None:
    _check(two_ranks, model_dirs["qwen3"], layout, [("ppo", 1)], UNEVEN, **settings)


@pytest.mark.parametrize(
    ("layout", "archon"),
    [
        (PIPELINES[0], {"pp_first_stage_less_layers": 0, "pp_last_stage_less_layers": 2}),  # three layers and one
        (PIPELINES[1], {"pp_layers_per_stage": 1}),  # three stages on each rank
        (PIPELINES[2], {"pp_first_stage_less_layers": 0, "pp_last_stage_less_layers": 0}),
    ],
    ids=str,
)
def test_two_ranks_other_pipeline_splits_equal_one_process(
    two_ranks: LiveGroup, model_dirs: dict[str, str], layout: Layout, archon: dict[str, Any]
) -> None:
    _check(two_ranks, model_dirs["qwen3_moe_mixed"], layout, [("ppo", 3)], UNEVEN, archon=archon)


@pytest.mark.parametrize(("layout", "name"), _on_four_ranks(FOUR_RANKS, MODELS), ids=str)
def test_four_ranks_every_model_equals_one_process(
    four_ranks: LiveGroup, model_dirs: dict[str, str], layout: Layout, name: str, tmp_path: Path
) -> None:
    cases = DIAGONAL if name in ("qwen2", "qwen3_moe") else DIAGONAL[1:3]
    _check(four_ranks, model_dirs[name], layout, cases, UNEVEN, out=tmp_path / "export")


@pytest.mark.parametrize(("layout", "name"), _on_four_ranks(FOUR_RANKS_EXPERTS, EXPERTS), ids=str)
def test_four_ranks_spread_experts_equal_one_process(
    four_ranks: LiveGroup, model_dirs: dict[str, str], layout: Layout, name: str, tmp_path: Path
) -> None:
    _check(four_ranks, model_dirs[name], layout, DIAGONAL, UNEVEN, out=tmp_path / "export")


@pytest.mark.slow
@pytest.mark.parametrize("layout", [x for x in FOUR_RANKS + FOUR_RANKS_EXPERTS if x.d > 1], ids=str)
def test_four_ranks_rank_without_rows_or_loss_equals_one_process(
    four_ranks: LiveGroup, model_dirs: dict[str, str], layout: Layout
) -> None:
    name = "qwen3_moe" if "ffn" in layout.backend else "qwen2"
    _check(four_ranks, model_dirs[name], layout, [("ppo", 2)], ONE_EMPTY)
    _check(four_ranks, model_dirs[name], layout, [("ppo", 2)], UNEVEN, masked=(5, 6, 7))


def _run(request: pytest.FixtureRequest, layout: Layout, cell: Any, **kwargs: Any) -> list[Any]:
    """Results by rank of a cell on as many ranks as ``layout`` has."""
    group = request.getfixturevalue("two_ranks" if layout.d * layout.model == 2 else "four_ranks")
    return group.run(cell, **layout.arguments, **kwargs)


D2, E2, ZBV = TWO_RANKS[0], TWO_RANKS_EXPERTS[0], PIPELINES[3]
D2T2, D2P2 = FOUR_RANKS[1], FOUR_RANKS[4]
RESUMES = [
    (D2, PIPELINES[0], "qwen2"),
    (PIPELINES[1], D2, "qwen2_untied"),
    (ZBV, TWO_RANKS[1], "llama_tied"),
    (TWO_RANKS[1], PIPELINES[2], "qwen3"),
    (TWO_RANKS[2], ZBV, "qwen2"),
    (E2, PIPELINES[0], "qwen3_moe_mixed"),
    (TWO_RANKS_EXPERTS[3], E2, "qwen3_moe"),
    pytest.param(D2T2, PIPELINES[0], "qwen2", marks=[pytest.mark.slow, pytest.mark.ci]),
    *(
        pytest.param(*row, marks=pytest.mark.slow)
        for row in (
            (D2T2, PIPELINES[0], "qwen3_moe"),
            (D2P2, D2T2, "qwen2_untied"),
            (FOUR_RANKS_EXPERTS[4], PIPELINES[1], "qwen3_moe"),
            (PIPELINES[1], FOUR_RANKS_EXPERTS[3], "qwen3_moe"),
        )
    ),
]


@pytest.mark.parametrize(("first", "second", "name"), RESUMES, ids=str)
def test_recover_point_of_one_layout_continues_in_another(  # noqa: PLR0913 - one row of the table
    request: pytest.FixtureRequest,
    model_dirs: dict[str, str],
    first: Layout,
    second: Layout,
    name: str,
    tmp_path: Path,
) -> None:
    arguments = {"path": model_dirs[name], "out": str(tmp_path / "point")}
    expected = _run(request, first, cells.save_and_go_on, shards=UNEVEN[first.d], **arguments)
    resumed = _run(request, second, cells.resume, shards=UNEVEN[second.d], **arguments)

    for answer in resumed:
        assert answer["version"] == expected[0]["version"] == 4
        for ours, wanted in zip(answer["results"], expected[0]["results"], strict=True):
            assert ours["lr"] == pytest.approx(wanted["lr"], rel=1e-9)
            assert ours["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5)
    weights, wanted = (_union([answer["weights"] for answer in ranks]) for ranks in (resumed, expected))
    assert weights.keys() == wanted.keys()
    for key, tensor in wanted.items():
        torch.testing.assert_close(weights[key], tensor, rtol=0, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe_mixed"])
def test_init_from_scratch_gives_equal_weights_in_every_layout(
    request: pytest.FixtureRequest, model_dirs: dict[str, str], name: str
) -> None:
    path = model_dirs[name]
    layouts = TWO_RANKS + (TWO_RANKS_EXPERTS if name in EXPERTS else [])
    expected = _union([cells.fresh_weights(path, "archon:d1", seed=3)])
    other = _union([cells.fresh_weights(path, "archon:d1", seed=4)])

    faults = []
    for layout in layouts:
        found = _union(_run(request, layout, cells.fresh_weights, path=path, seed=3))
        assert found.keys() == expected.keys(), layout
        faults += [f"{layout}: {key}" for key, tensor in expected.items() if not torch.equal(found[key], tensor)]

    assert not faults, f"{len(faults)} tensors differ from one process: {faults[:10]}"
    matrices = {key: tensor for key, tensor in expected.items() if tensor.dim() > 1}
    assert all(0.1 < tensor.std() < 0.3 for tensor in matrices.values())  # initializer_range is 0.2
    assert len({tensor.sum().item() for tensor in matrices.values()}) == len(matrices)
    assert not any(torch.equal(other[key], tensor) for key, tensor in matrices.items())


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        (PIPELINES[3], "qwen2"),
        (TWO_RANKS[1], "qwen3_moe"),
        (TWO_RANKS[2], "llama_tied"),
        (E2, "qwen3_moe"),
        (TWO_RANKS_EXPERTS[3], "qwen3_moe_mixed"),
        pytest.param(D2T2, "qwen2", marks=pytest.mark.slow),
        pytest.param(FOUR_RANKS_EXPERTS[4], "qwen3_moe", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_hf_export_is_read_again_by_its_layout(
    request: pytest.FixtureRequest, model_dirs: dict[str, str], layout: Layout, name: str, tmp_path: Path
) -> None:
    arguments = {"path": model_dirs[name], "out": str(tmp_path / "export")}
    for before, after in _run(request, layout, cells.reload, **arguments):
        assert before.keys() == after.keys()
        for key, tensor in before.items():
            assert np.array_equal(after[key], tensor), key


@pytest.mark.parametrize("layout", [TWO_RANKS[1], PIPELINES[0], ZBV], ids=str)
def test_two_ranks_next_engine_of_a_layout_makes_no_more_groups(
    two_ranks: LiveGroup, model_dirs: dict[str, str], layout: Layout
) -> None:
    for counts in two_ranks.run(cells.count_groups, path=model_dirs["qwen2"], engines=3, **layout.arguments):
        assert counts[0] == counts[2], "a group costs memory, threads and sockets for the life of the process"
