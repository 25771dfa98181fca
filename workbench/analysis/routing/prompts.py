"""Prompts to record: the routing corpus, and files of texts, chats and token ids."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.analysis.routing.record import RoutingPrompt, check_ids
from workbench.dialogue import ROLES
from workbench.errors import InputError

if TYPE_CHECKING:
    from workbench.tokenizer import Tokenizer

#: Kinds of text in the routing corpus.
KINDS = ("prose", "code", "chat", "repeated")

#: What `read_prompts` takes, as messages name it.
EXPECTED = 'token ids, {"messages": [...]}, {"text": ...} or {"kind", "title", "text"}'


@dataclass(frozen=True, slots=True)
class RoutingText:
    """One text of the routing corpus; `kind` is one of `KINDS`."""

    kind: str
    title: str
    text: str


def read_routing_texts(path: str | Path) -> list[RoutingText]:
    """The routing corpus, one {"kind", "title", "text"} a line. Raises InputError naming the line that is not one."""
    found = []
    for number, line in enumerate(_text(Path(path), "a JSONL file").split("\n"), start=1):
        if not line:
            continue
        try:
            text = RoutingText(**json.loads(line))
            if not isinstance(text.title, str) or not isinstance(text.text, str):
                raise TypeError
        except (ValueError, RecursionError, TypeError):
            raise InputError(
                f"{path} line {number}: expected {{kind, title, text}} as JSON, found {line[:40]!r}"
            ) from None
        if text.kind not in KINDS:
            raise InputError(f"{path} line {number}: kind: expected one of {', '.join(KINDS)}, found {text.kind!r}")
        found.append(text)
    return found


def read_prompts(
    path: str | Path, tokenizer: Callable[[], Tokenizer], *, vocabulary: int | None = None
) -> list[RoutingPrompt]:
    """The prompts of a file, by its name: `.jsonl` has one a line, `.json` one or a list of them, any other is a text.

    A prompt in JSON is a list of token ids; {"messages": [...]} with "tools" and "thinking" where there are any, put
    into the checkpoint's chat template; or {"text": ...} with "kind" and "title" where there are any. `tokenizer` is
    called when the first text comes; `vocabulary` is the number of ids that the model knows, None for any. Raises
    InputError with file and line for anything else, and for a prompt that is both a text and a chat.
    """
    path = Path(path)
    text = _text(path, "a text")
    if path.suffix == ".jsonl":
        rows = [(f"{path} line {n}", line) for n, line in enumerate(text.split("\n"), start=1) if line.strip()]
        found = [
            _prompt(where, _json(where, line), tokenizer, vocabulary, f"{path.name} line {where.rpartition(' ')[2]}")
            for where, line in rows
        ]
    elif path.suffix == ".json":
        value = _json(str(path), text)
        values = value if _is_list_of_prompts(value) else [value]
        found = [
            _prompt(f"{path} [{n}]" if len(values) > 1 else str(path), item, tokenizer, vocabulary,
                    f"{path.name} [{n}]")
            for n, item in enumerate(values)
        ]
    else:
        found = [text_prompt(text, tokenizer(), title=path.name, where=str(path))]
    if not found:
        raise InputError(f"{path}: expected at least one prompt, found none")
    return found


def text_prompt(text: str, tokenizer: Tokenizer, *, title: str, kind: str = "text", where: str) -> RoutingPrompt:
    """The prompt of a text. Raises InputError, beginning with `where`, for one without tokens."""
    try:
        ids = tuple(tokenizer.encode(text))
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    if not ids or not text.strip():
        raise InputError(f"{where}: expected some text, found none")
    return RoutingPrompt(ids, kind, title)


def _is_list_of_prompts(value: Any) -> bool:
    """Whether a JSON value is a list of prompts: not one of token ids, and not the messages of one chat."""
    return isinstance(value, list) and all(
        isinstance(item, list) or (isinstance(item, dict) and "role" not in item) for item in value
    )


def _prompt(
    where: str, value: Any, tokenizer: Callable[[], Tokenizer], vocabulary: int | None, title: str
) -> RoutingPrompt:
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        check_ids(value, vocabulary, where)
        return RoutingPrompt(tuple(value), "ids", title)
    if isinstance(value, list) and value and all(isinstance(item, dict) and "role" in item for item in value):
        value = {"messages": value}
    if isinstance(value, dict) and "messages" in value and "text" in value:
        raise InputError(f"{where}: expected messages or text, found both; leave one out")
    if isinstance(value, dict) and isinstance(value.get("messages"), list):
        tools, thinking = value.get("tools"), value.get("thinking")
        _check_chat(where, value["messages"], tools, thinking)
        try:
            text = tokenizer().apply_chat_template(value["messages"], tools=tools or None, enable_thinking=thinking)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
        return text_prompt(text, tokenizer(), title=str(value.get("id", title)), kind="chat", where=where)
    if isinstance(value, dict) and isinstance(value.get("text"), str):
        kind, name = value.get("kind", "text"), value.get("title", title)
        if isinstance(kind, str) and isinstance(name, str):
            return text_prompt(value["text"], tokenizer(), title=name, kind=kind, where=where)
    raise InputError(f"{where}: expected {EXPECTED}, found {json.dumps(value)[:60]}")


def _check_chat(where: str, messages: list, tools: Any, thinking: Any) -> None:
    """Raises InputError for what no chat template is to see: other roles, no content, tools that are no objects."""
    if not (tools is None or (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools))):
        raise InputError(f"{where}: tools: expected a list of objects, found {json.dumps(tools)[:60]}")
    if not (thinking is None or isinstance(thinking, bool)):
        raise InputError(f"{where}: thinking: expected true or false, found {json.dumps(thinking)[:60]}")
    if not messages:
        raise InputError(f"{where}: messages: expected at least one, found none")
    for number, message in enumerate(messages):
        place = f"{where}: messages[{number}]"
        if not isinstance(message, dict):
            raise InputError(f"{place}: expected an object, found {json.dumps(message)[:60]}")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise InputError(f"{place}: role: expected one of {', '.join(ROLES)}, found {json.dumps(role)[:60]}")
        has_content = isinstance(content, str) or (isinstance(content, list) and content)
        if not has_content and not (content is None and role == "assistant" and message.get("tool_calls")):
            raise InputError(f"{place}: content: expected text, found {json.dumps(content)[:60]}")


def _json(where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: expected JSON, found: {error}") from None


def _text(path: Path, expected: str) -> str:
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors on Windows put a mark first that is no text
    except (OSError, UnicodeDecodeError) as error:
        found = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(f"{path}: expected {expected} in UTF-8, found: {found}") from None
    if "\0" in text:
        raise InputError(f"{path}: expected text, found a zero byte at position {text.index(chr(0))}")
    return text
