"""Train the byte-level BPE tokenizer of a miniature and turn the corpus into token files.

    python -m workbench.training.tokenize --corpus DIR --out DIR [--tokenizer data/miniature] [--reuse]

`--corpus` is the output of `workbench.training.corpus` and `workbench.training.dialogues`. The tokenizer is
trained on `train.jsonl` and the first conversations of `train_dialogues.jsonl`, and written to `--tokenizer`
as `tokenizer.json` and `tokenizer_config.json`; with `--reuse` the one that stands there is used as it is. In
`--out`, each file written whole or not at all:

    train.u16, heldout.u16   token ids, little-endian uint16, no header: numpy.fromfile(path, "<u2"). Every
    document is followed
                             by one `<|endoftext|>`; the documents stand in the order of the .jsonl file.
    tokens.json              counts, sha256, and for the held-out tokens the span [start, end) of every
    document

and for train_dialogues and validation_dialogues

    NAME.u16                 token ids as above, every conversation followed by one `<|endoftext|>`
    NAME.u8                  for each token 1 if it is in a turn of the assistant, up to its `<|im_end|>`, else 0
    NAME.starts.u32          index of the first token of each conversation, little-endian uint32

The vocabulary has the layout of Qwen's: byte-level pieces first, then the special tokens, always the same
ones in the same order, so that a later tokenizer of the same size keeps every special id.
"""

import argparse
import itertools
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from workbench.errors import InputError
from workbench.training.command import one_line_errors
from workbench.training.corpus import Document, read_documents, sha256_of_file, write_atomic

VOCAB_SIZE = 4096

END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"

#: Conversations that the vocabulary is trained on besides the corpus: enough for the words of the grammar to become
#: pieces, few enough to cost the text no more than about 1 % more tokens.
DIALOGUES_FOR_VOCABULARY = 4_000
#: Longer conversations are left out: they would not fit into a training row.
MAX_DIALOGUE_TOKENS = 2_040

# How Qwen3.5's tokenizer cuts text before the pieces are merged: this must be the same pattern, because
# `transformers` builds the pre-tokenizer of that model type from its own code and not from tokenizer.json.
# Digits are cut one by one.
PRETOKENIZE_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# (content, is it dropped by `skip_special_tokens`). Markers that a server's parsers must still see are not
# dropped, as in Qwen's own files. The reserved ones hold places for later formats without moving any id.
SPECIAL_TOKENS: tuple[tuple[str, bool], ...] = (
    (END_OF_TEXT, True),
    ("<|im_start|>", True),
    ("<|im_end|>", True),
    ("<|vision_start|>", True),
    ("<|vision_end|>", True),
    ("<|vision_pad|>", True),
    ("<|image_pad|>", True),
    ("<|video_pad|>", True),
    ("<tool_call>", False),
    ("</tool_call>", False),
    ("<tool_response>", False),
    ("</tool_response>", False),
    ("<think>", False),
    ("</think>", False),
    *((f"<|reserved_{number}|>", True) for number in range(18)),
)


def train_tokenizer(texts: list[str], *, vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Train a byte-level BPE on `texts`; ids 0 .. vocab_size - 33 are pieces, the last 32 are
    `SPECIAL_TOKENS` in order.

    All 256 bytes are pieces, so every text can be encoded, and `decode(encode(text))` is `text` in NFC. The
    result depends on the texts alone. Raises `InputError` if the texts have too little variety to fill the
    vocabulary.
    """
    pieces = vocab_size - len(SPECIAL_TOKENS)
    if pieces < 256:
        raise InputError(
            f"vocabulary size {vocab_size}: expected at least {256 + len(SPECIAL_TOKENS)}, bytes and specials"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PRETOKENIZE_PATTERN), behavior="isolated", invert=False),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=pieces,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
        min_frequency=2,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != pieces:
        raise InputError(
            f"the text yields {tokenizer.get_vocab_size()} pieces, expected {pieces}: give more text or a "
            f"smaller vocabulary size"
        )
    for content, is_special in SPECIAL_TOKENS:
        token = AddedToken(content, special=is_special, normalized=False)
        (tokenizer.add_special_tokens if is_special else tokenizer.add_tokens)([token])
    return tokenizer


def tokenizer_config(
    tokenizer: Tokenizer, *, eos_token: str = END_OF_TURN, model_max_length: int = 8192
) -> dict:
    """The content of `tokenizer_config.json`, in the form that `transformers` and vLLM read without remote
    code."""
    decoder = {
        str(tokenizer.token_to_id(content)): {
            "content": content, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
            "special": is_special,
        }
        for content, is_special in SPECIAL_TOKENS
    }  # fmt: skip
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": decoder,
        "additional_special_tokens": [content for content, is_special in SPECIAL_TOKENS if is_special],
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": eos_token,
        "errors": "replace",
        "model_max_length": model_max_length,
        "pad_token": END_OF_TEXT,
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }


def write_tokenizer(
    tokenizer: Tokenizer, folder: Path, *, eos_token: str = END_OF_TURN, model_max_length: int = 8192
) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` (see `tokenizer_config` for the options) to
    `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(
        folder / "tokenizer.json",
        (json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False) + "\n").encode(),
    )
    config = tokenizer_config(tokenizer, eos_token=eos_token, model_max_length=model_max_length)
    write_atomic(
        folder / "tokenizer_config.json", (json.dumps(config, indent=1, ensure_ascii=False) + "\n").encode()
    )


def read_tokenizer(folder: Path) -> Tokenizer:
    """Load `folder/tokenizer.json`; `InputError` if it is missing, damaged or lacks the separator token."""
    path = folder / "tokenizer.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read ({error.strerror}); train one by leaving out --reuse"
        ) from error
    except ValueError as error:
        raise InputError(
            f"{path}: not a JSON file ({error}); train a tokenizer by leaving out --reuse"
        ) from error
    if not isinstance(content, dict) or content.get("model", {}).get("type") != "BPE":
        raise InputError(
            f"{path}: not a BPE tokenizer; expected model.type to be 'BPE'; omit --reuse to train one"
        )
    tokenizer = Tokenizer.from_str(json.dumps(content))
    if tokenizer.token_to_id(END_OF_TEXT) is None:
        raise InputError(
            f"{path}: has no token {END_OF_TEXT}, which separates documents; omit --reuse to train anew"
        )
    return tokenizer


def encode_documents(tokenizer: Tokenizer, documents: list[Document]) -> tuple[np.ndarray, np.ndarray]:
    """Encode the documents one after the other, each followed by `<|endoftext|>`.

    Returns `(tokens [N] uint16, ends [len(documents)] int64)`: document i is `tokens[ends[i - 1]:ends[i]]`
    (from 0 for the first), its separator included. Text that looks like a special token is encoded as that
    token, so the caller's corpus must not hold any: that is an `InputError`.
    """
    separator = tokenizer.token_to_id(END_OF_TEXT)
    if tokenizer.get_vocab_size() > 1 << 16:
        raise InputError(
            f"vocabulary of {tokenizer.get_vocab_size()} does not fit uint16; expected at most 65536 entries"
        )
    first_special = min(tokenizer.token_to_id(content) for content, _ in SPECIAL_TOKENS)
    rows, ends, total = [], [], 0
    for start in range(0, len(documents), 512):
        batch = documents[start : start + 512]
        encoded = tokenizer.encode_batch_fast([document.text for document in batch], add_special_tokens=False)
        for document, result in zip(batch, encoded, strict=True):
            row = np.array([*result.ids, separator], dtype=np.uint16)
            if (row[:-1] >= first_special).any():
                raise InputError(
                    f"document {document.title!r} of {document.source} holds the text of a special token"
                )
            total += len(row)
            rows.append(row)
            ends.append(total)
    return np.concatenate(rows), np.array(ends, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class DialogueTokens:
    """Conversations one after the other: `tokens` [N] uint16, `learned` [N] uint8 (1 in the assistant's turns),
    `starts` [conversations] uint32, `left_out` conversations that were longer than the limit."""

    tokens: np.ndarray
    learned: np.ndarray
    starts: np.ndarray
    left_out: int


def read_rendered(path: Path) -> list[list[str]]:
    """The parts of each conversation that `workbench.training.dialogues` wrote: context and turn to learn in turn."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # splitlines would also cut at U+2028 inside a text
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(
            f"{path}: cannot be read: {reason}; write it with `python -m workbench.training.dialogues`"
        ) from None
    conversations = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            row = json.loads(line)
            bounds = [0, *(position for span in row["learned"] for position in span)]
            if not isinstance(row["text"], str) or bounds != sorted(bounds) or bounds[-1] != len(row["text"]):
                raise ValueError("spans")
            conversations.append([row["text"][start:end] for start, end in itertools.pairwise(bounds)])
        except (ValueError, RecursionError, KeyError, TypeError) as error:
            raise InputError(
                f"{path} line {number}: expected {{text, learned: rising spans up to its end}}, found {line[:40]!r}"
            ) from error
    return conversations


def encode_dialogues(
    tokenizer: Tokenizer, conversations: list[list[str]], *, longest: int = MAX_DIALOGUE_TOKENS
) -> DialogueTokens:
    """Encode conversations, each part by itself: a model meets the tokens of a prompt before it writes its own.

    Conversations of more than `longest` tokens are left out and counted.
    """
    separator = tokenizer.token_to_id(END_OF_TEXT)
    rows, learned, starts, total, left_out = [], [], [], 0, 0
    for first in range(0, len(conversations), 4096):
        batch = conversations[first : first + 4096]
        encoded = iter(tokenizer.encode_batch_fast([p for parts in batch for p in parts], add_special_tokens=False))
        for parts in batch:
            ids = [next(encoded).ids for _ in parts] + [[separator]]
            lengths = [len(part) for part in ids]
            if sum(lengths) > longest:
                left_out += 1
                continue
            rows.append(np.array([token for part in ids for token in part], dtype=np.uint16))
            learned.append(np.repeat(np.arange(len(ids), dtype=np.uint8) % 2, lengths))
            starts.append(total)
            total += len(rows[-1])
    if not rows:
        raise InputError(f"conversations: expected one of at most {longest} tokens, found none")
    return DialogueTokens(np.concatenate(rows), np.concatenate(learned), np.array(starts, dtype=np.uint32), left_out)


def read_tokens(path: Path) -> np.ndarray:
    """The token ids of a `.u16` file, [N] uint16, memory-mapped and read-only."""
    try:
        return np.memmap(path, dtype="<u2", mode="r")
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path}: not a token file ({error}); write it with `python -m workbench.training.tokenize`"
        ) from error


def tokenize_corpus(
    corpus: Path, out: Path, *, tokenizer_folder: Path, vocab_size: int = VOCAB_SIZE, reuse: bool = False
) -> dict:
    """Train (or reuse) the tokenizer and write the token files; return the content of `out/tokens.json`."""
    parts = {name: read_documents(corpus / f"{name}.jsonl") for name in ("train", "heldout")}
    rendered = {name: read_rendered(corpus / f"{name}.jsonl") for name in ("train_dialogues", "validation_dialogues")}
    if reuse:
        tokenizer = read_tokenizer(tokenizer_folder)
    else:
        texts = [document.text for document in parts["train"]]
        texts += ["".join(parts) for parts in rendered["train_dialogues"][:DIALOGUES_FOR_VOCABULARY]]
        _say(f"training a vocabulary of {vocab_size} on {sum(map(len, texts)):,} characters")
        tokenizer = train_tokenizer(texts, vocab_size=vocab_size)
        write_tokenizer(tokenizer, tokenizer_folder)
    out.mkdir(parents=True, exist_ok=True)
    summary: dict = {
        "vocab_size": tokenizer.get_vocab_size(),
        "separator": tokenizer.token_to_id(END_OF_TEXT),
        "tokenizer_sha256": sha256_of_file(tokenizer_folder / "tokenizer.json"),
        "files": {},
    }
    for name, documents in parts.items():
        tokens, ends = encode_documents(tokenizer, documents)
        path = out / f"{name}.u16"
        write_atomic(path, tokens.astype("<u2").tobytes())
        text_bytes = sum(len(document.text.encode()) for document in documents)
        summary["files"][path.name] = {
            "tokens": len(tokens), "documents": len(documents), "text_bytes": text_bytes,
            "bytes_per_token": round(text_bytes / (len(tokens) - len(documents)), 4),
            "sha256": sha256_of_file(path), "corpus_sha256": sha256_of_file(corpus / f"{name}.jsonl"),
        }  # fmt: skip
        if name == "heldout":
            starts = [0, *ends[:-1].tolist()]
            summary["heldout_spans"] = [
                {"source": document.source, "title": document.title, "start": start, "end": end}
                for document, start, end in zip(documents, starts, ends.tolist(), strict=True)
            ]
        _say(f"{path}: {len(tokens):,} tokens of {len(documents)} documents")
    for name, conversations in rendered.items():
        encoded = encode_dialogues(tokenizer, conversations)
        arrays = {"u16": (encoded.tokens, "<u2"), "u8": (encoded.learned, "u1"), "starts.u32": (encoded.starts, "<u4")}
        for ending, (array, kind) in arrays.items():
            write_atomic(out / f"{name}.{ending}", array.astype(kind).tobytes())
        summary["files"][f"{name}.u16"] = {
            "tokens": len(encoded.tokens), "learned": int(encoded.learned.sum()), "conversations": len(encoded.starts),
            "left_out": encoded.left_out, "sha256": sha256_of_file(out / f"{name}.u16"),
            "corpus_sha256": sha256_of_file(corpus / f"{name}.jsonl"),
        }  # fmt: skip
        _say(
            f"{out / name}.u16: {len(encoded.tokens):,} tokens of {len(encoded.starts):,} conversations, "
            f"{encoded.left_out} longer than {MAX_DIALOGUE_TOKENS} left out"
        )
    write_atomic(out / "tokens.json", (json.dumps(summary, indent=1) + "\n").encode())
    return summary


def _say(line: str) -> None:
    print(f"tokenize: {line}", flush=True)


@one_line_errors
def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code (0 done, 2 unusable input)."""
    parser = argparse.ArgumentParser(
        prog="python -m workbench.training.tokenize",
        description="Train the tokenizer of a miniature and write the corpus as token files.",
        epilog="example: python -m workbench.training.tokenize --corpus build/corpus --out build/corpus",
    )
    parser.add_argument(
        "--corpus", type=Path, required=True, help="directory with train.jsonl and heldout.jsonl"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="directory for train.u16, heldout.u16, tokens.json"
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        default=Path("data/miniature"),
        help="directory of tokenizer.json (default %(default)s)",
    )
    parser.add_argument(
        "--vocab-size", type=int, default=VOCAB_SIZE, help="entries, specials included (default %(default)s)"
    )
    parser.add_argument(
        "--reuse", action="store_true", help="use the tokenizer that is there instead of training one"
    )
    options = parser.parse_args(arguments)
    tokenize_corpus(
        options.corpus,
        options.out,
        tokenizer_folder=options.tokenizer,
        vocab_size=options.vocab_size,
        reuse=options.reuse,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
