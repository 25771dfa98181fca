"""How well a checkpoint does what it was trained for: dialogues, recall, perplexity and draft acceptance.

>>> found = scores(model, tokenizer)                # the fixed subsets of 20: a few seconds for the miniature
>>> found.dialogue.share, found.recall.share, found.perplexity.perplexity, found.drafts.rate
>>> dialogue_score(model, tokenizer, fixed_dialogues(200)).by_kind

A model that computes NaN gets the score that this deserves, with the reason: sweeps must be able to record it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.dialogue import (
    DATA,
    Dialogue,
    DialogueScore,
    Outcome,
    fixed_dialogues,
    fixed_recalls,
    parse_reply,
)
from workbench.errors import InputError, NonFiniteError
from workbench.model import CausalLM
from workbench.tokenizer import Tokenizer

END_OF_TURN, END_OF_TEXT = "<|im_end|>", "<|endoftext|>"

#: The longest reply of the fixed dialogues has about 145 tokens of the miniature, reasoning included.
MAX_NEW_TOKENS = 192

#: Prompt tokens read at once: the miniature then takes about 1 GB.
BATCH_TOKENS = 20_000


@dataclass(frozen=True, slots=True)
class Perplexity:
    """`perplexity` = exp(`nats` / `predicted`): `nats` is the summed negative log-likelihood of `predicted` tokens.

    `text_bytes` are the bytes of text that these tokens stand for, None where no tokenizer was given. A perplexity
    depends on how a tokenizer cuts the text; `nats_per_byte` compares models of different tokenizers.
    """

    perplexity: float
    predicted: int
    nats: float
    text_bytes: int | None = None

    @property
    def nats_per_byte(self) -> float | None:
        return None if self.text_bytes is None else self.nats / self.text_bytes

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"nats_per_byte": self.nats_per_byte}


@dataclass(frozen=True, slots=True)
class DraftAcceptance:
    """`rate` = `accepted` / `proposed`: drafts of the prediction head that equal the main model's own next choice."""

    rate: float
    accepted: int
    proposed: int

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class Scores:
    """All figures of one model. `drafts` is None for a model without a multi-token-prediction head."""

    dialogue: DialogueScore
    recall: DialogueScore
    perplexity: Perplexity
    drafts: DraftAcceptance | None

    def to_json(self) -> dict[str, Any]:
        """Plain values; what is not finite stays a float that JSON cannot hold."""
        return {
            "dialogue": self.dialogue.to_json(),
            "recall": self.recall.to_json(),
            "perplexity": self.perplexity.to_json(),
            "drafts": None if self.drafts is None else self.drafts.to_json(),
        }


#: Gets a line on how far a score has come.
Progress = Callable[[str], None]


def windows(tokens: np.ndarray, length: int) -> Tensor:
    """Consecutive windows of `length` inputs and the token after each input, [windows, length + 1] of int64.

    The last, shorter remainder is left out, so that all windows have the same context. Raises InputError where not
    even one fits.
    """
    tokens = np.asarray(tokens)
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise InputError(f"tokens: expected one row of whole numbers, found {tokens.dtype} of shape {tokens.shape}")
    _expect_count("length", length)
    count = (len(tokens) - 1) // length
    if count < 1:
        raise InputError(
            f"tokens: expected at least {length + 1} for one window, found {len(tokens)}; shorten the window"
        )
    rows = np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[: count * length : length]
    return torch.from_numpy(rows.astype(np.int64))


def _expect_count(name: str, value: int, least: int = 1) -> None:
    if type(value) is not int or value < least:
        raise InputError(f"{name}: expected a whole number of at least {least}, found {value!r}")


def heldout_tokens(
    tokenizer: Tokenizer, *, windows: int | None = 20, length: int = 512, data: Path | None = None
) -> np.ndarray:
    """The held-out text as token ids, [windows * length + 1] of int64, an end-of-text token after each document.

    The documents of `heldout.jsonl` (in `data`, default: the project's folder) come in their order, which mixes the
    sources; `windows` None takes all of the text. Raises InputError where there is not enough.
    """
    for name, value in (("windows", 1 if windows is None else windows), ("length", length)):
        _expect_count(name, value)
    path = (DATA if data is None else Path(data)) / "heldout.jsonl"
    try:
        texts = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").split("\n") if line]
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("a text that is none")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}; expected the held-out documents") from None
    except (ValueError, RecursionError, KeyError, TypeError) as error:  # the first: no UTF-8, no JSON
        raise InputError(f'{path}: expected one JSON object with "text" a line, found: {error}') from None
    wanted = None if windows is None else windows * length + 1
    separator = tokenizer.token_id(END_OF_TEXT)
    ids: list[int] = []
    for text in texts:
        ids += [*tokenizer.encode(text), separator]
        if wanted is not None and len(ids) >= wanted:
            break
    if wanted is not None and len(ids) < wanted:
        raise InputError(f"{path}: expected at least {wanted} tokens for {windows} windows, found {len(ids)}")
    return np.array(ids[:wanted], dtype=np.int64)


@torch.inference_mode()
def perplexity(
    model: CausalLM, tokens: np.ndarray, *, length: int = 512, batch: int = 8, tokenizer: Tokenizer | None = None
) -> Perplexity:
    """Perplexity over consecutive windows of `length` tokens, each read from an empty state.

    With `tokenizer` the bytes of the predicted text are counted too; a special token is no text and counts none.
    """
    _expect_count("batch", batch)
    total, rows = 0.0, windows(tokens, length)
    for part in rows.split(batch):
        part = part.to(model.device)
        logits = model(part[:, :-1], use_cache=False).logits
        total += F.cross_entropy(logits.flatten(0, 1).double(), part[:, 1:].flatten(), reduction="sum").item()
    predicted = rows[:, 1:].numel()
    text_bytes = None if tokenizer is None else _text_bytes(tokenizer, rows[:, 1:])
    mean = total / predicted
    # Python's exp raises where a ruined model passes the range; the figure then is infinite.
    value = math.inf if mean > math.log(np.finfo(np.float64).max) else math.exp(mean)
    return Perplexity(value, predicted, total, text_bytes)


def _text_bytes(tokenizer: Tokenizer, tokens: Tensor) -> int:
    ids, counts = tokens.unique(return_counts=True)
    sizes = [0 if tokenizer.is_special(token) else len(tokenizer.token_bytes(token)) for token in ids.tolist()]
    return sum(size * count for size, count in zip(sizes, counts.tolist(), strict=True))


@torch.inference_mode()
def draft_acceptance(model: CausalLM, tokens: np.ndarray, *, length: int = 512, batch: int = 8) -> DraftAcceptance:
    """Teacher-forced greedy acceptance of the multi-token-prediction head.

    At each position t the text continues with its own token t + 1; the head's most likely token t + 2 is accepted where
    it equals the main model's most likely one after reading token t + 1. Where logits of either are not finite there is
    no choice to agree on, and the draft counts as refused.
    """
    _expect_count("batch", batch)
    _expect_count("length", length, 2)  # the first draft is for the token after next
    accepted = proposed = 0
    for rows in windows(tokens, length).split(batch):
        rows = rows.to(model.device)
        out = model(rows[:, :-1], use_cache=False)
        drafts = model.mtp_logits(out.hidden[:, :-1], rows[:, 1:-1])
        choices = out.logits[:, 1:]
        finite = torch.isfinite(drafts).all(-1) & torch.isfinite(choices).all(-1)
        accepted += int(((drafts.argmax(-1) == choices.argmax(-1)) & finite).sum())
        proposed += finite.numel()
    return DraftAcceptance(accepted / proposed, accepted, proposed)


def dialogue_score(
    model: CausalLM,
    tokenizer: Tokenizer,
    dialogues: Sequence[Dialogue],
    *,
    max_new_tokens: int = MAX_NEW_TOKENS,
    batch: int = 20,
    progress: Progress | None = None,
) -> DialogueScore:
    """How many dialogues the model continues with exactly the right reply: greedy, so the same each time.

    At most `batch` are computed at once, fewer where prompts are long. A reply that is not over after `max_new_tokens`
    is wrong. Where a batch has logits that are not finite, its
    dialogues are repeated one by one, so that only those whose own logits are not finite are wrong for it; the
    outcome says so. Raises InputError and CheckpointError as `generate` and the tokenizer do.
    """
    _expect_count("batch", batch)
    stops = _stop_ids(model, tokenizer)
    prompts = [
        tokenizer.encode(
            tokenizer.apply_chat_template(
                dialogue.messages, tools=list(dialogue.tools) or None, enable_thinking=dialogue.thinking
            )
        )
        for dialogue in dialogues
    ]
    outcomes: list[Outcome] = []
    for part in _batches([len(prompt) for prompt in prompts], batch):
        try:
            replies = _continue(model, [prompts[i] for i in part], max_new_tokens, stops)
            outcomes += [_outcome(tokenizer, dialogues[i], reply) for i, reply in zip(part, replies, strict=True)]
        except NonFiniteError:
            for i in part:
                try:
                    (reply,) = _continue(model, [prompts[i]], max_new_tokens, stops)
                    outcomes.append(_outcome(tokenizer, dialogues[i], reply, is_single=True))
                except NonFiniteError as error:
                    outcomes.append(Outcome.failed(dialogues[i], "", str(error), is_single=True, is_finite=False))
        if progress is not None:
            right = sum(outcome.right for outcome in outcomes)
            progress(f"{len(outcomes)} of {len(dialogues)} dialogues, {right} right")
    return DialogueScore.of(outcomes)


def recall_score(
    model: CausalLM,
    tokenizer: Tokenizer,
    n: int = 20,
    *,
    data: Path | None = None,
    max_new_tokens: int = MAX_NEW_TOKENS,
    batch: int = 20,
    progress: Progress | None = None,
) -> DialogueScore:
    """`dialogue_score` on the first `n`, 20 or 100, of the questions for a fact far back in a long prompt."""
    return dialogue_score(
        model, tokenizer, fixed_recalls(n, data), max_new_tokens=max_new_tokens, batch=batch, progress=progress
    )


def scores(
    model: CausalLM,
    tokenizer: Tokenizer,
    subset: int = 20,
    *,
    data: Path | None = None,
    progress: Progress | None = None,
) -> Scores:
    """All four figures. `subset` 20: 20 dialogues, 20 recalls, 20 windows of held-out text; 200: 200, 100, all text."""
    dialogues = fixed_dialogues(subset, data)
    tokens = heldout_tokens(tokenizer, windows=20 if subset == 20 else None, data=data)
    has_head = model.config.mtp_num_hidden_layers > 0
    return Scores(
        dialogue=dialogue_score(model, tokenizer, dialogues, progress=progress),
        recall=recall_score(model, tokenizer, 20 if subset == 20 else 100, data=data, progress=progress),
        perplexity=perplexity(model, tokens, tokenizer=tokenizer),
        drafts=draft_acceptance(model, tokens) if has_head else None,
    )


def _batches(sizes: Sequence[int], count: int) -> Iterator[range]:
    """Consecutive stretches of at most `count` prompts and BATCH_TOKENS tokens; one that is longer stands alone."""
    start = tokens = 0
    for i, size in enumerate(sizes):
        if i > start and (i - start == count or tokens + size > BATCH_TOKENS):
            yield range(start, i)
            start, tokens = i, 0
        tokens += size
    if sizes:
        yield range(start, len(sizes))


def _stop_ids(model: CausalLM, tokenizer: Tokenizer) -> set[int]:
    """Tokens that end a turn or a text: those of the configuration and of the tokenizer, and the family's own two."""
    own = {tokenizer.token_id(END_OF_TURN), tokenizer.token_id(END_OF_TEXT)}
    return own | set(model.config.eos_token_id) | ({tokenizer.eos_token_id} - {None})


def _continue(model: CausalLM, prompts: Sequence[Sequence[int]], max_new_tokens: int, stops: set[int]) -> list:
    """(new tokens without the one that ends them, whether they ended) of each prompt."""
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros(len(prompts), longest, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    output = model.generate(
        ids.to(model.device), attention_mask=mask.to(model.device), max_new_tokens=max_new_tokens, stop_ids=stops
    )
    ended = [reason == "stop" for reason in output.reasons]
    return [(tokens[:-1] if end else tokens, end) for tokens, end in zip(output.sequences, ended, strict=True)]


def _outcome(
    tokenizer: Tokenizer, dialogue: Dialogue, reply: tuple[list[int], bool], *, is_single: bool = False
) -> Outcome:
    tokens, ended = reply
    text = tokenizer.decode(tokens)
    if not ended:
        return Outcome.failed(
            dialogue, text, f"expected an end, found none in {len(tokens)} tokens", is_single=is_single
        )
    parsed = parse_reply(text, dialogue.tools, thinking=dialogue.thinking)
    return Outcome.of(dialogue, parsed, text, is_single=is_single)
