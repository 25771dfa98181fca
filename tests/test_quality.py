"""Perplexity, draft acceptance and dialogue scores against models whose answers are known beforehand."""

import dataclasses
import json
import math
from types import SimpleNamespace

import models
import numpy as np
import pytest
import torch
from small_checkpoint import DATA

from workbench import generation
from workbench.config import ModelConfig
from workbench.dialogue import Dialogue, ExpectedAnswer, ExpectedCall
from workbench.errors import InputError
from workbench.model import CausalLM
from workbench.quality import (
    dialogue_score,
    draft_acceptance,
    fixed_dialogues,
    heldout_tokens,
    perplexity,
    recall_score,
    scores,
    windows,
)
from workbench.tokenizer import Tokenizer
from workbench.training.corpus import read_documents
from workbench.training.tokenize import encode_documents, read_tokenizer


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return CausalLM(ModelConfig.from_hf(models.mini())).init_weights(3).eval()


def test_windows_are_consecutive_and_share_their_border_token():
    rows = windows(np.arange(11, dtype=np.uint16), 5)
    assert rows.tolist() == [[0, 1, 2, 3, 4, 5], [5, 6, 7, 8, 9, 10]]
    assert rows.dtype == torch.int64


def test_too_few_tokens_for_one_window_is_an_error():
    with pytest.raises(InputError, match="expected at least 6 for one window, found 5"):
        windows(np.arange(5), 5)


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        (np.arange(50), {"length": 0}, "length: expected a whole number of at least"),
        (np.arange(50), {"length": -1}, "length: expected a whole number of at least"),
        (np.arange(50), {"length": 5.0}, "length: expected a whole number of at least"),
        (np.arange(50), {"length": 5, "batch": 0}, "batch: expected a whole number of at least 1, found 0"),
        (np.arange(50).reshape(2, 25), {"length": 5}, r"tokens: expected one row of whole numbers, found int64 of"),
        (np.arange(50) / 2, {"length": 5}, "tokens: expected one row of whole numbers, found float64 of"),
        (np.array([]), {"length": 5}, "tokens: expected one row of whole numbers"),
    ],
)
def test_tokens_and_sizes_that_make_no_window_are_refused(model, tokens, options, message):
    for score in (perplexity, draft_acceptance):
        with pytest.raises(InputError, match=message):
            score(model, tokens, **options)


def test_perplexity_of_a_model_without_opinion_is_the_vocabulary(model):
    with torch.no_grad():
        flat = CausalLM(model.config).init_weights(3).eval()
        flat.lm_head.weight.zero_()
    tokens = np.random.default_rng(0).integers(0, 97, size=301)
    found = perplexity(flat, tokens, length=50)
    assert found.perplexity == pytest.approx(97.0, rel=1e-6)
    assert found.predicted == 300


def test_perplexity_is_that_of_each_window_read_by_itself(model):
    tokens = np.random.default_rng(1).integers(0, 97, size=101)
    losses = []
    for row in windows(tokens, 20):
        log_probabilities = model(row[None, :-1], use_cache=False).logits.double().log_softmax(-1)[0]
        losses += [-log_probabilities[t, row[t + 1]].item() for t in range(20)]
    found = perplexity(model, tokens, length=20, batch=3).perplexity
    assert found == pytest.approx(math.exp(np.mean(losses)), rel=1e-7)  # fp32 products of another batch size


def test_drafts_that_repeat_the_main_choice_are_all_accepted(model, monkeypatch):
    tokens = np.random.default_rng(2).integers(0, 97, size=81)

    def oracle(hidden, next_ids):
        # What the main model says after one more token, which is what a draft tries to foresee.
        row = next(r for r in windows(tokens, 40).tolist() if r[1:-1] == next_ids[0].tolist())
        return model(torch.tensor([row[:-1]]), use_cache=False).logits[:, 1:]

    monkeypatch.setattr(model, "mtp_logits", oracle)
    found = draft_acceptance(model, tokens, length=40, batch=1)
    assert (found.accepted, found.proposed, found.rate) == (78, 78, 1.0)


def test_a_random_head_is_rarely_right(model):
    tokens = np.random.default_rng(3).integers(0, 97, size=161)
    assert draft_acceptance(model, tokens, length=40).rate < 0.5


def test_a_model_without_the_head_is_refused():
    config = dataclasses.replace(ModelConfig.from_hf(models.mini()), mtp_num_hidden_layers=0)
    with pytest.raises(InputError, match="multi-token-prediction head"):
        draft_acceptance(CausalLM(config).init_weights(0), np.arange(41), length=40)


def test_perplexity_past_the_range_of_floats_is_infinite(model):
    ruined = CausalLM(model.config).init_weights(3).eval()
    with torch.no_grad():
        ruined.lm_head.weight.mul_(1e6)
    found = perplexity(ruined, np.random.default_rng(4).integers(0, 97, size=41), length=40)
    assert found.perplexity == math.inf and found.nats > 40 * 710


def test_drafts_of_logits_that_are_not_finite_are_refused(model, monkeypatch):
    tokens = np.random.default_rng(5).integers(0, 97, size=41)
    nan = torch.full((1, 39, 97), math.nan)
    monkeypatch.setattr(model, "mtp_logits", lambda hidden, next_ids: nan)
    monkeypatch.setattr(model, "head", lambda hidden: torch.full((*hidden.shape[:-1], 97), math.nan))
    assert draft_acceptance(model, tokens, length=40).rate == 0.0  # argmax of two NaN rows is the same


# ============================================================================================================
# Text
# ============================================================================================================


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = Tokenizer.from_directory(DATA)
    # Its own, so that the tests know what the model reads.
    found.chat_template = (
        "{% if tools %}<|im_start|>tools {{ tools | tojson }}<|im_end|>{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
        "<|im_start|>assistant {% if not enable_thinking %}at once {% endif %}"
    )
    return found


def test_heldout_tokens_are_those_of_the_training_commands(tokenizer):
    expected = encode_documents(read_tokenizer(DATA), read_documents(DATA.parent / "heldout.jsonl"))[0]
    part = heldout_tokens(tokenizer, windows=3, length=100)
    assert part.tolist() == expected[:301].tolist()
    assert heldout_tokens(tokenizer, windows=None).tolist() == expected.tolist()


def test_heldout_text_that_is_too_short_or_missing_is_named(tokenizer, tmp_path):
    with pytest.raises(InputError, match=r"heldout\.jsonl: cannot be read: No such file"):
        heldout_tokens(tokenizer, data=tmp_path)
    (tmp_path / "heldout.jsonl").write_text('{"text": "short"}\n')
    with pytest.raises(InputError, match="expected at least 10241 tokens for 20 windows, found"):
        heldout_tokens(tokenizer, data=tmp_path)
    (tmp_path / "heldout.jsonl").write_text('["text"]\n')
    with pytest.raises(InputError, match='one JSON object with "text" a line'):
        heldout_tokens(tokenizer, data=tmp_path)


@pytest.mark.parametrize(
    "line", [b"[1]", b'{"text": 5}', b'{"title": "a"}', b'{"text": "a', b"[" * 100_000, b"\xff", b"1" * 6000]
)
def test_a_heldout_file_that_is_none_is_named(tokenizer, tmp_path, line):
    (tmp_path / "heldout.jsonl").write_bytes(b'{"text": "a"}\n' + line + b"\n")
    with pytest.raises(InputError, match=r'heldout\.jsonl: expected one JSON object with "text" a line, found: '):
        heldout_tokens(tokenizer, windows=None, data=tmp_path)


@pytest.mark.parametrize("options", [{"windows": 0}, {"windows": -1}, {"length": 0}])
def test_no_windows_at_all_are_refused(tokenizer, options):
    with pytest.raises(InputError, match="expected a whole number of at least 1, found "):
        heldout_tokens(tokenizer, **options)


def test_nats_per_byte_count_the_bytes_of_the_predicted_text(tokenizer):
    text = "Über den Berg, and over the hill."
    ids = np.array([*tokenizer.encode("So:"), *tokenizer.encode(text), tokenizer.token_id("<|endoftext|>")])
    config = ModelConfig.from_hf(models.mini(vocab_size=tokenizer.vocab_size))
    flat = CausalLM(config).init_weights(0).eval()
    with torch.no_grad():
        flat.lm_head.weight.zero_()
    found = perplexity(flat, ids, length=len(ids) - 1, tokenizer=tokenizer)
    first = len(tokenizer.token_bytes(int(ids[0])))
    assert found.text_bytes == len(b"So:") - first + len(text.encode())
    expected = (len(ids) - 1) * math.log(tokenizer.vocab_size) / found.text_bytes
    assert found.nats_per_byte == pytest.approx(expected, rel=1e-6)


# ============================================================================================================
# Dialogues
# ============================================================================================================

TIMER = {
    "type": "function",
    "function": {
        "name": "set_timer",
        "description": "",
        "parameters": {"type": "object", "properties": {"minutes": {"type": "integer"}}},
    },
}
CALL = "<tool_call>\n<function=set_timer>\n<parameter=minutes>\n{}\n</parameter>\n</function>\n</tool_call>"


def dialogue(name: str, *, kind: str = "call", thinking: bool = False, answer: str | None = None) -> Dialogue:
    expected = ExpectedCall("set_timer", {"minutes": 5}) if answer is None else ExpectedAnswer(answer)
    return Dialogue(name, kind, thinking, (TIMER,), ({"role": "user", "content": f"{name}: five minutes"},), expected)


class Scripted:
    """A model that replies to the dialogue whose id its prompt holds, or has NaN logits from one token on."""

    config = SimpleNamespace(max_position_embeddings=4096, eos_token_id=(), mtp_num_hidden_layers=0)
    device = torch.device("cpu")

    def __init__(self, tokenizer: Tokenizer, replies: dict[str, str], *, nan_after: dict[str, int] | None = None):
        self.tokenizer, self.replies, self.nan_after = tokenizer, replies, nan_after or {}
        self.prompts, self.batches = [], []

    def generate(self, input_ids, **options):
        self.batches.append(len(input_ids))
        return generation.generate(self, input_ids, **options)

    def __call__(self, input_ids, *, attention_mask=None, cache=None, last_only=False):
        if cache is None:
            rows = [ids[mask.bool()] for ids, mask in zip(input_ids, attention_mask, strict=True)]
            prompts = [self.tokenizer.decode(row.tolist()) for row in rows]
            self.prompts += prompts
            names = [next(name for name in self.replies if f" {name}: " in prompt) for prompt in prompts]
            cache = [(name, iter(enumerate(self.tokenizer.encode(self.replies[name])))) for name in names]
        logits = torch.zeros(len(cache), 1, self.tokenizer.vocab_size)
        for row, (name, reply) in zip(logits, cache, strict=True):
            place, token = next(reply, (0, 0))
            row[0, token] = 1.0
            if place >= self.nan_after.get(name, math.inf):
                row[:] = math.nan
        return SimpleNamespace(logits=logits, cache=cache)


REPLIES = {
    "one": CALL.format(5) + "<|im_end|>",
    "two": CALL.format(6) + "<|im_end|>",
    "three": "The user wants five.\n</think>\n\n" + CALL.format(5) + "<|endoftext|>",
    "four": "Done.<|im_end|>",
    "five": "Done.",
    "six": "Done.<|im_start|><|im_end|>",
}
DIALOGUES = [
    dialogue("one"),
    dialogue("two"),
    dialogue("three", thinking=True),
    dialogue("four", kind="answer", answer="Done."),
    dialogue("five", kind="answer", answer="Done."),
    dialogue("six", kind="answer", answer="Done."),
]


@pytest.mark.parametrize("batch", [1, 4, 20])
def test_dialogues_are_judged_one_by_one_whatever_the_batch(tokenizer, batch):
    lines = []
    model = Scripted(tokenizer, REPLIES)
    found = dialogue_score(model, tokenizer, DIALOGUES, batch=batch, max_new_tokens=60, progress=lines.append)
    assert {outcome.id: outcome.right for outcome in found.replies} == {
        "one": True, "two": False, "three": True, "four": True, "five": False, "six": False
    }  # fmt: skip
    assert (found.share, found.right, found.asked) == (0.5, 3, 6)
    assert found.by_kind == {"answer": (1, 3), "call": (2, 3)}
    assert found.by_thinking == {False: (2, 5), True: (1, 1)}
    assert found.replies[4].problem == "expected an end, found none in 60 tokens"
    assert found.replies[5].text == "Done.<|im_start|>"
    assert lines[-1] == "6 of 6 dialogues, 3 right" and len(lines) == math.ceil(6 / batch)
    assert max(model.batches) == min(batch, 6)


def test_long_prompts_share_a_batch_with_fewer(tokenizer, monkeypatch):
    monkeypatch.setattr("workbench.quality.BATCH_TOKENS", 400)
    long = dataclasses.replace(DIALOGUES[0], messages=({"role": "user", "content": "one: five " + "minutes " * 300},))
    model = Scripted(tokenizer, REPLIES)
    found = dialogue_score(model, tokenizer, [*DIALOGUES[:2], long, DIALOGUES[3]], max_new_tokens=60)
    assert [outcome.right for outcome in found.replies] == [True, False, True, True]
    assert model.batches == [2, 1, 1]


def test_the_model_reads_the_template_with_tools_and_mode(tokenizer):
    model = Scripted(tokenizer, REPLIES)
    dialogue_score(model, tokenizer, [DIALOGUES[0], DIALOGUES[2]], max_new_tokens=60)
    assert all("set_timer" in prompt for prompt in model.prompts)
    assert [prompt.endswith("at once ") for prompt in model.prompts] == [True, False]


def test_only_dialogues_whose_own_logits_are_not_finite_are_wrong_for_it(tokenizer):
    model = Scripted(tokenizer, REPLIES, nan_after={"three": 4})
    found = dialogue_score(model, tokenizer, DIALOGUES[:4], max_new_tokens=60)
    assert [outcome.right for outcome in found.replies] == [True, False, False, True]
    assert all(outcome.is_single for outcome in found.replies)
    assert [outcome.is_finite for outcome in found.replies] == [True, True, False, True]
    assert "expected finite values, found 100.0% NaN or Inf" in found.replies[2].problem
    assert [outcome.problem for outcome in found.replies[:2]] == [None, None]
    assert model.batches == [4, 1, 1, 1, 1]


def test_a_ruined_model_scores_zero_and_says_why(tokenizer):
    found = dialogue_score(Scripted(tokenizer, REPLIES, nan_after=dict.fromkeys(REPLIES, 0)), tokenizer, DIALOGUES)
    assert found.share == 0.0 and all("NaN or Inf" in outcome.problem for outcome in found.replies)
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["by_thinking"] == {"on": [0, 1], "off": [0, 5]}


@pytest.mark.parametrize("batch", [0, -1, 1.5])
def test_a_batch_of_nothing_is_refused(tokenizer, batch):
    with pytest.raises(InputError, match="batch: expected a whole number of at least 1, found "):
        dialogue_score(None, tokenizer, [], batch=batch)


def test_no_dialogues_is_an_error(tokenizer):
    with pytest.raises(InputError, match="expected at least one dialogue, found none"):
        dialogue_score(Scripted(tokenizer, REPLIES), tokenizer, [])


def write_data(folder, dialogues: int, recalls: int) -> dict[str, str]:
    """Files of so many dialogues; returns the right reply of each, by id."""
    rows = [dialogue(f"d{n:03}") for n in range(dialogues)]
    (folder / "dialogues.jsonl").write_text("".join(json.dumps(row.to_json()) + "\n" for row in rows))
    facts = [dialogue(f"r{n:03}", kind="recall", answer="Here.") for n in range(recalls)]
    (folder / "recall.jsonl").write_text("".join(json.dumps(row.to_json()) + "\n" for row in facts))
    (folder / "heldout.jsonl").write_text(json.dumps({"text": "Fear no more the heat of the sun. " * 1500}) + "\n")
    return {row.id: CALL.format(5) + "<|im_end|>" for row in rows} | {row.id: "Here.<|im_end|>" for row in facts}


def test_fixed_subsets_are_the_first_of_the_file(tokenizer, tmp_path):
    replies = write_data(tmp_path, 200, 100)
    assert [d.id for d in fixed_dialogues(20, tmp_path)] == [f"d{n:03}" for n in range(20)]
    assert len(fixed_dialogues(200, tmp_path)) == 200
    found = recall_score(Scripted(tokenizer, replies), tokenizer, 100, data=tmp_path)
    assert (found.right, found.asked) == (100, 100)


@pytest.mark.parametrize("n", [0, 19, 100, 201])
def test_other_subsets_do_not_exist(n):
    with pytest.raises(InputError, match=f"expected one of the fixed subsets of 20 or 200, found {n}"):
        fixed_dialogues(n)


def test_missing_and_short_files_are_named(tmp_path):
    with pytest.raises(InputError, match=r"dialogues\.jsonl: cannot be read: No such file"):
        fixed_dialogues(20, tmp_path)
    write_data(tmp_path, 19, 1)
    with pytest.raises(InputError, match="expected at least 20 dialogues, found 19"):
        fixed_dialogues(20, tmp_path)


def test_all_scores_of_a_small_model(tokenizer, tmp_path):
    write_data(tmp_path, 20, 20)
    config = ModelConfig.from_hf(models.mini(vocab_size=4096))
    found = scores(CausalLM(config).init_weights(3).eval(), tokenizer, data=tmp_path)
    assert (found.dialogue.asked, found.recall.asked, found.dialogue.right) == (20, 20, 0)
    assert found.perplexity.predicted == 20 * 512 and found.drafts.proposed == 20 * 511
    assert set(found.to_json()) == {"dialogue", "recall", "perplexity", "drafts"}


def test_a_model_without_the_head_has_no_draft_figure(tokenizer, tmp_path):
    write_data(tmp_path, 20, 20)
    config = dataclasses.replace(ModelConfig.from_hf(models.mini(vocab_size=4096)), mtp_num_hidden_layers=0)
    assert scores(CausalLM(config).init_weights(3).eval(), tokenizer, data=tmp_path).drafts is None
