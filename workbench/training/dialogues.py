"""Make the conversations of a miniature: those it is trained on, and the fixed sets it is measured with.

    python -m workbench.training.dialogues --corpus DIR --out DIR [--count 110000] [--template FILE] [--data data]

`--corpus` is the output of `workbench.training.corpus`, whose texts stand between fact and question of the `recall`
kind. The rules and word lists are those of `workbench.training.grammar`. Each file is written whole or not at all:

    OUT/train_dialogues.jsonl        {"text", "learned"}: a rendered conversation and the [start, end) characters of the
                                     assistant's turns; no combination in it is held out
    OUT/validation_dialogues.jsonl   the same for other draws of held-out combinations, to follow a training run
    DATA/dialogues.jsonl             200 dialogues of held-out combinations, the first 20 a fair part of them
    DATA/recall.jsonl                100 dialogues with a fact at least 1,500 tokens before its question

The sets in DATA depend on the grammar, the seed and heldout.jsonl alone, and share no conversation with the
validation part.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from workbench.dialogue import Dialogue, ExpectedAnswer, ExpectedCall
from workbench.errors import InputError
from workbench.tokenizer import CHAT_TEMPLATE_FILE, render_chat
from workbench.training.command import one_line_errors
from workbench.training.corpus import Document, read_documents, write_atomic
from workbench.training.grammar import RULES_WITH_FILLER, Conversation, sample

SEED = 20261

@dataclass(frozen=True, slots=True)
class Mix:
    """A training part: conversations of each kind in a hundred, the longest filler in characters, and whether the
    reasoning before a call or a refusal says which of the two it will be."""

    shares: dict[str, int]
    longest_filler: int
    decides_in_reasoning: bool


#: The longest filler of the conversations that teach a copy before they teach the distance.
SHORT_FILLER = 600
#: The longest that a training row holds beside its facts and question.
TRAINING_FILLER = 6_200

#: The training parts of the three runs that made the miniature, in their order. As many requests must be refused as
#: called: with few of them a model calls what it is asked for without a look at the functions that it has. Where the
#: reasoning decides, that look has to be learned at two places, inside it and after it: the last part leaves it to one.
MIXES = {
    "first": Mix(
        {"answer": 20, "call": 14, "result": 7, "follow_up": 9, "refuse": 16, "recall": 16, "drill": 18},
        TRAINING_FILLER, True,
    ),
    "second": Mix(
        {"answer": 12, "call": 12, "result": 4, "follow_up": 6, "refuse": 14, "recall": 8, "drill": 10, "requests": 34},
        TRAINING_FILLER, True,
    ),
    "third": Mix(
        {"answer": 10, "call": 28, "result": 6, "follow_up": 8, "refuse": 28, "recall": 4, "drill": 6, "requests": 10},
        SHORT_FILLER, False,
    ),
}  # fmt: skip
#: Dialogues of each kind in every ten of the fixed set.
MEASURED_MIX = {"answer": 2, "call": 3, "result": 2, "follow_up": 2, "refuse": 1}
MEASURED, RECALLED, VALIDATED = 200, 100, 240

#: Characters between fact and question: 1,500 to 2,000 tokens, since a token of these texts is 3 to 3.9 characters.
MEASURED_FILLER = 6_000


def expected_reply(conversation: Conversation) -> ExpectedCall | ExpectedAnswer:
    """What the last turn must be."""
    if conversation.call is not None:
        return ExpectedCall(*conversation.call)
    return ExpectedAnswer(conversation.answer)


def as_dialogue(conversation: Conversation, name: str) -> Dialogue:
    """The conversation without its last turn, and what that turn must be."""
    c = conversation
    return Dialogue(name, c.kind, c.thinking, c.tools, c.messages, expected_reply(c))


#: The assistant's turns in a rendered conversation; an empty reasoning is layout, not something to learn.
ASSISTANT_TURN = re.compile(r"<\|im_start\|>assistant\n(?:<think>\n\n</think>\n\n)?(.*?<\|im_end\|>)", re.DOTALL)


def render(
    conversation: Conversation, template: str, *, decides_in_reasoning: bool = False
) -> tuple[str, list[tuple[int, int]]]:
    """(text of the whole conversation, [start, end) characters of the assistant's turns in it)."""
    tools, thinking = list(conversation.tools) or None, conversation.thinking
    prompt = render_chat(template, conversation.messages, tools=tools, enable_thinking=thinking)
    last: dict = {"role": "assistant", "content": conversation.answer or ""}
    if thinking:
        decision = f" {conversation.decision}" if decides_in_reasoning and conversation.decision else ""
        last["reasoning_content"] = conversation.reasoning + decision
    if conversation.call is not None:
        name, arguments = conversation.call
        last["tool_calls"] = [{"type": "function", "function": {"name": name, "arguments": arguments}}]
    text = render_chat(template, (*conversation.messages, last), tools=tools, add_generation_prompt=False)
    if not text.startswith(prompt):
        raise InputError(
            f"chat template: expected the prompt to be the beginning of the whole conversation, found {text[:60]!r}; "
            "a turn that the template writes in two ways cannot be learned"
        )
    turns = [match.span(1) for match in ASSISTANT_TURN.finditer(text, 0, len(prompt))]
    return text.rstrip("\n"), [*turns, (len(prompt), len(text.rstrip("\n")))]


def excerpts(documents: list[Document], random: Random) -> Iterator[str]:
    """Endless pieces of running text, TRAINING_FILLER characters or more, cut at blanks; documents may be joined."""
    text = ""
    while True:
        while len(text) < 2 * TRAINING_FILLER:
            text += "\n\n" + random.choice(documents).text
        start = text.find(" ", random.randrange(TRAINING_FILLER // 2)) + 1
        yield text[start:]
        text = text[start + TRAINING_FILLER :]


def cut(text: str, characters: int) -> str:
    """The first `characters` of a text, on to the end of the word."""
    end = text.find(" ", characters)
    return text[: end if end >= 0 else len(text)].strip()


def shuffled_kinds(shares: dict[str, int], count: int, random: Random) -> Iterator[str]:
    """`count` kinds in the proportion of `shares`, every round of their sum complete and in random order."""
    while count > 0:
        kinds = [kind for kind, share in shares.items() for _ in range(share)]
        random.shuffle(kinds)
        yield from kinds[:count]
        count -= len(kinds)


def training_conversations(documents: list[Document], count: int, seed: int, mix: Mix) -> Iterator[Conversation]:
    """`count` conversations without a held-out combination; distances of `recall` from none to the longest."""
    random = Random(f"training {seed}")
    texts = excerpts(documents, random)
    for kind in shuffled_kinds(mix.shares, count, random):
        filler = ""
        if kind in RULES_WITH_FILLER:
            # Half of them short, so that the copy is learned before the distance.
            longest = mix.longest_filler if random.random() < 0.5 else SHORT_FILLER
            filler = cut(next(texts), random.randrange(longest))
        yield sample(kind, random, held_out=False, filler=filler)


def measured_conversations(documents: list[Document], seed: int, purpose: str) -> Iterator[Conversation]:
    """Endless held-out conversations in the proportion of MEASURED_MIX, in each kind thinking on and off in turn."""
    random = Random(f"{purpose} {seed}")
    thinking = dict.fromkeys(MEASURED_MIX, False)
    for kind in shuffled_kinds(MEASURED_MIX, sys.maxsize, random):
        thinking[kind] = not thinking[kind]
        yield sample(kind, random, held_out=True, thinking=thinking[kind])


def recall_conversations(documents: list[Document], seed: int, purpose: str) -> Iterator[Conversation]:
    """Endless held-out recalls over MEASURED_FILLER characters."""
    random = Random(f"{purpose} recall {seed}")
    thinking = False
    for text in excerpts(documents, random):
        thinking = not thinking
        yield sample("recall", random, held_out=True, thinking=thinking, filler=cut(text, MEASURED_FILLER))


def distinct(conversations: Iterator[Conversation], count: int, seen: set[str]) -> list[Conversation]:
    """The next `count` whose messages and hand of functions are not in `seen`; adds them to it."""
    kept: list[Conversation] = []
    while len(kept) < count:
        conversation = next(conversations)
        key = json.dumps([conversation.messages, conversation.tools])
        if key not in seen:
            seen.add(key)
            kept.append(conversation)
    return kept


def fixed_sets(heldout: list[Document], seed: int = SEED) -> dict[str, list[Dialogue]]:
    """{"dialogues": 200, "recall": 100}: what `data/` holds."""
    seen: set[str] = set()
    dialogues = distinct(measured_conversations(heldout, seed, "measured"), MEASURED, seen)
    recalls = distinct(recall_conversations(heldout, seed, "measured"), RECALLED, seen)
    return {
        "dialogues": [as_dialogue(c, f"{c.kind}-{n:03}") for n, c in enumerate(dialogues)],
        "recall": [as_dialogue(c, f"{c.kind}-{n:03}") for n, c in enumerate(recalls)],
    }


def validation_conversations(heldout: list[Document], seed: int) -> list[Conversation]:
    """Held-out conversations that are in neither fixed set, one recall after every five others."""
    fixed = [dialogue for part in fixed_sets(heldout, seed).values() for dialogue in part]
    seen = {json.dumps([dialogue.messages, dialogue.tools]) for dialogue in fixed}
    recalls = distinct(recall_conversations(heldout, seed, "validation"), VALIDATED // 6, seen)
    others = distinct(measured_conversations(heldout, seed, "validation"), VALIDATED - len(recalls), seen)
    return [c for n, recalled in enumerate(recalls) for c in (*others[5 * n : 5 * n + 5], recalled)]


def read_template(path: Path) -> str:
    """The text of a chat template. Raises InputError for a file that is missing or no text."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}; --template names a chat template") from None
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: expected UTF-8 text, found another byte at {error.start}; --template names a chat template"
        ) from None


def _read_texts(path: Path) -> list[Document]:
    documents = read_documents(path)
    if not any(" " in document.text for document in documents):
        raise InputError(
            f"{path}: expected documents of running text, found none; write them with `python -m "
            "workbench.training.corpus`"
        )
    return documents


def write_dialogues(
    corpus: Path, out: Path, data: Path, template: Path, *, count: int, seed: int, mix: Mix = MIXES["first"]
) -> None:
    """Write the four files (see the module)."""
    if count < 1:
        raise InputError(f"count: expected at least one conversation, found {count}")
    source = read_template(template)
    heldout, train = (_read_texts(corpus / f"{name}.jsonl") for name in ("heldout", "train"))
    for name, dialogues in fixed_sets(heldout, seed).items():
        lines = [json.dumps(dialogue.to_json(), ensure_ascii=False) for dialogue in dialogues]
        write_atomic(data / f"{name}.jsonl", ("\n".join(lines) + "\n").encode())
        _say(f"{data / f'{name}.jsonl'}: {len(dialogues)} dialogues")
    out.mkdir(parents=True, exist_ok=True)
    parts = {
        "validation_dialogues": iter(validation_conversations(heldout, seed)),
        "train_dialogues": training_conversations(train, count, seed, mix),
    }
    for name, conversations in parts.items():
        lines = []
        for conversation in conversations:
            text, learned = render(conversation, source, decides_in_reasoning=mix.decides_in_reasoning)
            lines.append(json.dumps({"text": text, "learned": learned}, ensure_ascii=False))
            if len(lines) % 10_000 == 0:
                _say(f"{len(lines):,} of {count:,} conversations")
        write_atomic(out / f"{name}.jsonl", ("\n".join(lines) + "\n").encode())
        _say(f"{out / f'{name}.jsonl'}: {len(lines):,} conversations")


def _say(line: str) -> None:
    print(f"dialogues: {line}", flush=True)


@one_line_errors
def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code (0 done, 2 unusable input)."""
    parser = argparse.ArgumentParser(
        prog="python -m workbench.training.dialogues", description=__doc__.split("\n\n")[0],
        epilog="example: python -m workbench.training.dialogues --corpus build/corpus/out --out build/corpus/out",
    )  # fmt: skip
    parser.add_argument("--corpus", type=Path, required=True, help="directory with train.jsonl and heldout.jsonl")
    parser.add_argument("--out", type=Path, required=True, help="directory for the training and validation parts")
    parser.add_argument("--data", type=Path, default=Path("data"), help="directory of the fixed sets (%(default)s)")
    parser.add_argument(
        "--template", type=Path, default=Path("data/miniature") / CHAT_TEMPLATE_FILE, help="chat template (%(default)s)"
    )
    parser.add_argument("--count", type=int, default=110_000, help="training conversations (%(default)s)")
    parser.add_argument(
        "--mix", choices=MIXES, default="first", help="what the training part is made of (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=SEED, help="seed of all draws (%(default)s)")
    options = parser.parse_args(arguments)
    write_dialogues(
        options.corpus, options.out, options.data, options.template, count=options.count, seed=options.seed,
        mix=MIXES[options.mix],
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
