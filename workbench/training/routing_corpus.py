"""Make the routing corpus: texts of four kinds, to see which experts of a miniature serve which.

    python -m workbench.training.routing_corpus [--data data] [--template data/miniature/chat_template.jinja]

Writes DATA/routing.jsonl, {"kind", "title", "text"} a line, ITEMS texts of LEAST to MOST characters of each kind:

    prose      of held-out documents, one of each of the first sources that have one long enough
    code       the beginnings of modules of this package, as they were when the file was made
    chat       dialogues of the fixed set, rendered with their right replies
    repeated   one word over and over
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from workbench.analysis.routing import RoutingText
from workbench.dialogue import Dialogue, ExpectedCall, read_dialogues
from workbench.errors import InputError
from workbench.tokenizer import CHAT_TEMPLATE_FILE, render_chat
from workbench.training.command import one_line_errors
from workbench.training.corpus import Document, read_documents, write_atomic
from workbench.training.dialogues import read_template

ITEMS, LEAST, MOST = 4, 2_000, 3_500

PACKAGE = Path(__file__).resolve().parent.parent
MODULES = ("generation.py", "kernels/gated_delta_rule/reference.py", "kernels/registry.py", "tokenizer.py")
WORDS = (" the", " king", " and", " not")


def cut(text: str, end: str) -> str:
    """At most MOST characters of a text, up to the last `end` among them. Raises InputError if under LEAST remain."""
    text = text if len(text) <= MOST else text[: text.rindex(end, 0, MOST)]
    if len(text) < LEAST:
        raise InputError(f"routing corpus: expected a text of at least {LEAST} characters, found {len(text)}")
    return text


def prose(documents: Iterable[Document]) -> Iterator[RoutingText]:
    """The first long document of every source, sources in the order of their names."""
    first: dict[str, Document] = {}
    for document in documents:
        if len(document.text) >= LEAST:
            first.setdefault(document.source, document)
    if len(first) < ITEMS:
        raise InputError(
            f"routing corpus: expected {ITEMS} sources with a document of {LEAST} characters, found {sorted(first)}"
        )
    for source in sorted(first)[:ITEMS]:
        yield RoutingText("prose", f"{source}: {first[source].title}", cut(first[source].text, " "))


def code() -> Iterator[RoutingText]:
    for name in MODULES:
        yield RoutingText("code", name, cut((PACKAGE / name).read_text(encoding="utf-8"), "\n"))


def rendered(dialogue: Dialogue, template: str) -> str:
    """A dialogue as text, its right reply included."""
    expected = dialogue.expected
    reply: dict[str, object] = {"role": "assistant", "content": ""}
    if isinstance(expected, ExpectedCall):
        function = {"name": expected.name, "arguments": expected.arguments}
        reply["tool_calls"] = [{"type": "function", "function": function}]
    else:
        reply["content"] = expected.text
    return render_chat(
        template, (*dialogue.messages, reply), tools=list(dialogue.tools) or None,
        enable_thinking=dialogue.thinking, add_generation_prompt=False,
    )  # fmt: skip


def chat(dialogues: Iterable[Dialogue], template: str) -> Iterator[RoutingText]:
    """Dialogues in their order, as many to a text as reach LEAST characters; none is cut."""
    titles: list[str] = []
    text = ""
    for dialogue in dialogues:
        part = rendered(dialogue, template)
        if len(part) > MOST:
            continue
        if len(text) + len(part) > MOST:  # the one before was too short for a text and this is too long for the rest
            titles, text = [], ""
        titles.append(dialogue.id)
        text += part
        if len(text) >= LEAST:
            yield RoutingText("chat", ", ".join(titles), text)
            titles, text = [], ""


def repeated() -> Iterator[RoutingText]:
    for word in WORDS:
        yield RoutingText("repeated", word.strip(), word * (LEAST // len(word) + 1))


def routing_corpus(documents: Iterable[Document], dialogues: Iterable[Dialogue], template: str) -> list[RoutingText]:
    """ITEMS texts of every kind."""
    spoken = list(chat(dialogues, template))[:ITEMS]
    if len(spoken) < ITEMS:
        raise InputError(f"routing corpus: expected dialogues for {ITEMS} texts, found enough for {len(spoken)}")
    return [*prose(documents), *code(), *spoken, *repeated()]


@one_line_errors
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m workbench.training.routing_corpus", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of heldout.jsonl and dialogues.jsonl")
    parser.add_argument("--template", type=Path, help="chat template (default: the one of DATA/miniature)")
    options = parser.parse_args(arguments)
    data = options.data
    template = options.template or data / "miniature" / CHAT_TEMPLATE_FILE
    texts = routing_corpus(
        read_documents(data / "heldout.jsonl"),
        read_dialogues(data / "dialogues.jsonl"),
        read_template(template),
    )
    lines = [json.dumps(dataclasses.asdict(text), ensure_ascii=False) + "\n" for text in texts]
    write_atomic(data / "routing.jsonl", "".join(lines).encode())
    print(f"{data / 'routing.jsonl'}: {len(texts)} texts, {sum(len(text.text) for text in texts)} characters")
    return 0


if __name__ == "__main__":
    sys.exit(main())
