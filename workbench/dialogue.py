"""Dialogues with one right reply: how they are stored, how a model's text is read, and when it is right.

>>> dialogues = read_dialogues("data/dialogues.jsonl")
>>> reply = parse_reply(text, dialogues[0].tools, thinking=dialogues[0].thinking)
>>> is_right(reply, dialogues[0].expected)

One JSON object a line: {id, kind, thinking, tools, messages, expected}, where `expected` is {"call": {"name",
"arguments"}} or {"answer": "..."}. A reply is what a model writes after the opening of the assistant's turn, without
the token that ends it, in the text form of Qwen3.5 and Qwen3-Coder:

    REASONING
    </think>

    CONTENT                                 with thinking on; off, the content alone

    <tool_call>
    <function=NAME>
    <parameter=NAME>
    VALUE
    </parameter>
    </function>
    </tool_call>                            a call, as content

White space around reasoning and content is layout. A value is text that the tool's schema gives a type: strings as they
stand, all others as JSON. Reading is strict: what a tolerant parser would complete or drop is wrong here, and so is a
value that holds a mark of a call, which has no one reading. vLLM's `qwen3_coder`, for one, takes a call without its
last mark and drops text after a call; well-formed replies it reads alike.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.errors import InputError

#: The project's own data; an installed package has none, its users pass the folder.
DATA = Path(__file__).resolve().parent.parent / "data"

#: What a dialogue asks of a model: an answer without tools, a call, an answer from a tool's result, a call or answer
#: that needs an earlier turn, an answer that no tool applies, a fact from far back.
KINDS = ("answer", "call", "result", "follow_up", "refuse", "recall")

ROLES = ("system", "user", "assistant", "tool")

_END_OF_REASONING = "</think>"
_CALL = re.compile(r"<tool_call>\s*<function=([^>\n]+)>(.*?)</function>\s*</tool_call>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>(.*?)</parameter>", re.DOTALL)
_CALL_MARKS = ("<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>")


@dataclass(frozen=True, slots=True)
class ExpectedCall:
    """The reply must be one call of the tool `name` with exactly these `arguments`, and no other text."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ExpectedAnswer:
    """The content of the reply must be exactly `text`, without a call."""

    text: str


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A conversation up to an assistant's turn, and what that turn must be.

    `kind` is one of KINDS, `tools` are function schemas {"type": "function", "function": {name, description,
    parameters}}, `messages` are chat messages whose last is not the assistant's; arguments of earlier calls in them are
    objects, not strings.
    """

    id: str
    kind: str
    thinking: bool
    tools: tuple[dict[str, Any], ...]
    messages: tuple[dict[str, Any], ...]
    expected: ExpectedCall | ExpectedAnswer

    def __post_init__(self) -> None:
        _expect(isinstance(self.id, str) and self.id, "id", "a name", self.id)
        _expect(self.kind in KINDS, "kind", f"one of {', '.join(KINDS)}", self.kind)
        _expect(isinstance(self.thinking, bool), "thinking", "true or false", self.thinking)
        for number, tool in enumerate(self.tools):
            _check_tool(f"tools[{number}]", tool)
        names = [tool["function"]["name"] for tool in self.tools]
        _expect(len(set(names)) == len(names), "tools", "each name once", names)
        _expect(len(self.messages) > 0, "messages", "at least one", self.messages)
        for number, message in enumerate(self.messages):
            _check_message(f"messages[{number}]", message)
        last = self.messages[-1]["role"]
        _expect(last in ("user", "tool"), "messages", "a user's or a tool's message as the last", last)
        if isinstance(self.expected, ExpectedCall):
            _expect(self.expected.name in names, "expected.call.name", f"one of the tools {names}", self.expected.name)
            fault = _unanswerable(self.expected, self.tools)
            _expect(fault is None, "expected.call.arguments", "values that a reply can give", fault)
        else:
            text = self.expected.text
            _expect(text and text == text.strip(), "expected.answer", "text without white space around it", text)
            _expect(not _marks(text), "expected.answer", "text without marks of a call", text)

    def to_json(self) -> dict[str, Any]:
        """The object of one line."""
        if isinstance(self.expected, ExpectedCall):
            expected = {"call": {"name": self.expected.name, "arguments": self.expected.arguments}}
        else:
            expected = {"answer": self.expected.text}
        return {
            "id": self.id, "kind": self.kind, "thinking": self.thinking, "tools": list(self.tools),
            "messages": list(self.messages), "expected": expected,
        }  # fmt: skip

    @classmethod
    def from_json(cls, row: Any) -> Dialogue:
        """The dialogue of one line's object. Raises InputError naming the field that is not as described above."""
        fields = set(cls.__dataclass_fields__)
        _expect(isinstance(row, dict), "dialogue", "a JSON object", row)
        _expect(set(row) == fields, "fields", sorted(fields), sorted(row))
        for name in ("tools", "messages"):
            _expect(isinstance(row[name], list), name, "a list", row[name])
        tools, messages = tuple(row["tools"]), tuple(row["messages"])
        return cls(row["id"], row["kind"], row["thinking"], tools, messages, _expected(row["expected"]))


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call that a reply holds, its arguments typed by the tool's schema."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """A model's turn in its parts. `reasoning` is None with thinking off; `problem` says what breaks the form."""

    reasoning: str | None
    content: str
    calls: tuple[Call, ...]
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one dialogue: the model's `text`, whether it is right, and the `problem` if it has one.

    `is_single` marks a reply that was computed by itself, because the batch it was in had logits that are not finite;
    `is_finite` is False where its own were not.
    """

    id: str
    kind: str
    thinking: bool
    text: str
    right: bool
    problem: str | None = None
    is_single: bool = False
    is_finite: bool = True

    @classmethod
    def of(cls, dialogue: Dialogue, reply: Reply, text: str, *, is_single: bool = False) -> Outcome:
        """The outcome of a reply whose turn ended; `text` is what to show of it."""
        right = is_right(reply, dialogue.expected)
        return cls(dialogue.id, dialogue.kind, dialogue.thinking, text, right, reply.problem, is_single)

    @classmethod
    def failed(
        cls, dialogue: Dialogue, text: str, problem: str, *, is_single: bool = False, is_finite: bool = True
    ) -> Outcome:
        """The outcome where there is no reply to judge."""
        return cls(dialogue.id, dialogue.kind, dialogue.thinking, text, False, problem, is_single, is_finite)


@dataclass(frozen=True, slots=True)
class DialogueScore:
    """`share` = `right` / `asked`; `by_kind` and `by_thinking` hold (right, asked) of each; `replies` each outcome."""

    share: float
    right: int
    asked: int
    by_kind: dict[str, tuple[int, int]]
    by_thinking: dict[bool, tuple[int, int]]
    replies: tuple[Outcome, ...]

    @classmethod
    def of(cls, outcomes: Iterable[Outcome]) -> DialogueScore:
        """The score of at least one outcome."""
        replies = tuple(outcomes)
        if not replies:
            raise InputError("dialogue score: expected at least one dialogue, found none")

        def count(chosen: Iterable[Outcome]) -> tuple[int, int]:
            rights = [outcome.right for outcome in chosen]
            return sum(rights), len(rights)

        kinds = [kind for kind in KINDS if any(outcome.kind == kind for outcome in replies)]
        by_kind = {kind: count(o for o in replies if o.kind == kind) for kind in kinds}
        modes = [mode for mode in (False, True) if any(outcome.thinking is mode for outcome in replies)]
        by_thinking = {mode: count(o for o in replies if o.thinking is mode) for mode in modes}
        right, asked = count(replies)
        return cls(right / asked, right, asked, by_kind, by_thinking, replies)

    def to_json(self) -> dict[str, Any]:
        """Plain values, every outcome included."""
        return {
            "share": self.share, "right": self.right, "asked": self.asked,
            "by_kind": {kind: list(pair) for kind, pair in self.by_kind.items()},
            "by_thinking": {"on" if mode else "off": list(pair) for mode, pair in self.by_thinking.items()},
            "replies": [dataclasses.asdict(outcome) for outcome in self.replies],
        }  # fmt: skip


def fixed_dialogues(n: int = 20, data: str | Path | None = None) -> list[Dialogue]:
    """The first `n`, 20 or 200, of `dialogues.jsonl` in the folder `data` (default: the one of the project)."""
    return _fixed("dialogues.jsonl", n, (20, 200), data)


def fixed_recalls(n: int = 20, data: str | Path | None = None) -> list[Dialogue]:
    """The first `n`, 20 or 100, of `recall.jsonl`: questions for a fact that stands 1500 tokens and more before."""
    return _fixed("recall.jsonl", n, (20, 100), data)


def read_dialogues(path: str | Path) -> list[Dialogue]:
    """Every dialogue of a JSONL file. Raises InputError with file, line and field; two of one id are refused."""
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}; expected one dialogue a line") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: expected UTF-8 text, found a wrong byte at position {error.start}") from None
    found: dict[str, Dialogue] = {}
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            dialogue = Dialogue.from_json(_strict_json(line))
            _expect(dialogue.id not in found, "id", "each once", dialogue.id)
        except json.JSONDecodeError as error:
            raise InputError(
                f"{path} line {number}: expected JSON, found at column {error.colno}: {error.msg}"
            ) from None
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
            raise InputError(f"{path} line {number}: expected JSON that can be read, found: {error}") from None
        except InputError as error:
            raise InputError(f"{path} line {number}: {error}") from None
        found[dialogue.id] = dialogue
    return list(found.values())


def parse_reply(text: str, tools: Sequence[Mapping[str, Any]], *, thinking: bool) -> Reply:
    """What a model wrote after the opening of its turn, without the token that ends the turn.

    Raises InputError for one of `tools` that is no function schema.
    """
    reasoning, body = None, text
    if thinking:
        reasoning, end, body = text.partition(_END_OF_REASONING)
        reasoning = reasoning.strip()
        if not end:
            return Reply(reasoning, "", (), f"reasoning: expected {_END_OF_REASONING} after it, found none")
    for number, tool in enumerate(tools):
        _check_tool(f"tools[{number}]", tool)
    schemas = _schemas(tools)
    calls, problems = [], []
    for match in _CALL.finditer(body):
        arguments, problem = _arguments(match[2], match[1], schemas)
        calls.append(Call(match[1], arguments))
        problems += [problem] if problem else []
    content = _CALL.sub("", body).strip()
    if broken := _marks(content):
        problems.append(f"call: expected a complete one, found {broken[0]} outside")
    return Reply(reasoning, content, tuple(calls), problems[0] if problems else None)


def is_right(reply: Reply, expected: ExpectedCall | ExpectedAnswer) -> bool:
    """Exactly the expected call and nothing else, or exactly the expected answer; the reasoning is free.

    Arguments are equal as JSON values: 5 and 5.0 are one number, true and 1 or "5" and 5 are not the same.
    """
    if reply.problem is not None:
        return False
    if isinstance(expected, ExpectedAnswer):
        return not reply.calls and reply.content == expected.text
    if len(reply.calls) != 1 or reply.content:
        return False
    call = reply.calls[0]
    return call.name == expected.name and _same_json(call.arguments, expected.arguments)


def _schemas(tools: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools}


def _unanswerable(expected: ExpectedCall, tools: Iterable[Mapping[str, Any]]) -> str | None:
    """Why no reply can have these arguments; None where the one that says them is read as right."""
    values = {key: v if isinstance(v, str) else json.dumps(v) for key, v in expected.arguments.items()}
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    found, problem = _arguments(body, expected.name, _schemas(tools))
    return problem or (None if _same_json(found, expected.arguments) else f"a reply is read as {found}")


def _marks(text: str) -> list[str]:
    return [mark for mark in _CALL_MARKS if mark in text]


def _arguments(body: str, name: str, schemas: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """(arguments of a call's body, the first problem or None)."""
    if name not in schemas:
        return {}, f"call: expected one of the tools {sorted(schemas)}, found {name!r}"
    properties = schemas[name].get("properties", {})
    arguments: dict[str, Any] = {}
    problem = None
    for key, value in _PARAMETER.findall(body):
        value = value.removeprefix("\n").removesuffix("\n")
        where = f"call of {name}: parameter {key}"
        if key in arguments:
            problem = problem or f"{where}: expected once, found twice"
        elif inside := _marks(value):
            problem = problem or f"{where}: expected a value without marks of a call, found {inside[0]} in it"
            arguments[key] = value
        elif key not in properties:
            problem = problem or f"{where}: expected one of {sorted(properties)}"
            arguments[key] = value
        else:
            arguments[key], fault = _typed(value, properties[key].get("type", "string"))
            problem = problem or (fault and f"{where}: {fault}")
    rest = _PARAMETER.sub("", body).strip()
    if rest:
        problem = problem or f"call of {name}: expected parameters only, found {rest[:40]!r}"
    return arguments, problem


_IS_TYPE = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}


def _typed(value: str, kinds: str | list[str]) -> tuple[Any, str | None]:
    """(value as the schema's type, None), or (the text, what is wrong). A string is the last choice among several."""
    kinds = [kinds] if isinstance(kinds, str) else kinds
    others = [kind for kind in kinds if kind != "string"]
    if others:
        try:
            parsed = _strict_json(value)
        except (ValueError, RecursionError):
            parsed = _NOTHING
        if any(_IS_TYPE[kind](parsed) for kind in others):
            return parsed, None
    if "string" in kinds:
        return value, None
    return value, f"expected {' or '.join(others)}, found {value[:40]!r}"


_NOTHING = object()


def _strict_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError, or RecursionError for one that is nested too deeply.

    Python's own reader takes NaN and Infinity, makes an infinity of 1e400 and keeps the last of two equal keys.
    """
    return json.loads(
        text, parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_object_without_duplicates
    )


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} is past the range of a number")
    return value


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"one key twice among {[key for key, _ in pairs]}")
    return found


def _same_json(a: Any, b: Any) -> bool:
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same_json(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same_json, a, b))
    return a == b


def _fixed(name: str, n: int, sizes: tuple[int, ...], data: str | Path | None) -> list[Dialogue]:
    if type(n) is not int or n not in sizes:
        raise InputError(f"{name}: expected one of the fixed subsets of {' or '.join(map(str, sizes))}, found {n}")
    path = (DATA if data is None else Path(data)) / name
    found = read_dialogues(path)
    if len(found) < n:
        raise InputError(f"{path}: expected at least {n} dialogues, found {len(found)}")
    return found[:n]


def _expect(condition: object, where: str, expected: object, found: object) -> None:
    if not condition:
        raise InputError(f"{where}: expected {expected}, found {str(found)[:80]!r}")


_NAME = "text without line breaks, > and white space around it"
_OTHER_TYPES = frozenset(("anyOf", "oneOf", "allOf", "not", "$ref", "enum", "const"))


def _is_name(name: str) -> bool:
    """Whether a call can hold it."""
    return re.fullmatch(r"[^>\n\r]+", name) is not None and name == name.strip()


def _check_tool(where: str, tool: Any) -> None:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    is_named = isinstance(function, dict) and isinstance(function.get("name"), str)
    _expect(is_named, where, 'a function schema {"type": "function", "function": {"name", ...}}', tool)
    _expect(_is_name(function["name"]), f"{where}.function.name", _NAME, function["name"])
    parameters = function.get("parameters", {})
    properties = parameters.get("properties", {}) if isinstance(parameters, dict) else None
    _expect(isinstance(properties, dict), f"{where}.function.parameters", "a JSON schema of an object", parameters)
    for name, schema in properties.items():
        _expect(_is_name(name), f"{where}.function.parameters", f"names, each {_NAME}", name)
        kinds = schema.get("type", "string") if isinstance(schema, dict) else None
        kinds = [kinds] if isinstance(kinds, str) else kinds
        # Without a type a value is text; a schema that gives the type in another way would be read wrongly.
        is_known = isinstance(kinds, list) and kinds and all(kind in ("string", *_IS_TYPE) for kind in kinds)
        is_known = is_known and ("type" in schema or not _OTHER_TYPES & set(schema))
        _expect(is_known, f"{where}.function.parameters.{name}", "a schema with a JSON type", schema)


def _check_message(where: str, message: Any) -> None:
    role = message.get("role") if isinstance(message, dict) else None
    _expect(role in ROLES, where, f"a message with a role of {', '.join(ROLES)}", message)
    _expect(isinstance(message.get("content", ""), str), f"{where}.content", "a string", message.get("content"))
    calls = message.get("tool_calls", [])
    _expect(isinstance(calls, list), f"{where}.tool_calls", "a list", calls)
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        is_call = isinstance(function, dict) and isinstance(function.get("name"), str)
        is_call = is_call and isinstance(function.get("arguments"), dict)
        _expect(is_call, f"{where}.tool_calls", '{"function": {"name", "arguments": {...}}}', call)


def _expected(row: Any) -> ExpectedCall | ExpectedAnswer:
    shape = '{"call": {"name", "arguments"}} or {"answer": "..."}'
    _expect(isinstance(row, dict) and len(row) == 1, "expected", shape, row)
    answer, call = row.get("answer"), row.get("call")
    if isinstance(answer, str):
        return ExpectedAnswer(answer)
    is_call = isinstance(call, dict) and set(call) == {"name", "arguments"}
    is_call = is_call and isinstance(call["name"], str) and isinstance(call["arguments"], dict)
    _expect(is_call, "expected", shape, row)
    return ExpectedCall(call["name"], call["arguments"])
