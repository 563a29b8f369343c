"""A trained reward model as a reward function: what ``RWTrainer`` saved scores what the policy wrote (RLHF).

    workflow_kwargs = {"reward_fn": RewardModel(path="…/default/epoch0epochstep99globalstep99"), ...}

In: prompt and completion of a sample. Out: the model's score, which is the value at the last token, as in training. The
model is loaded where episodes run, once per process and settings; calls that wait are scored together by one thread.

::

    await call ─► waiting ─► thread: as many as fit into one forward pass ─► scores
    await call ─►    ┆         (meanwhile further calls wait)
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from areal.reward.completion import without_end_tokens
from areal.utils import logging
from areal.utils.errors import ConfigError, DataError, VocabularyError
from areal.utils.hf_utils import apply_chat_template, end_of_turn, holds_adapter, load_hf_tokenizer

logger = logging.getLogger("RewardModel")

_CHECKED = 16  # completions whose token ids are decoded to see that both vocabularies are one


@dataclass(eq=False)
class RewardModel:
    """Callable of a saved reward model; also usable as a base class that gives ``path`` a default.

    Attributes:
        path: directory of a sequence classifier with one label, and its tokenizer.
        device: torch device; empty: the process's CUDA device where there is one, else the CPU.
        dtype: torch type the model computes in; the score itself is computed in float32.
        max_batch_tokens: padded tokens of one forward pass, unless one sample is longer. 1: every sample alone, so that
            its score does not depend, in the last digits, on what is scored along with it.
        retokenize: score the row's ``messages`` and the completion's text under the reward model's own tokenizer and
            chat template. For a policy with another vocabulary; else the sampled tokens themselves are scored.

    Raises:
        ConfigError: a setting is out of range.
    """

    path: str
    device: str = ""
    dtype: str = "float32"
    max_batch_tokens: int = 16384
    retokenize: bool = False

    areal_timeout_s = 300.0  # of one call; it includes the wait for the calls before it

    def __post_init__(self) -> None:
        if self.max_batch_tokens < 1:
            raise ConfigError(f"RewardModel: max_batch_tokens={self.max_batch_tokens} must be >= 1")
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise ConfigError(f"RewardModel: dtype={self.dtype!r} must be float32, bfloat16 or float16")
        self._scorer: Scorer | None = None
        self._unchecked = _CHECKED

    def areal_prepare(self) -> None:
        """Load the model now; called when the workflow is made, where its episodes will run.

        Raises:
            ConfigError: the directory holds no reward model.
        """
        if self._scorer is None:
            self._scorer = shared_scorer(self.path, self.device or _own_device(), self.dtype, self.max_batch_tokens)

    async def __call__(
        self, prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **row: Any
    ) -> float:
        """Score of one sample.

        Raises:
            VocabularyError: the policy's token ids mean something else to the reward model, or nothing.
            DataError: the sample is longer than the model can read, or ``retokenize`` is set and the row has no
                ``messages``.
        """
        self.areal_prepare()
        scorer = self._scorer
        assert scorer is not None
        if self.retokenize:
            ids = self._render(scorer.tokenizer, row.get("messages"), completions)
        else:
            self._check_tokens(scorer.tokenizer, completions, completion_ids)
            ids = [*prompt_ids, *completion_ids]
        return await asyncio.wrap_future(scorer.submit(ids))

    def _check_tokens(self, tokenizer: Any, text: str, ids: Sequence[int]) -> None:
        if not self._unchecked or not ids:
            return
        found = tokenizer.decode(list(ids))
        if found != text:
            raise VocabularyError(
                f"reward model {self.path!r} has another vocabulary than the policy: the completion {text[:40]!r} is "
                f"{found[:40]!r} there. Set retokenize=true to score texts, or train it with the policy's tokenizer"
            )
        self._unchecked -= 1

    def _render(self, tokenizer: Any, messages: Any, completion: str) -> list[int]:
        if not isinstance(messages, list):
            raise DataError("RewardModel: retokenize=true needs rows with a column messages")
        answer = {"role": "assistant", "content": without_end_tokens(completion)}
        ids = apply_chat_template(tokenizer, [*messages, answer])
        rendered: list[int] = ids[: end_of_turn(tokenizer, ids)]
        return rendered


class Scorer:
    """One loaded reward model and the thread that computes on it.

    Args:
        path, device, dtype, max_batch_tokens: see :class:`RewardModel`.

    Raises:
        ConfigError: there is no reward model at ``path``, or no tokenizer beside it.
    """

    def __init__(self, path: str, device: str, dtype: str, max_batch_tokens: int) -> None:
        self._model = _load_classifier(path, device, dtype)
        self.tokenizer = _load_tokenizer(path)
        self._rows = int(self._model.get_input_embeddings().weight.shape[0])
        self._longest = int(getattr(self._model.config, "max_position_embeddings", None) or 1 << 62)
        self._device, self._max_batch_tokens = device, max_batch_tokens
        self._waiting: deque[tuple[list[int], Future[float]]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward-model")
        logger.info(f"reward model {path} ready on {device}")

    def submit(self, ids: list[int]) -> Future[float]:
        """Score of one sequence of token ids, soon.

        Raises:
            DataError: it is empty, or longer than the model can read.
            VocabularyError: the model does not know a token id.
        """
        if not 0 < len(ids) <= self._longest:
            raise DataError(f"a sample of {len(ids)} tokens: the reward model reads 1 to {self._longest}")
        if not 0 <= min(ids) <= max(ids) < self._rows:
            wrong = next(i for i in ids if not 0 <= i < self._rows)
            raise VocabularyError(
                f"token id {wrong}: the reward model knows {self._rows}. Set retokenize=true to score texts, or train "
                "it with the policy's tokenizer"
            )
        future: Future[float] = Future()
        self._waiting.append((ids, future))
        self._thread.submit(self._score_waiting)  # one turn per request: it finds it, or an earlier turn took it along
        return future

    def _score_waiting(self) -> None:
        batch = self._take()
        if not batch:
            return
        try:
            scores = self.score([ids for ids, _ in batch])
        except Exception as exc:  # noqa: BLE001 - the task ends here; every caller gets it
            for _, future in batch:
                future.set_exception(exc)
            return
        for (_, future), score in zip(batch, scores, strict=True):
            future.set_result(score)

    def _take(self) -> list[tuple[list[int], Future[float]]]:
        """The oldest requests that fit into one forward pass; at least one, if any waits and is still wanted."""
        batch: list[tuple[list[int], Future[float]]] = []
        longest = 0
        while self._waiting:
            ids, future = self._waiting[0]
            longest = max(longest, len(ids))
            if batch and longest * (len(batch) + 1) > self._max_batch_tokens:
                break
            self._waiting.popleft()  # only this thread takes
            if future.set_running_or_notify_cancel():
                batch.append((ids, future))
        return batch

    def score(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """Scores of sequences of token ids, in one forward pass on right-padded rows."""
        import torch

        lengths = torch.tensor([len(ids) for ids in sequences])
        width = int(lengths.max())
        padded = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in sequences])
        mask = torch.arange(width)[None] < lengths[:, None]
        with torch.inference_mode():
            # The last real token, not the last that is no padding token: that may be the end token.
            hidden = self._model.base_model(
                input_ids=padded.to(self._device), attention_mask=mask.long().to(self._device), use_cache=False
            ).last_hidden_state
            last = hidden[torch.arange(len(sequences), device=hidden.device), (lengths - 1).to(hidden.device)]
            scores: list[float] = (last.float() @ self._model.score.weight[0].float()).tolist()
        return scores


_scorers: WeakValueDictionary[tuple[str, str, str, int], Scorer] = WeakValueDictionary()
_loading = threading.Lock()


def shared_scorer(path: str, device: str, dtype: str, max_batch_tokens: int) -> Scorer:
    """The scorer with these settings; training and evaluation share it, and it goes when nobody holds it."""
    key = (path, device, dtype, max_batch_tokens)
    with _loading:
        scorer = _scorers.get(key)
        if scorer is None:
            scorer = _scorers[key] = Scorer(*key)
        return scorer


def _own_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _load_tokenizer(path: str) -> Any:
    """The tokenizer at ``path``.

    Raises:
        ConfigError: there is none.
    """
    try:
        tokenizer = load_hf_tokenizer(path)
    except DataError as exc:
        raise ConfigError(f"reward model {path!r} has no tokenizer: {exc}") from exc
    if set(tokenizer.get_vocab().values()) <= set(tokenizer.all_special_ids):  # without files some load as empty ones
        raise ConfigError(f"reward model {path!r} has no tokenizer: put tokenizer.json beside it")
    return tokenizer


def _load_classifier(path: str, device: str, dtype: str) -> Any:
    """The model at ``path``, frozen.

    Raises:
        ConfigError: there is none, or it is no sequence classifier with one label whose head was saved.
    """
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    remedy = "give a checkpoint of RWTrainer, or another sequence classifier with one label"
    if holds_adapter(path):
        remedy = "it is an adapter (actor.use_lora): merge it into its base model with peft, and give what that saves"
    try:
        labels = AutoConfig.from_pretrained(path).num_labels
        if labels != 1:
            raise ConfigError(f"{path!r} is no reward model, it has {labels} labels; {remedy}")
        model, report = AutoModelForSequenceClassification.from_pretrained(
            path, dtype=getattr(torch, dtype), output_loading_info=True
        )
    except ConfigError:
        raise
    except (OSError, ValueError, ImportError, RuntimeError) as exc:  # RuntimeError: weights of other shapes
        raise ConfigError(f"no reward model could be loaded from {path!r}: {exc}; {remedy}") from exc
    head = getattr(model, "score", None)
    if not isinstance(head, torch.nn.Linear) or head.bias is not None:
        raise ConfigError(f"{path!r}: {type(model).__name__} has no linear head 'score' without bias; {remedy}")
    if missing := sorted(report["missing_keys"]):  # they would be drawn at random
        raise ConfigError(f"{path!r} lacks the weights {', '.join(missing[:3])}; {remedy}")
    return model.to(device).eval().requires_grad_(False)
