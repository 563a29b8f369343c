"""Drawing tokens: the distribution, truncation, penalties, stop rules, and what a seed fixes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from areal.engine.native.requests import InvalidRequestError, StopStrings
from areal.engine.native.sampling import BatchSampler, SamplingParams, invert_cdf, uniform
from tests.fakes import char_tokenizer, tiny_model
from tests.native_helpers import (
    assert_logprobs_match,
    generate,
    random_prompts,
    reference_logprobs,
    request,
    running,
)

CPU = torch.device("cpu")


def draw(logits: torch.Tensor, params: list[SamplingParams], drawn: list[list[int]] | None = None):
    """Tokens and log-probs of one step."""
    return BatchSampler(params, drawn or [[] for _ in params], CPU).draw(logits.clone())


def frequencies(probs: torch.Tensor, **settings) -> torch.Tensor:
    """Share of each token among 40,000 rows with the distribution ``probs`` and seeds 0, 1, 2, …"""
    rows = 40_000
    logits = probs.log().expand(rows, -1)
    tokens, _ = draw(logits, [SamplingParams(seed=i, **settings) for i in range(rows)])
    return torch.bincount(tokens, minlength=len(probs)).double() / rows


def test_uniform_over_seeds_and_draws_is_flat_and_uncorrelated() -> None:
    numbers = np.stack([uniform(np.arange(2000, dtype=np.uint64), np.full(2000, t, dtype=np.int64)) for t in range(50)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
    assert abs(counts - 5000).max() < 5 * math.sqrt(5000)
    assert abs(np.corrcoef(numbers[0], numbers[1])[0, 1]) < 0.1
    assert abs(np.corrcoef(numbers[:, 0], numbers[:, 1])[0, 1]) < 0.5
    assert len(np.unique(numbers)) == numbers.size


def test_draw_follows_the_distribution() -> None:
    probs = torch.tensor([0.644, 0.237, 0.087, 0.032])
    torch.testing.assert_close(frequencies(probs), probs.double(), rtol=0, atol=0.012)


def test_draw_at_temperature_half_squares_the_odds() -> None:
    probs = torch.tensor([0.5, 0.3, 0.2])
    expected = probs.double().square() / probs.double().square().sum()
    torch.testing.assert_close(frequencies(probs, temperature=0.5), expected, rtol=0, atol=0.012)


def test_top_k_draws_only_the_best() -> None:
    probs = torch.tensor([0.237, 0.644, 0.032, 0.087])
    expected = torch.tensor([0.237, 0.644, 0, 0]).double() / 0.881
    torch.testing.assert_close(frequencies(probs, top_k=2), expected, rtol=0, atol=0.012)


def test_top_p_keeps_the_token_that_crosses_the_mass() -> None:
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    expected = torch.tensor([0.5, 0.3, 0, 0]).double() / 0.8
    torch.testing.assert_close(frequencies(probs, top_p=0.6), expected, rtol=0, atol=0.012)


def test_top_k_then_top_p_measures_mass_within_top_k() -> None:
    probs = torch.tensor([0.4, 0.3, 0.2, 0.1])  # top-k 3 -> .444 .333 .222; top-p .7 keeps two
    expected = torch.tensor([0.4, 0.3, 0, 0]).double() / 0.7
    torch.testing.assert_close(frequencies(probs, top_k=3, top_p=0.7), expected, rtol=0, atol=0.012)


def test_top_p_over_a_flat_large_vocabulary_needs_the_full_sort() -> None:
    logits = torch.zeros(64, 5000)
    tokens, _ = draw(logits, [SamplingParams(seed=i, top_p=0.9) for i in range(64)])
    assert len(tokens.unique()) > 55


@pytest.mark.parametrize("vocab", [50, 1024, 1025, 5000, 5120])
def test_invert_cdf_equals_a_plain_search(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    probs = torch.softmax(3 * torch.randn(200, vocab, generator=generator), -1)
    probs[:, ::3] = 0  # unnormalised rows and impossible tokens
    numbers = torch.rand(200, dtype=torch.float64, generator=generator)
    ends = probs.double().cumsum(-1)
    expected = torch.searchsorted(ends, numbers[:, None] * ends[:, -1:], right=True)[:, 0]
    tokens = invert_cdf(probs, numbers)
    assert (tokens == expected).float().mean() > 0.99  # block sums are float32: a number on an edge may fall either way
    assert (probs.gather(-1, tokens[:, None]) > 0).all()


@pytest.mark.parametrize("vocab", [4, 2000])
@pytest.mark.parametrize("number", [0.0, 1.0 - 2.0**-53])
def test_invert_cdf_at_the_ends_draws_a_possible_token(vocab: int, number: float) -> None:
    probs = torch.zeros(1, vocab)
    probs[0, 2] = 0.3
    probs[0, vocab // 2 + 1] = 0.7
    token = invert_cdf(probs, torch.tensor([number], dtype=torch.float64)).item()
    assert token == (2 if number == 0 else vocab // 2 + 1)


def test_reported_logprob_is_not_renormalised_by_truncation() -> None:
    logits = torch.tensor([[0.644, 0.237, 0.087, 0.032]]).log()
    tokens, logprobs = draw(logits, [SamplingParams(seed=3, top_k=1)])
    assert tokens.tolist() == [0]
    assert logprobs.item() == pytest.approx(-0.4402, abs=1e-3)


def test_logprob_and_temperature_known_values() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    assert draw(logits, [SamplingParams(seed=0, top_k=1)])[1].item() == pytest.approx(-0.4076, abs=1e-4)
    half = SamplingParams(seed=0, temperature=0.5, top_k=1)
    assert draw(logits, [half])[1].item() == pytest.approx(-0.1429, abs=1e-4)


def test_frequency_penalty_matches_the_formula() -> None:
    logits = torch.tensor([[1.0, 0.8, 0.5, 0.1]] * 2)
    drawn = [[0, 0, 1], [0, 0, 1]]
    greedy = SamplingParams(seed=0, greedy=True, frequency_penalty=0.4)
    plain = SamplingParams(seed=0, greedy=True)
    tokens, logprobs = draw(logits, [greedy, plain], drawn)  # 1 - .8, .8 - .4, .5, .1
    assert tokens.tolist() == [2, 0]
    expected = torch.log_softmax(logits, -1)[[0, 1], [2, 0]]
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-6)


def test_frequency_penalty_in_the_engine_matches_a_step_by_step_loop() -> None:
    model, penalty = tiny_model("qwen2"), 1.3
    prompts = random_prompts((4, 7))
    with running(model) as engine:
        requests = [request(p, greedy=True, max_new_tokens=30, frequency_penalty=penalty) for p in prompts]
        responses = generate(engine, requests)
    for response in responses:
        rows = reference_logprobs(model, response)
        counts = torch.zeros(rows.shape[1])
        for token, row in zip(response.output_tokens, rows, strict=True):
            assert token == (row - penalty * counts).argmax().item()
            counts[token] += 1
        assert_logprobs_match(model, response)


def test_seed_reproduces_tokens_whatever_else_runs() -> None:
    model = tiny_model("qwen2")
    prompts = random_prompts((5, 5, 8, 13, 2, 30))
    probe = request(prompts[0], seed=77, max_new_tokens=40)
    with running(model, max_running_requests=8) as engine:
        (alone,) = generate(engine, [probe])
        others = [request(p, seed=i, max_new_tokens=10 + 7 * i) for i, p in enumerate(prompts[1:])]
        crowd = generate(engine, [*others[:2], request(prompts[0], seed=77, max_new_tokens=40), *others[2:]])
        (other_seed,) = generate(engine, [request(prompts[0], seed=78, max_new_tokens=40)])
    assert crowd[2].output_tokens == alone.output_tokens
    assert other_seed.output_tokens != alone.output_tokens


def test_requests_without_a_seed_differ() -> None:
    with running(tiny_model("qwen2")) as engine:
        first, second = generate(engine, [request([5, 6], seed=None, max_new_tokens=30) for _ in range(2)])
    assert first.output_tokens != second.output_tokens


def test_stop_ids_end_the_reply_and_stay_in_it() -> None:
    model = tiny_model("qwen2")
    with running(model) as engine:
        (free,) = generate(engine, [request([5, 6, 7], greedy=True, max_new_tokens=20)])
        stops = [free.output_tokens[6], 63]
        sent = request([5, 6, 7], greedy=True, max_new_tokens=20, ignore_eos=False, stop_token_ids=stops)
        (stopped,) = generate(engine, [sent])
    end = free.output_tokens.index(stops[0]) + 1
    eos_at = free.output_tokens.index(1) + 1 if 1 in free.output_tokens else 99
    assert stopped.output_tokens == free.output_tokens[: min(end, eos_at)]
    assert stopped.stop_reason == "stop"


def test_stop_id_exactly_at_the_limit_is_a_stop() -> None:
    model = tiny_model("qwen2")
    with running(model) as engine:
        (free,) = generate(engine, [request([5, 6, 7], greedy=True, max_new_tokens=1)])
        stop = free.output_tokens[0]
        sent = request([5, 6, 7], greedy=True, max_new_tokens=1, ignore_eos=False, stop_token_ids=[stop])
        (stopped,) = generate(engine, [sent])
    assert free.stop_reason == "length"
    assert stopped.stop_reason == "stop"


def test_min_new_tokens_bans_stop_ids_before() -> None:
    model = tiny_model("qwen2")
    stops = list(range(1, 60))
    with running(model) as engine:
        sent = [
            request([5, 6, 7], seed=i, max_new_tokens=30, min_new_tokens=9, ignore_eos=False, stop_token_ids=stops)
            for i in range(4)
        ]
        responses = generate(engine, sent)
    for response in responses:
        assert response.output_len >= 9
        assert not set(response.output_tokens[:8]) & set(stops)
        assert_logprobs_match(model, response)
    assert any(response.stop_reason == "stop" for response in responses)


def test_pad_equal_to_eos_and_token_zero_are_ordinary_tokens() -> None:
    model = tiny_model("qwen2", pad_token_id=1)
    with running(model) as engine:
        sent = [request([0, 1, 0, 5], seed=i, max_new_tokens=50, ignore_eos=False) for i in range(20)]
        responses = generate(engine, sent)
    assert any(0 in response.output_tokens for response in responses)
    for response in responses:
        assert 1 not in response.output_tokens[:-1]
        assert (response.stop_reason == "stop") == (response.output_tokens[-1] == 1)
        assert_logprobs_match(model, response)


class _PieceTokenizer:
    """Tokens are byte strings; decoding replaces unfinished characters, as real tokenizers do."""

    pieces = (b"ab", b"c", b"d", "é".encode()[:1], "é".encode()[1:], b"x")

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return b"".join(self.pieces[i] for i in ids).decode(errors="replace")


@pytest.mark.parametrize(
    ("stop", "ids", "expected"),
    [
        (["bc"], [0, 1, 2], 2),  # across two tokens
        (["b"], [5, 0, 1], 2),  # inside a token
        (["cé"], [1, 3, 4, 5], 3),  # a character split over two tokens
        (["zz", "dx"], [0, 2, 5], 3),
        (["q"], [0, 1, 2], None),
    ],
)
def test_stop_strings_are_found_where_they_end(stop: list[str], ids: list[int], expected: int | None) -> None:
    watcher = StopStrings(stop, _PieceTokenizer())
    hits = [n for n in range(1, len(ids) + 1) if watcher.hit(ids[:n])]
    assert (hits[0] if hits else None) == expected


def test_stop_strings_before_min_new_tokens_do_not_count() -> None:
    watcher = StopStrings(["c", "long one"], _PieceTokenizer())
    assert not watcher.hit([1], 3)
    assert not watcher.hit([1, 5], 3)
    assert not watcher.hit([1, 5, 2], 3)
    assert watcher.hit([1, 5, 2, 1], 3)


def test_stop_string_ends_a_reply_with_its_tokens() -> None:
    tokenizer = char_tokenizer()
    model = tiny_model("qwen2", vocab_size=32)
    with running(model, tokenizer) as engine:
        (free,) = generate(engine, [request([5, 6, 7], seed=4, max_new_tokens=30)])
        text = tokenizer.decode(free.output_tokens)
        stop = tokenizer.decode(free.output_tokens[10:12])
        (stopped,) = generate(engine, [request([5, 6, 7], seed=4, max_new_tokens=30, stop=[stop])])
    assert stopped.stop_reason == "stop"
    assert free.output_tokens[: stopped.output_len] == stopped.output_tokens
    assert tokenizer.decode(stopped.output_tokens).endswith(stop)
    assert text.find(stop) + len(stop) == len(tokenizer.decode(stopped.output_tokens))


@pytest.mark.parametrize(
    ("ids", "settings", "message"),
    [
        ([], {}, "empty"),
        ([5, 64], {}, r"holds 64.*0\.\.63"),
        ([-1], {}, "holds -1"),
        ([5] * 512, {}, "max_seq_len"),
        ([5] * 10, {"max_tokens": 10}, "nothing to generate"),
        ([5], {"n_samples": 2}, "n_samples"),
        ([5], {"stop": ["x"]}, "tokenizer"),
        ([5], {"use_beam_search": True}, "beam"),
    ],
)
def test_bad_request_is_refused_by_name(ids: list[int], settings: dict, message: str) -> None:
    with running(tiny_model("qwen2")) as engine, pytest.raises(InvalidRequestError, match=message):
        engine.submit(request(ids, **settings))
