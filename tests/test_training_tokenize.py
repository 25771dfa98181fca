"""Tokenizer training and token files on small texts, and the tokenizer of the miniature in the repository."""

import hashlib
import json
import random
import shutil
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.errors import InputError
from workbench.training import corpus
from workbench.training import tokenize as tk
from workbench.training.corpus import Document

DATA = Path(__file__).parent.parent / "data"
MINIATURE = DATA / "miniature"
CHAT = (
    "<|im_start|>user\nIs it 12,345.60 in Oslo, or 7?<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
    "<|im_end|>\n"
)


def write_conversations(folder: Path, name: str, conversations: list[tuple[str, str]]) -> None:
    rows = [{"text": a + b, "learned": [[len(a), len(a) + len(b)]]} for a, b in conversations]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def small_texts(count: int = 60) -> list[str]:
    draw = random.Random(5)
    words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(2, 7))) for _ in range(300)]
    return [" ".join(draw.choices(words, k=80)) + " 3 < 4" for _ in range(count)]


@pytest.fixture(scope="module")
def small_tokenizer():
    return tk.train_tokenizer(small_texts(), vocab_size=400)


@pytest.fixture(scope="module")
def miniature_tokenizer():
    return tk.read_tokenizer(MINIATURE)


def test_training_is_deterministic_and_fills_the_vocabulary(small_tokenizer):
    again = tk.train_tokenizer(small_texts(), vocab_size=400)
    assert small_tokenizer.to_str() == again.to_str()
    assert small_tokenizer.get_vocab_size() == 400
    assert [small_tokenizer.token_to_id(name) for name, _ in tk.SPECIAL_TOKENS] == list(range(368, 400))


def test_training_makes_the_kind_of_tokenizer_that_is_in_the_repository(small_tokenizer):
    made, kept = json.loads(small_tokenizer.to_str()), json.loads((MINIATURE / "tokenizer.json").read_text())
    for parts in (made, kept):
        del parts["model"]["vocab"], parts["model"]["merges"]
        for number, token in enumerate(parts["added_tokens"]):
            token["id"] = number  # counted from the first special one: the vocabulary sizes differ
    assert made == kept
    written = json.loads((MINIATURE / "tokenizer_config.json").read_text())
    assert written == tk.tokenizer_config(tk.read_tokenizer(MINIATURE))


def test_training_refuses_too_little_text_and_too_small_a_vocabulary():
    with pytest.raises(InputError, match="expected 4064: give more text"):
        tk.train_tokenizer(["one two three"])
    with pytest.raises(InputError, match="vocabulary size 200: expected at least 288"):
        tk.train_tokenizer(small_texts(), vocab_size=200)


def test_documents_are_followed_by_the_separator(small_tokenizer):
    documents = [Document("a", "1", "abc def"), Document("b", "2", "\u00e9 \u65e5"), Document("b", "3", "x")]
    tokens, ends = tk.encode_documents(small_tokenizer, documents)
    assert tokens.dtype == np.uint16 and ends.tolist()[-1] == len(tokens)
    separator = small_tokenizer.token_to_id(tk.END_OF_TEXT)
    assert np.flatnonzero(tokens == separator).tolist() == [end - 1 for end in ends]
    for document, start, end in zip(documents, [0, *ends], ends, strict=False):
        assert small_tokenizer.decode(tokens[start : end - 1].tolist()) == document.text


def test_a_document_with_the_text_of_a_special_token_is_refused(small_tokenizer):
    with pytest.raises(InputError, match="document 'bad' of a holds the text of a special token"):
        tk.encode_documents(small_tokenizer, [Document("a", "bad", "so <think> again")])


def test_command_line_writes_token_files_that_decode_to_the_corpus(tmp_path, capsys):
    parts = {"train": small_texts(50), "heldout": small_texts(60)[50:]}
    for name, texts in parts.items():
        documents = [Document("s", f"{name} {i}", text) for i, text in enumerate(texts)]
        (tmp_path / f"{name}.jsonl").write_bytes(corpus.to_jsonl(documents))
    conversations = [("<|im_start|>user\nIs it 7?<|im_end|>\n", "Yes.<|im_end|>"), ("a " * 3000, "long<|im_end|>")]
    write_conversations(tmp_path, "train_dialogues", conversations)
    write_conversations(tmp_path, "validation_dialogues", conversations[:1])
    out, folder = tmp_path / "out", tmp_path / "tokenizer"
    arguments = [
        "--corpus",
        str(tmp_path),
        "--out",
        str(out),
        "--tokenizer",
        str(folder),
        "--vocab-size",
        "400",
    ]
    assert tk.main(arguments) == 0
    tokenizer = tk.read_tokenizer(folder)
    summary = json.loads((out / "tokens.json").read_text())
    for name, texts in parts.items():
        tokens = tk.read_tokens(out / f"{name}.u16")
        decoded = tokenizer.decode(tokens.tolist(), skip_special_tokens=False).split(tk.END_OF_TEXT)
        assert decoded == [*texts, ""]
        recorded = summary["files"][f"{name}.u16"]
        assert recorded["tokens"] == len(tokens) and recorded["documents"] == len(texts)
        assert recorded["sha256"] == hashlib.sha256((out / f"{name}.u16").read_bytes()).hexdigest()
    for name in ("train_dialogues", "validation_dialogues"):  # the long one is left out
        tokens, learned = tk.read_tokens(out / f"{name}.u16"), np.fromfile(out / f"{name}.u8", np.uint8)
        whole = tokenizer.decode(tokens.tolist(), skip_special_tokens=False)
        assert whole == "".join((*conversations[0], tk.END_OF_TEXT))
        assert tokenizer.decode(tokens[learned == 1].tolist(), skip_special_tokens=False) == conversations[0][1]
        assert np.fromfile(out / f"{name}.starts.u32", "<u4").tolist() == [0]
        recorded = summary["files"][f"{name}.u16"]
        assert (recorded["conversations"], recorded["learned"]) == (1, int(learned.sum()))
    assert summary["files"]["train_dialogues.u16"]["left_out"] == 1
    span = summary["heldout_spans"][3]
    held = tk.read_tokens(out / "heldout.u16")[span["start"] : span["end"] - 1]
    assert tokenizer.decode(held.tolist()) == parts["heldout"][3]

    before = {path.name: path.read_bytes() for path in [*out.iterdir(), *folder.iterdir()]}
    assert tk.main([*arguments, "--reuse"]) == 0
    assert before == {path.name: path.read_bytes() for path in [*out.iterdir(), *folder.iterdir()]}
    assert "heldout.u16" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read"),
        ("{", "not a JSON file"),
        ('{"model": {"type": "WordLevel"}}', "not a BPE tokenizer"),
    ],
)
def test_unusable_tokenizer_file_is_one_line(tmp_path, capsys, content, reason):
    for name in ("train", "heldout"):
        (tmp_path / f"{name}.jsonl").write_bytes(corpus.to_jsonl([Document("s", "t", "x")]))
        write_conversations(tmp_path, f"{name}_dialogues".replace("heldout", "validation"), [("a", "b")])
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    folder = str(tmp_path)
    assert tk.main(["--corpus", folder, "--out", folder, "--tokenizer", folder, "--reuse"]) == 2
    error = capsys.readouterr().err.strip()
    assert reason in error and "tokenizer.json" in error and "\n" not in error


@pytest.mark.parametrize(
    "line",
    [
        "{", "[1]", '{"text": "abc"}', '{"text": "abc", "learned": [[1, 2]]}',
        '{"text": "abc", "learned": [[2, 1], [1, 3]]}', '{"text": ["a"], "learned": [[0, 1]]}', "[" * 100_000,
    ],
)
def test_a_conversation_that_is_none_names_file_and_line(tmp_path, line):
    (tmp_path / "c.jsonl").write_text('{"text": "abc", "learned": [[1, 3]]}\n' + line + "\n")
    with pytest.raises(InputError, match=r"c\.jsonl line 2: expected \{text, learned"):
        tk.read_rendered(tmp_path / "c.jsonl")
    with pytest.raises(InputError, match=r"absent\.jsonl: cannot be read: .*workbench\.training\.dialogues"):
        tk.read_rendered(tmp_path / "absent.jsonl")


def test_a_conversation_holds_any_character(tmp_path):
    """Some of them end a line for Python's splitlines, none but a line feed for a file of JSON lines."""
    text = "".join(map(chr, (0x0B, 0x0C, 0x1C, 0x85, 0x2028, 0x2029, 0x1F600)))
    row = json.dumps({"text": text, "learned": [[1, len(text)]]}, ensure_ascii=False)
    (tmp_path / "c.jsonl").write_text(row + "\n" + row + "\n", encoding="utf-8")
    assert tk.read_rendered(tmp_path / "c.jsonl") == [[text[:1], text[1:]]] * 2
    (tmp_path / "c.jsonl").write_bytes(b"\xff\n")
    with pytest.raises(InputError, match=r"c\.jsonl: cannot be read: .*workbench\.training\.dialogues"):
        tk.read_rendered(tmp_path / "c.jsonl")


def test_every_turn_of_the_assistant_is_learned(small_tokenizer):
    parts = ["ab cd", "<|im_end|>", " ef", "gh<|im_end|>"]
    encoded = tk.encode_dialogues(small_tokenizer, [parts, ["x", "<|im_end|>"]])
    whole = small_tokenizer.decode(encoded.tokens.tolist(), skip_special_tokens=False)
    assert whole == "".join(parts) + tk.END_OF_TEXT + "x<|im_end|>" + tk.END_OF_TEXT
    learned = small_tokenizer.decode(encoded.tokens[encoded.learned == 1].tolist(), skip_special_tokens=False)
    assert learned == "<|im_end|>gh<|im_end|><|im_end|>"
    assert encoded.starts.tolist() == [0, len(encoded.tokens) - 3] and encoded.left_out == 0
    with pytest.raises(InputError, match="at most 2 tokens, found none"):
        tk.encode_dialogues(small_tokenizer, [parts], longest=2)


def test_token_file_that_is_absent_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match=r"train\.u16: not a token file"):
        tk.read_tokens(tmp_path / "train.u16")


# ---------------------------------------------------------------------------------- the miniature's tokenizer


def test_miniature_vocabulary_is_4096_with_the_special_tokens_last(miniature_tokenizer):
    assert miniature_tokenizer.get_vocab_size() == 4096
    ids = [miniature_tokenizer.token_to_id(name) for name, _ in tk.SPECIAL_TOKENS]
    assert ids == list(range(4064, 4096))
    assert sorted(miniature_tokenizer.get_vocab().values()) == list(range(4096))


def test_miniature_tokenizer_cuts_digits_one_by_one(miniature_tokenizer):
    assert miniature_tokenizer.encode("x=2048,17 1999").tokens == [
        "x",
        "=",
        *"2048",
        ",",
        *"17",
        "\u0120",
        *"1999",
    ]
    digits = [
        token
        for token in miniature_tokenizer.get_vocab()
        if sum(c.isdigit() for c in token) and len(token) > 1
    ]
    assert all(token.startswith("<|reserved_") for token in digits)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=80))
def test_miniature_tokenizer_gives_every_text_back(text):
    tokenizer = tk.read_tokenizer(MINIATURE)
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == unicodedata.normalize(
        "NFC", text
    )


def test_miniature_tokenizer_gives_heldout_text_back(miniature_tokenizer):
    documents = corpus.read_documents(DATA / "heldout.jsonl")
    tokens, ends = tk.encode_documents(miniature_tokenizer, documents)
    for document, start, end in zip(documents, [0, *ends], ends, strict=False):
        assert miniature_tokenizer.decode(tokens[start : end - 1].tolist()) == document.text
    assert sum(len(d.text.encode()) for d in documents) / len(tokens) > 3.2


def test_markers_for_parsers_survive_skipping_special_tokens(miniature_tokenizer):
    ids = miniature_tokenizer.encode(CHAT).ids
    assert ids.count(miniature_tokenizer.token_to_id("<|im_end|>")) == 2
    text = miniature_tokenizer.decode(ids, skip_special_tokens=True)
    assert "<think>\n\n</think>" in text and "</tool_call>" in text and "<|im_" not in text


@pytest.mark.parametrize("model_type", [None, "qwen3_5_moe", "qwen3_next"])
def test_transformers_loads_the_same_tokenizer(tmp_path, monkeypatch, miniature_tokenizer, model_type):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MINIATURE / name, tmp_path)
    if (
        model_type is not None
    ):  # a checkpoint's config.json makes transformers build the tokenizer of that model type
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    loaded = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    assert len(loaded) == 4096
    assert (loaded.eos_token, loaded.pad_token, loaded.bos_token) == ("<|im_end|>", "<|endoftext|>", None)
    printable = "".join(map(chr, range(32, 127)))
    heldout = corpus.read_documents(DATA / "heldout.jsonl")[0].text
    for text in (CHAT, printable, heldout, '  a\n\n   {"x": [1, 2.5e-3]}\t\u65e5\u672c e\u0301'):
        assert loaded(text)["input_ids"] == miniature_tokenizer.encode(text).ids
    assert loaded.decode(loaded(CHAT)["input_ids"], skip_special_tokens=True) == miniature_tokenizer.decode(
        miniature_tokenizer.encode(CHAT).ids, skip_special_tokens=True
    )
