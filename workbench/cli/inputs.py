"""What the options of a command line stand for: prompts, token ids, models."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.dialogue import Dialogue
from workbench.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from workbench.cards import Card
    from workbench.config import ModelConfig
    from workbench.model import CausalLM
    from workbench.tokenizer import Tokenizer


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
    is_chat = options.chat is not None or options.messages is not None
    for name in ("tools", "thinking"):
        if getattr(options, name) is not None and not is_chat:
            raise InputError(f"--{name}: expected with --chat or --messages, found neither; a plain prompt has none")
    if options.ids is not None:
        return parse_ids(options.ids)
    from workbench.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_directory(folder_of(options.checkpoint))
    if is_chat:
        text = chat_prompt(options, tokenizer)
    else:
        text = options.prompt if options.prompt is not None else read_prompt(options.prompt_file)
    ids = tokenizer.encode(text)
    if not ids:
        raise InputError("--prompt: expected some text, found none")
    return ids


def chat_prompt(options: argparse.Namespace, tokenizer: Tokenizer) -> str:
    """The conversation of --chat or --messages in the form of the checkpoint's chat template."""
    tools, thinking = None, None if options.thinking is None else options.thinking == "on"
    if options.chat is not None:
        if not options.chat.strip():
            raise InputError("--chat: expected some text, found none")
        messages: list = [{"role": "user", "content": options.chat}]
    else:
        messages = _read_json(options.messages)
        if isinstance(messages, dict):  # a dialogue of the fixed sets
            try:
                dialogue = Dialogue.from_json(messages)
            except InputError as error:
                raise InputError(f"{options.messages}: not a list of messages, and as a dialogue: {error}") from None
            messages, tools = list(dialogue.messages), list(dialogue.tools) or None
            thinking = dialogue.thinking if thinking is None else thinking
        elif not _is_list_of_objects(messages) or not messages:
            raise InputError(
                f"--messages {options.messages}: expected a JSON list of objects, at least one, "
                f"found {str(messages)[:60]!r}"
            )
    if options.tools is not None:
        tools = _read_json(options.tools)
        if not _is_list_of_objects(tools):
            raise InputError(f"--tools {options.tools}: expected a JSON list of objects, found {str(tools)[:60]!r}")
        for number, tool in enumerate(tools):
            function = tool.get("function")
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise InputError(
                    f'--tools {options.tools}: [{number}]: expected {{"type": "function", "function": {{"name", '
                    f"...}}}}, found {str(tool)[:60]!r}"
                )
    try:
        return tokenizer.apply_chat_template(messages, tools=tools, enable_thinking=thinking)
    except InputError as error:
        if options.messages is None:
            raise
        raise InputError(f"{options.messages}: {error}") from None


def _is_list_of_objects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(read_prompt(path))
    except (ValueError, RecursionError) as error:
        is_more = isinstance(error, json.JSONDecodeError) and error.msg == "Extra data"
        hint = "; give one line of a file that has a value on each" if is_more else ""
        raise InputError(f"{path}: expected JSON, found: {error}{hint}") from None


def load_model(options: argparse.Namespace) -> CausalLM:
    """The model that the options ask for."""
    from workbench.kernels.registry import parse_selection
    from workbench.loading import load

    register_bridges(options)
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
        router_dtype=options.router_dtype,
        expert_layout=options.expert_layout,
        strict=not options.lenient,
        card=options.card,
    )
    dtype = str(model.dtype).removeprefix("torch.")
    if options.card is not None and options.dtype is None:
        name = model.kernels.card.name
        print(f"workbench: card {name}: weights in {dtype}; --dtype chooses another", file=sys.stderr)
    if options.card is not None:
        print_plan(model.config, model.kernels.card, dtype)
        options.closing = lambda: print_rehearsed(model)
    print_assumptions(model.checkpoint_accounting.assumptions)
    overflows, flushed = (sum(getattr(t, name) for t in model.narrowing) for name in ("n_overflow", "n_flushed"))
    if overflows or flushed:
        print(
            f"workbench: narrowing to {dtype}: {overflows:,} weights overflow, {flushed:,} become zero; "
            f"`workbench inspect --dtype {dtype}` lists them",
            file=sys.stderr,
        )
    return model


def register_bridges(options: argparse.Namespace) -> None:
    """The bridges of --bridge become backends of this process; each is told."""
    if not options.bridge:
        return
    from workbench.probe import register_bridges
    from workbench.probe.bridges import read_bridges

    for file in options.bridge:
        bridges = read_bridges(file)
        for name in register_bridges(bridges, search=[file.resolve().parent], device=options.device.partition(":")[0]):
            print(f"workbench: bridge registered: {name}", file=sys.stderr)


def print_plan(config: ModelConfig, card: Card, dtype: str) -> None:
    """What of the model fits the card's memory, one line on stderr."""
    from workbench.analysis.memory_plan import memory_plan

    print(f"workbench: card {card.name}: {memory_plan(config, card, dtype=dtype).in_words()}", file=sys.stderr)


def card_name(model: CausalLM) -> str | None:
    """The card that was rehearsed, for a result that would else pass for this machine's; None: none was."""
    return None if model.kernels.card is None else model.kernels.card.name


def print_rehearsed(model: CausalLM) -> None:
    """What the card's rules did to the products of the passes, one line; nothing where all ran as they came."""
    calls: dict[str, int] = {}
    for row in model.kernels.rehearsed:
        if row.outcome != "run":
            how = f"routed from {row.library}" if row.outcome == "route" else "cast"
            what = f"of {row.op} in {row.dtype} {how} to {row.to}"
            calls[what] = calls.get(what, 0) + row.calls
    parts = [f"{count} {what}" for what, count in calls.items()]
    if parts:
        name = model.kernels.card.name
        print(f"workbench: card {name}: products {', '.join(parts)}; `workbench rehearse` prices them", file=sys.stderr)


def print_assumptions(assumptions: Iterable[str]) -> None:
    """What a checkpoint's weights were taken for without being told (`Accounting.assumptions`)."""
    for assumption in assumptions:
        print(f"workbench: note: {assumption}", file=sys.stderr)


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
