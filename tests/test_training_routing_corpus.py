"""The routing corpus: right sizes, whole dialogues, and the committed file is what the command writes."""

import shutil
from pathlib import Path

import pytest

from workbench.analysis.routing import read_routing_texts
from workbench.dialogue import Dialogue, ExpectedAnswer, ExpectedCall
from workbench.errors import InputError
from workbench.training import routing_corpus
from workbench.training.corpus import Document

DATA = Path(__file__).parent.parent / "data"
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ m.tool_calls or '' }}\n{% endfor %}"


TIME = {"type": "object", "properties": {"time": {"type": "string"}}}
ALARM = {"type": "function", "function": {"name": "set_alarm", "description": "", "parameters": TIME}}


def dialogue(name: str, size: int, call: ExpectedCall | None = None) -> Dialogue:
    message = {"role": "user", "content": f"{name} " + "x" * size}
    tools = () if call is None else (ALARM,)
    return Dialogue(name, "answer", False, tools, (message,), call or ExpectedAnswer("yes"))


def documents(*sizes: tuple[str, int]) -> list[Document]:
    return [Document(source, f"title {n}", "word " * (n // 5)) for source, n in sizes]


def test_prose_is_one_long_document_of_each_source():
    texts = list(routing_corpus.prose(
        documents(("d", 2500), ("a", 100), ("c", 9000), ("b", 2500), ("a", 3000), ("a", 4000), ("e", 2500))
    ))  # fmt: skip
    assert [text.title for text in texts] == ["a: title 3000", "b: title 2500", "c: title 9000", "d: title 2500"]
    assert [len(text.text) for text in texts] == [3000, 2500, 3499, 2500] and texts[2].text.endswith("word")
    with pytest.raises(InputError, match=r"expected 4 sources .* found \['a'\]"):
        list(routing_corpus.prose(documents(("a", 3000), ("b", 50))))


def test_chat_is_whole_dialogues_with_their_replies():
    call = ExpectedCall("set_alarm", {"time": "18:45"})
    asked = [dialogue("one", 1200), dialogue("two", 1200, call), dialogue("huge", 5000), dialogue("three", 2100)]
    texts = list(routing_corpus.chat(asked, TEMPLATE))
    assert [text.title for text in texts] == ["one, two", "three"]
    assert "[user] one" in texts[0].text and "[assistant] yes" in texts[0].text and "set_alarm" in texts[0].text
    assert all(routing_corpus.LEAST <= len(text.text) <= routing_corpus.MOST for text in texts)


def test_a_short_rest_before_a_long_dialogue_is_dropped_whole():
    texts = list(routing_corpus.chat([dialogue("short", 1500), dialogue("long", 2500)], TEMPLATE))
    assert [text.title for text in texts] == ["long"]


def test_too_few_dialogues_are_an_error():
    with pytest.raises(InputError, match="expected dialogues for 4 texts, found enough for 1"):
        routing_corpus.routing_corpus([], [dialogue("a", 2500)], TEMPLATE)


def test_the_committed_corpus_is_what_the_command_writes(tmp_path, capsys):
    """But for code, which is as the modules were when the file was made."""
    for name in ("heldout.jsonl", "dialogues.jsonl"):
        shutil.copy(DATA / name, tmp_path)
    template = str(DATA / "miniature" / "chat_template.jinja")
    assert routing_corpus.main(["--data", str(tmp_path), "--template", template]) == 0
    assert "16 texts" in capsys.readouterr().out
    made, committed = (read_routing_texts(folder / "routing.jsonl") for folder in (tmp_path, DATA))
    assert [text.title for text in made] == [text.title for text in committed]
    for new, old in zip(made, committed, strict=True):
        assert new == old or new.kind == "code"


def test_a_missing_file_is_one_line_and_code_2(tmp_path, capsys):
    assert routing_corpus.main(["--data", str(tmp_path)]) == 2
    assert "heldout.jsonl" in capsys.readouterr().err
    for name in ("heldout.jsonl", "dialogues.jsonl"):
        shutil.copy(DATA / name, tmp_path)
    (tmp_path / "t.jinja").write_bytes(b"\xff")
    assert routing_corpus.main(["--data", str(tmp_path), "--template", str(tmp_path / "t.jinja")]) == 2
    assert "t.jinja: expected UTF-8 text" in capsys.readouterr().err
    assert not (tmp_path / "routing.jsonl").exists()
