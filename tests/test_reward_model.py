"""A saved reward model as a reward: its scores, how calls share forward passes, and what is refused by name."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from areal.api.reward_api import AsyncRewardWrapper
from areal.dataset.char_tokenizer import VOCAB_SIZE
from areal.infra.rpc.serialization import decode, encode
from areal.reward import resolve_reward_fn
from areal.reward.reward_model import RewardModel, Scorer, shared_scorer
from areal.utils.errors import ConfigError, DataError, RewardError, VocabularyError
from areal.utils.hf_utils import apply_chat_template
from tests.fakes import char_tokenizer, save_tiny_model, tiny_config

TOKENIZER = char_tokenizer()


def classifier(labels: int = 1) -> PreTrainedModel:
    """A tiny classifier with a head large enough that scores differ."""
    torch.manual_seed(3)
    config = tiny_config(vocab_size=VOCAB_SIZE)
    config.num_labels, config.pad_token_id = labels, TOKENIZER.eos_token_id
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    torch.nn.init.normal_(model.score.weight)
    return model.eval()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A reward model whose padding token is its end token, as is common."""
    path = tmp_path_factory.mktemp("reward")
    classifier().save_pretrained(path)
    TOKENIZER.save_pretrained(path)
    return str(path)


def sample(prompt: str, answer: str, *, ended: bool = True) -> dict[str, Any]:
    """The arguments of a reward function for one sample."""
    completion = answer + (TOKENIZER.eos_token if ended else "")
    return {
        "prompt": prompt,
        "completions": completion,
        "prompt_ids": TOKENIZER.encode(prompt),
        "completion_ids": TOKENIZER.encode(completion),
        "messages": [{"role": "user", "content": prompt}],
    }


SAMPLES = [sample("1+2=", "3"), sample("12+34=", "46"), sample("7+8=", "15", ended=False), sample("1+1=", "")]


def expected(samples: list[dict[str, Any]]) -> list[float]:
    """Value at the last token of each sample, one sample at a time."""
    model = classifier()
    scores = []
    for each in samples:
        ids = torch.tensor([[*each["prompt_ids"], *each["completion_ids"]]])
        with torch.no_grad():
            scores.append(float(model.model(ids).last_hidden_state[0, -1] @ model.score.weight[0]))
    return scores


def ask(reward: RewardModel, samples: list[dict[str, Any]]) -> list[float]:
    """Scores of samples that are asked for at once."""

    async def all_at_once() -> list[float]:
        return await asyncio.gather(*(reward(**each) for each in samples))

    return asyncio.run(all_at_once())


def test_score_is_the_value_at_the_last_token_even_if_that_is_the_padding_token(saved: str) -> None:
    found = ask(RewardModel(saved, device="cpu"), SAMPLES)

    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected(SAMPLES)), rtol=1e-5, atol=1e-5)
    assert len({round(score, 3) for score in found}) == len(SAMPLES)


@pytest.mark.parametrize(("limit", "passes"), [(1, 12), (28, 6), (16384, 1)])
def test_waiting_calls_are_scored_together_up_to_the_limit(
    saved: str, limit: int, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = [sample("12+34=", str(1234560 + i)) for i in range(12)]  # 14 tokens each
    scorer = Scorer(saved, "cpu", "float32", limit)
    sizes: list[int] = []
    score = scorer.score
    monkeypatch.setattr(scorer, "score", lambda rows: sizes.append(len(rows)) or score(rows))
    gate = threading.Event()
    scorer._thread.submit(gate.wait)

    futures = [scorer.submit([*each["prompt_ids"], *each["completion_ids"]]) for each in samples]
    gate.set()
    found = [future.result(timeout=60) for future in futures]

    assert sizes == [12 // passes] * passes
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected(samples)), rtol=1e-5, atol=1e-5)


def test_a_call_that_was_given_up_costs_no_other_one(saved: str) -> None:
    scorer = Scorer(saved, "cpu", "float32", 16384)
    gate = threading.Event()
    scorer._thread.submit(gate.wait)
    futures = [scorer.submit(each["prompt_ids"]) for each in SAMPLES]
    assert futures[0].cancel()
    gate.set()

    assert [math.isfinite(future.result(timeout=60)) for future in futures[1:]] == [True] * 3


def test_a_pass_that_fails_reaches_its_calls_and_the_next_one_works(
    saved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scorer = Scorer(saved, "cpu", "float32", 16384)
    with monkeypatch.context() as patch:
        patch.setattr(scorer, "score", lambda rows: [][1])
        with pytest.raises(IndexError):
            scorer.submit([4, 5]).result(timeout=60)

    assert math.isfinite(scorer.submit([4, 5]).result(timeout=60))


def test_equal_settings_share_one_model_and_it_goes_with_its_last_user(saved: str) -> None:
    one, other = shared_scorer(saved, "cpu", "float32", 8), shared_scorer(saved, "cpu", "float32", 8)
    assert one is other
    assert shared_scorer(saved, "cpu", "float32", 9) is not one
    gone = weakref.ref(one)

    del one, other
    gc.collect()

    assert gone() is None


def test_resolve_loads_the_model_and_the_wrapper_awaits_it_in_the_loop(saved: str) -> None:
    reward = resolve_reward_fn(RewardModel(saved, device="cpu"))
    wrapper = AsyncRewardWrapper(reward)

    score = asyncio.run(wrapper(**SAMPLES[0]))

    assert score == pytest.approx(expected(SAMPLES[:1])[0], rel=1e-5)
    assert wrapper.timeout_seconds == 300
    assert AsyncRewardWrapper(reward, timeout_seconds=2).timeout_seconds == 2


def test_reward_model_travels_as_its_settings(saved: str) -> None:
    reward = RewardModel(saved, device="cpu", max_batch_tokens=100, retokenize=True)
    reward.areal_prepare()

    arrived = decode(memoryview(bytes(encode(reward))))

    assert isinstance(arrived, RewardModel)
    assert (arrived.path, arrived.max_batch_tokens, arrived.retokenize) == (saved, 100, True)
    assert ask(arrived, SAMPLES[:1]) == ask(reward, SAMPLES[:1])


def test_retokenize_scores_the_rendered_conversation(saved: str) -> None:
    foreign = {**SAMPLES[1], "prompt_ids": [40, 41], "completion_ids": [42], "completions": "46<|im_end|>\n"}
    rendered = apply_chat_template(TOKENIZER, [*foreign["messages"], {"role": "assistant", "content": "46"}])

    (found,) = ask(RewardModel(saved, device="cpu", retokenize=True), [foreign])

    assert rendered == [*SAMPLES[1]["prompt_ids"], *SAMPLES[1]["completion_ids"]]
    assert found == pytest.approx(expected(SAMPLES[1:2])[0], rel=1e-5)


def test_completion_of_another_vocabulary_is_refused_by_name(saved: str) -> None:
    foreign = {**SAMPLES[1], "completion_ids": [7, 9, 1]}

    with pytest.raises(VocabularyError, match="'46<eos>' is '35<eos>' there. Set retokenize=true"):
        ask(RewardModel(saved, device="cpu"), [foreign])
    with pytest.raises(RewardError, match="VocabularyError"):
        asyncio.run(AsyncRewardWrapper(RewardModel(saved, device="cpu"), max_retries=0)(**foreign))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": [4] * 512}, "a sample of 515 tokens: the reward model reads 1 to 512"),
        ({"prompt_ids": [], "completion_ids": [], "completions": ""}, "a sample of 0 tokens"),
    ],
)
def test_sample_that_cannot_be_read_costs_only_itself(saved: str, change: dict[str, Any], message: str) -> None:
    reward = RewardModel(saved, device="cpu")

    with pytest.raises(DataError, match=message):
        ask(reward, [{**SAMPLES[1], **change}])

    assert ask(reward, SAMPLES[1:2]) == pytest.approx(expected(SAMPLES[1:2]), rel=1e-5)


@pytest.mark.parametrize("unknown", [VOCAB_SIZE, -1])
def test_token_id_that_the_model_lacks_costs_only_its_own_sample(saved: str, unknown: int) -> None:
    scorer = Scorer(saved, "cpu", "float32", 16384)
    gate = threading.Event()
    scorer._thread.submit(gate.wait)

    future = scorer.submit([VOCAB_SIZE - 1, 4])
    try:
        with pytest.raises(VocabularyError, match=f"token id {unknown}: the reward model knows {VOCAB_SIZE}"):
            scorer.submit([4, unknown, 5])
    finally:
        gate.set()

    assert math.isfinite(future.result(timeout=60))


def test_retokenize_without_messages_is_refused(saved: str) -> None:
    row = {key: value for key, value in SAMPLES[0].items() if key != "messages"}

    with pytest.raises(DataError, match="column messages"):
        ask(RewardModel(saved, device="cpu", retokenize=True), [row])


def test_directory_that_holds_no_whole_reward_model_is_refused_by_name(tmp_path: Path) -> None:
    classifier(labels=2).save_pretrained(tmp_path / "two")
    save_tiny_model(tmp_path / "policy", vocab_size=VOCAB_SIZE)
    save_tiny_model(tmp_path / "headless", vocab_size=VOCAB_SIZE)
    config = tmp_path / "headless" / "config.json"
    settings = json.loads(config.read_text()) | {"num_labels": 1, "id2label": {"0": "score"}, "label2id": {"score": 0}}
    config.write_text(json.dumps(settings))
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")

    classifier().save_pretrained(tmp_path / "bare")
    classifier().save_pretrained(tmp_path / "wide")
    TOKENIZER.save_pretrained(tmp_path / "wide")
    config = tmp_path / "wide" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"intermediate_size": 8}))

    for name, message in (
        ("bare", "has no tokenizer"),
        ("wide", "no reward model could be loaded"),
        ("two", "it has 2 labels"),
        ("policy", "it has 2 labels"),
        ("headless", "lacks the weights score.weight"),
        ("nothing", "no reward model could be loaded"),
        ("adapter", "it is an adapter .*merge it into its base model"),
    ):
        with pytest.raises(ConfigError, match=message):
            resolve_reward_fn(RewardModel(str(tmp_path / name), device="cpu"))


@pytest.mark.parametrize("settings", [{"max_batch_tokens": 0}, {"dtype": "int8"}])
def test_setting_out_of_range_is_refused_by_name(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        RewardModel("somewhere", **settings)
