"""The grammar of the conversations, the fixed sets in data/ and what a model is trained on."""

import itertools
import json
import re
from pathlib import Path
from random import Random

import pytest

from workbench.dialogue import ExpectedCall, is_right, parse_reply, read_dialogues
from workbench.errors import InputError
from workbench.tokenizer import Tokenizer
from workbench.training import dialogues as made
from workbench.training import grammar
from workbench.training.corpus import Document, read_documents, to_jsonl

DATA = Path(__file__).parent.parent / "data"
TEMPLATE = (DATA / "miniature" / "chat_template.jinja").read_text(encoding="utf-8")
KINDS = (*grammar.RULES, *grammar.RULES_WITH_FILLER)


@pytest.fixture(scope="module")
def heldout():
    return read_documents(DATA / "heldout.jsonl")


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_directory(DATA / "miniature")


def draws(kind: str, count: int, *, held_out: bool = False) -> list[grammar.Conversation]:
    random, filler = Random(f"test {kind}"), "Of man's first disobedience."
    return [grammar.sample(kind, random, held_out=held_out, filler=filler) for _ in range(count)]


def test_the_fixed_sets_are_what_the_grammar_gives(heldout):
    for name, dialogues in made.fixed_sets(heldout).items():
        assert [d.to_json() for d in dialogues] == [d.to_json() for d in read_dialogues(DATA / f"{name}.jsonl")]


def test_the_first_twenty_are_a_fair_part_of_the_two_hundred():
    dialogues = read_dialogues(DATA / "dialogues.jsonl")
    assert len(dialogues) == 200 and len(read_dialogues(DATA / "recall.jsonl")) == 100
    for part in (dialogues[:20], dialogues):
        for kind, share in made.MEASURED_MIX.items():
            of_kind = [d for d in part if d.kind == kind]
            assert abs(len(of_kind) / len(part) - share / 10) <= 0.02
            assert abs(sum(d.thinking for d in of_kind) - len(of_kind) / 2) <= 2
    called = {d.expected.name for d in dialogues if isinstance(d.expected, ExpectedCall)}
    assert called == {function.name for function in grammar.FUNCTIONS}


@pytest.mark.parametrize("kind", KINDS)
def test_no_held_out_combination_occurs_in_training(kind):
    for conversation in draws(kind, 150):
        assert not any(map(grammar.is_held_out, (conversation.combination, *conversation.others)))
    assert all(grammar.is_held_out(c.combination) for c in draws(kind, 20, held_out=True))


def one_of(words) -> str:
    return f"({'|'.join(sorted(words, key=len, reverse=True))})"


SAID = {  # what tells a combination in a text: its words in the order of the key, which no label of a rule gives
    "recall": re.compile(f"The {one_of(grammar.ITEMS)} of {one_of(grammar.NAMES)} is in the {one_of(grammar.PLACES)}"),
    "holder": re.compile(f"{one_of(grammar.NAMES)} has the {one_of(grammar.ITEMS)}"),
    "introduced": re.compile(f"{one_of(grammar.NAMES)} (?:from|and I live in) {one_of(grammar.CITIES)}"),
    "larger": re.compile(r"(larger|smaller), (\d+) or (\d+)\?"),
    "capital": re.compile(rf"\b{one_of(grammar.CAPITALS)}\b"),
    "opposite": re.compile(rf"\b{one_of(grammar.OPPOSITES)}\b"),
}
CALLED = re.compile(r"<function=(?!NAME)(\w+)>(.*?)</function>", re.DOTALL)
VALUE = re.compile(r"<parameter=\w+>\n(.*?)\n</parameter>")


def combinations_said(conversation: grammar.Conversation) -> set[str]:
    """The combinations that stand in the rendered text, found by its words."""
    text, _ = made.render(conversation, TEMPLATE)
    found = {"|".join(("call", name, *VALUE.findall(body))) for name, body in CALLED.findall(text)}
    for kind in ("recall", "holder", "introduced", "larger"):
        found |= {"|".join((kind, *match)) for match in SAID[kind].findall(text)}
    for message in (m["content"] for m in conversation.messages if m["role"] == "user"):
        for function in grammar.FUNCTIONS:
            for phrase in function.phrases:
                pattern = re.sub(r"\\{(\w+)\\}", r"(?P<\1>.+)", re.escape(phrase))
                if match := re.fullmatch(pattern, message):
                    found.add("|".join(("call", function.name, *(match[name] for name in function.values))))
        for kind in ("capital", "opposite"):
            if kind in message and (match := SAID[kind].search(message)):
                found.add("|".join((kind, match[1], message.replace(match[1], "{}"))))
        if re.search("after|before", message):
            found.add(f"following|{message}")
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_no_held_out_combination_is_read_in_a_text_of_training(kind):
    for conversation in draws(kind, 150):
        said = combinations_said(conversation)
        assert not any(map(grammar.is_held_out, said)), conversation
        labels = {conversation.combination, *conversation.others}
        # All that is said has a label and the other way round, but for wishes that never fit.
        assert labels <= said or conversation.combination.startswith("refuse|"), (labels - said, conversation)
        assert {key for key in said if not key.startswith("following|")} <= labels, (said - labels, conversation)


def test_no_dialogue_of_the_fixed_sets_is_in_the_training_part(heldout):
    """A request that never fits is refused for many hands of functions: there the hand is the combination."""
    dialogues = read_dialogues(DATA / "dialogues.jsonl") + read_dialogues(DATA / "recall.jsonl")
    whole = {json.dumps([d.messages, d.tools]) for d in dialogues}
    asked = {json.dumps(d.messages[-1]) for d in dialogues if d.kind in ("answer", "call", "recall")}
    for mix in made.MIXES.values():
        trained = list(made.training_conversations(heldout, 2000, made.SEED, mix))
        assert len(trained) == 2000
        for conversation in trained:
            assert json.dumps([conversation.messages, conversation.tools]) not in whole
            assert json.dumps(conversation.messages[-1]) not in asked or len(conversation.messages) > 1


def test_a_wish_that_nothing_fits_is_trained_on_and_never_measured():
    wishes = {wish for _, wish in grammar.NEVER_POSSIBLE}

    def asked(conversations) -> set[str]:
        return {c.answer.removeprefix("I have no function to ").removesuffix(".") for c in conversations} & wishes

    assert len(asked(draws("refuse", 200))) > 5 and not asked(draws("refuse", 60, held_out=True))


def test_a_tenth_is_held_out():
    share = sum(grammar.is_held_out(f"call|{n}") for n in range(20_000)) / 20_000
    assert abs(share - 0.1) < 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_the_turn_to_learn_is_the_right_reply(kind):
    for conversation in draws(kind, 60):
        text, learned = made.render(conversation, TEMPLATE)
        assert text.endswith("<|im_end|>") and learned[-1][1] == len(text)
        assert [p for span in learned for p in span] == sorted(p for span in learned for p in span)
        reply = text[slice(*learned[-1])].removesuffix("<|im_end|>")
        expected = made.expected_reply(conversation)
        parsed = parse_reply(reply, conversation.tools, thinking=conversation.thinking)
        assert is_right(parsed, expected), (reply, expected)
        assert (parsed.reasoning == conversation.reasoning) if conversation.thinking else parsed.reasoning is None
        turns = sum(message["role"] == "assistant" for message in conversation.messages) + 1
        assert len(learned) == turns


@pytest.mark.parametrize("kind", ["call", "result", "follow_up", "requests"])
def test_arguments_are_copied_from_the_conversation(kind):
    for conversation in draws(kind, 60):
        if conversation.call is not None:
            said = json.dumps([m for m in conversation.messages if m["role"] != "assistant"])
            said += json.dumps([m for m in conversation.messages if m["role"] == "assistant"])
            assert all(str(value) in said for value in conversation.call[1].values())


@pytest.mark.parametrize("kind", ["refuse", "requests"])
def test_a_refused_request_fits_no_function_at_hand(kind):
    wishes = {function.wish: function.name for function in grammar.FUNCTIONS}
    refused = [c for c in draws(kind, 120) if c.call is None]
    assert len(refused) > 30
    for conversation in refused:
        wish = conversation.answer.removeprefix("I have no function to ").removesuffix(".")
        assert wishes.get(wish) not in [tool["function"]["name"] for tool in conversation.tools]


def test_a_called_function_is_at_hand():
    for conversation in draws("call", 60) + draws("requests", 60):
        if conversation.call is not None:
            assert conversation.call[0] in [tool["function"]["name"] for tool in conversation.tools]


def test_a_recall_reaches_back_1500_tokens(tokenizer):
    for dialogue in read_dialogues(DATA / "recall.jsonl"):
        text = dialogue.messages[0]["content"]
        assert text.count(dialogue.expected.text) == 1  # the fact stands once, as the answer repeats it
        between = text[text.index("\n\n") : text.rindex("\n\n")]
        assert len(tokenizer.encode(between)) >= 1500, dialogue.id
        prompt = tokenizer.apply_chat_template(dialogue.messages, enable_thinking=dialogue.thinking)
        assert len(tokenizer.encode(prompt)) <= 2200


def test_a_part_encoded_by_itself_is_what_the_whole_gives(tokenizer):
    """Else a model would meet other tokens in a prompt than in training."""
    for conversation in itertools.chain.from_iterable(draws(kind, 15) for kind in KINDS):
        text, learned = made.render(conversation, TEMPLATE)
        start = learned[-1][0]
        assert tokenizer.encode(text[:start]) + tokenizer.encode(text[start:]) == tokenizer.encode(text)


def test_a_template_that_writes_a_turn_in_two_ways_is_refused():
    conversation = draws("answer", 1)[0]
    template = "{{ messages | length }}{% if add_generation_prompt %}>{% endif %}"
    with pytest.raises(InputError, match="expected the prompt to be the beginning"):
        made.render(conversation, template)


def test_the_command_writes_the_same_files_again(tmp_path, heldout, capsys):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "train.jsonl").write_bytes(to_jsonl(heldout[:40]))
    (corpus / "heldout.jsonl").write_bytes(to_jsonl(heldout))
    for name in ("one", "two"):
        data = tmp_path / f"data {name}"
        data.mkdir()
        arguments = ["--corpus", str(corpus), "--out", str(tmp_path / name), "--data", str(data), "--count", "60"]
        assert made.main([*arguments, "--template", str(DATA / "miniature/chat_template.jinja")]) == 0
    for file in ("train_dialogues.jsonl", "validation_dialogues.jsonl"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    assert (tmp_path / "data one/dialogues.jsonl").read_bytes() == (DATA / "dialogues.jsonl").read_bytes()
    lines = (tmp_path / "one/train_dialogues.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 60 and set(json.loads(lines[0])) == {"text", "learned"}
    assert "60 conversations" in capsys.readouterr().out


ONE = to_jsonl([Document("s", "t", "word " * 3000)])


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"--template": "absent.jinja"}, "absent.jinja: cannot be read"),
        ({"t.jinja": b"\xff"}, {}, "t.jinja: expected UTF-8 text, found another byte at 0"),
        ({"train.jsonl": b""}, {}, "train.jsonl: expected documents of running text, found none"),
        ({"heldout.jsonl": b""}, {}, "heldout.jsonl: expected documents of running text, found none"),
        ({"train.jsonl": to_jsonl([Document("s", "t", "word")])}, {}, "train.jsonl: expected documents"),
        ({"train.jsonl": ONE[:-30]}, {}, "train.jsonl line 1: expected {source, title, text} as JSON"),
        ({"train.jsonl": b'{"source": "s", "title": "t", "text": 5}'}, {}, "train.jsonl line 1: expected {source"),
        ({"train.jsonl": b"[" * 100_000}, {}, "train.jsonl line 1: expected {source, title, text} as JSON"),
        ({}, {"--count": "0"}, "count: expected at least one conversation, found 0"),
        ({}, {"--data": "absent"}, "absent"),
        ({}, {"--out": "t.jinja"}, "t.jinja"),
    ],
)
def test_unusable_input_is_one_line(tmp_path, monkeypatch, capsys, changes, options, message):
    monkeypatch.chdir(tmp_path)
    for name, content in ({"heldout.jsonl": ONE, "train.jsonl": ONE, "t.jinja": TEMPLATE.encode()} | changes).items():
        Path(name).write_bytes(content)
    settings = {"--corpus": ".", "--out": "out", "--data": ".", "--template": "t.jinja", "--count": "2"} | options
    assert made.main([part for pair in settings.items() for part in pair]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
