"""The teacher role alone: what it adds to a batch, and which teachers are refused before a model is loaded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from areal.api.config.ppo import TeacherConfig
from areal.dataset.char_tokenizer import VOCAB_SIZE
from areal.engine.fsdp_engine import FSDPEngine
from areal.trainer.ppo.teacher import Teacher, check_vocabulary
from areal.trainer.role_worker import TeacherWorker
from areal.utils.errors import ConfigError, VocabularyError
from areal.utils.hf_utils import load_hf_tokenizer
from tests.fakes import char_tokenizer, save_tiny_model, tiny_model


@pytest.fixture(scope="module")
def pupil(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("pupil"), vocab_size=VOCAB_SIZE)


def rows() -> list[dict[str, torch.Tensor]]:
    """Two groups of two sequences of several lengths."""
    tables = []
    for seed, lengths in enumerate([(5, 3), (4, 4)]):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(4, VOCAB_SIZE, (2, max(lengths)), generator=generator)
        tables.append({"input_ids": ids, "attention_mask": torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]})
    return tables


def test_annotate_adds_the_models_own_logprobs_and_the_settings_of_the_loss(pupil: str) -> None:
    config = TeacherConfig(
        experiment_name="e",
        trial_name="t",
        backend="fsdp:d1",
        path=pupil,
        dtype="float32",
        rl_loss_weight=0.25,
        distill_loss_weight=0.5,
        distill_estimator="k2",
    )
    engine = FSDPEngine(config)
    engine.create_process_group()
    engine.initialize(None, None)
    teacher = Teacher(config, engine)
    batch = teacher.pack(rows())

    taught = teacher.annotate(batch)

    assert taught.scalars == {"rl_loss_weight": 0.25, "distill_loss_weight": 0.5, "distill_estimator": "k2"}
    assert "teacher_logp" not in batch.tokens
    model = tiny_model(vocab_size=VOCAB_SIZE)
    found = taught.tokens["teacher_logp"]
    start = 0
    for table in rows():
        for ids, mask in zip(table["input_ids"], table["attention_mask"], strict=True):
            ids = ids[mask]
            logprobs = model(ids[None]).logits[0].log_softmax(-1)
            expected = logprobs[torch.arange(len(ids) - 1), ids[1:]]
            torch.testing.assert_close(found[start : start + len(ids) - 1], expected.detach(), rtol=0, atol=1e-5)
            start += len(ids)
    assert start == len(found)
    engine.destroy()


def test_batch_that_a_workflows_teacher_scored_is_refused_by_name(pupil: str) -> None:
    config = TeacherConfig(experiment_name="e", trial_name="t", backend="fsdp:d1", path=pupil, dtype="float32")
    engine = FSDPEngine(config)
    engine.create_process_group()
    engine.initialize(None, None)
    tables = [{**table, "teacher_logp": torch.zeros(table["input_ids"].shape)} for table in rows()]
    teacher, worker = Teacher(config, engine), TeacherWorker(config, engine)
    worker.load(1, tables)

    with pytest.raises(ConfigError, match=r"teacher_logp.*teacher section.*TaughtWorkflow"):
        teacher.annotate(teacher.pack(tables))
    with pytest.raises(ConfigError, match=r"teacher_logp.*teacher section.*TaughtWorkflow"):
        worker.score(1, "teacher_logp")

    worker.load(2, rows())
    assert len(worker.score(2, "teacher_logp")) == 2
    engine.destroy()


def run_config(teacher: str | Path | None, pupil: str) -> Any:
    """The settings that the check reads."""
    section = None if teacher is None else SimpleNamespace(path=str(teacher))
    return SimpleNamespace(teacher=section, actor=SimpleNamespace(path=pupil), tokenizer_path=pupil)


def test_check_vocabulary_without_teacher_or_with_the_same_or_a_larger_one_passes(pupil: str, tmp_path: Path) -> None:
    larger = save_tiny_model(tmp_path / "larger", vocab_size=VOCAB_SIZE + 16)
    tokenizer = char_tokenizer()
    tokenizer.add_tokens(["more"])
    tokenizer.save_pretrained(larger)

    for teacher in (None, pupil, larger):
        check_vocabulary(run_config(teacher, pupil), load_hf_tokenizer(pupil))


def test_check_vocabulary_other_ids_are_named(pupil: str, tmp_path: Path) -> None:
    other = save_tiny_model(tmp_path / "other", vocab_size=VOCAB_SIZE)
    file = tmp_path / "other" / "tokenizer.json"
    text = file.read_text(encoding="utf-8")
    swapped = text.replace('"0": 4', '"0": x').replace('"1": 5', '"1": 4').replace('"0": x', '"0": 5')
    assert swapped != text
    file.write_text(swapped, encoding="utf-8")

    with pytest.raises(VocabularyError, match=r"2 of 32 tokens differ \('0' is 4 here and 5 there, '1' is 5 here"):
        check_vocabulary(run_config(other, pupil), load_hf_tokenizer(pupil))


def test_check_vocabulary_missing_tokens_are_named(pupil: str, tmp_path: Path) -> None:
    tokenizer = char_tokenizer()
    tokenizer.add_tokens(["more"])

    with pytest.raises(VocabularyError, match=r"1 of 33 tokens differ \('more' is 32 here and absent there\)"):
        check_vocabulary(run_config(pupil, pupil), tokenizer)


def test_check_vocabulary_fewer_rows_than_the_policy_is_refused(pupil: str, tmp_path: Path) -> None:
    policy = save_tiny_model(tmp_path / "policy", vocab_size=VOCAB_SIZE + 8)

    with pytest.raises(VocabularyError, match=rf"knows {VOCAB_SIZE} token ids and .* can draw {VOCAB_SIZE + 8}"):
        check_vocabulary(run_config(pupil, policy), load_hf_tokenizer(policy))


@pytest.mark.parametrize("directory", ["bare", "nowhere"])
def test_check_vocabulary_without_a_tokenizer_is_refused(directory: str, pupil: str, tmp_path: Path) -> None:
    tiny_model(vocab_size=VOCAB_SIZE).save_pretrained(tmp_path / "bare")

    with pytest.raises(VocabularyError, match="cannot be compared.*Put tokenizer.json beside it"):
        check_vocabulary(run_config(tmp_path / directory, pupil), load_hf_tokenizer(pupil))
