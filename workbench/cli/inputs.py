"""What the options of a command line stand for: prompts, token ids, models."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from workbench.model import CausalLM


def read_prompt(path: Path) -> str:
    """The text of a prompt file. Raises InputError for one that is unreadable, empty or no UTF-8 text."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors on Windows put a mark first that is no text
    except OSError as error:
        raise InputError(f"prompt file {path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        found = f"found byte 0x{byte:02x} at position {error.start}"
        raise InputError(f"prompt file {path}: expected UTF-8 text, {found}") from None
    if "\0" in text:
        raise InputError(
            f"prompt file {path}: expected text, found a zero byte at position {text.index(chr(0))}"
        )
    if not text.strip():
        raise InputError(f"prompt file {path}: expected some text, found none")
    return text


def parse_ids(text: str) -> list[int]:
    """Token ids separated by commas or spaces."""
    parts = text.replace(",", " ").split()
    if not parts or not all(part.isascii() and part.isdecimal() and len(part) < 19 for part in parts):
        raise InputError(f"--ids: expected whole numbers separated by commas, found {text[:60]!r}")
    return [int(part) for part in parts]


def prompt_ids(options: argparse.Namespace) -> list[int]:
    """The token ids of whichever prompt option was given."""
    if options.ids is not None:
        return parse_ids(options.ids)
    from workbench.tokenizer import Tokenizer

    text = options.prompt if options.prompt is not None else read_prompt(options.prompt_file)
    ids = Tokenizer.from_directory(folder_of(options.checkpoint)).encode(text)
    if not ids:
        raise InputError("--prompt: expected some text, found none")
    return ids


def load_model(options: argparse.Namespace) -> CausalLM:
    """The model that the options ask for."""
    from workbench.kernels.registry import parse_selection
    from workbench.loading import load

    policies = {parse_selection(options.backend).policy, options.policy} - {None}
    if len(policies) > 1:
        raise InputError(
            f"--backend and --policy: expected one policy, found {' and '.join(sorted(policies))}"
        )
    if not options.checkpoint.exists():
        raise InputError(f"checkpoint {options.checkpoint}: expected a directory, found nothing there")
    model = load(
        options.checkpoint,
        dtype=options.dtype,
        device=options.device,
        backend=options.backend,
        policy=options.policy,
    )
    overflows, flushed = (sum(getattr(t, name) for t in model.narrowing) for name in ("n_overflow", "n_flushed"))
    if overflows or flushed:
        print(
            f"workbench: narrowing to {options.dtype}: {overflows:,} weights overflow, {flushed:,} become zero; "
            f"`workbench inspect --dtype {options.dtype}` lists them",
            file=sys.stderr,
        )
    return model


def folder_of(checkpoint: Path) -> Path:
    """Where the tokenizer of a checkpoint lies, which may be given as one weight file."""
    return checkpoint.parent if checkpoint.is_file() else checkpoint


def input_tensor(model: CausalLM, ids: list[int]) -> Tensor:
    import torch

    limit, vocabulary = model.config.max_position_embeddings, model.config.vocab_size
    if len(ids) > limit:
        raise InputError(
            f"prompt: expected at most {limit} tokens (max_position_embeddings), found {len(ids)}"
        )
    if max(ids) >= vocabulary:
        raise InputError(f"prompt: expected token ids from 0 to {vocabulary - 1}, found {max(ids)}")
    return torch.tensor([ids], device=model.device)
