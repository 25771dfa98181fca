"""Dialogues: the file's form, reading a model's text, and what counts as right."""

import copy
import json

import pytest

from workbench.dialogue import (
    Call,
    Dialogue,
    ExpectedAnswer,
    ExpectedCall,
    Reply,
    is_right,
    parse_reply,
    read_dialogues,
)
from workbench.errors import InputError

PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "limit": {"type": "number"},
    "metric": {"type": "boolean"},
    "hours": {"type": "array", "items": {"type": "integer"}},
    "options": {"type": "object"},
    "note": {"type": ["string", "null"]},
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": PROPERTIES, "required": ["city"]},
    },
}
TOOLS = (WEATHER,)


def call_text(*parameters: tuple[str, str], name: str = "get_weather") -> str:
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


ROW = {
    "id": "call-001",
    "kind": "call",
    "thinking": True,
    "tools": [WEATHER],
    "messages": [{"role": "user", "content": "Weather in Ulm for 3 days?"}],
    "expected": {"call": {"name": "get_weather", "arguments": {"city": "Ulm", "days": 3}}},
}
EXPECTED = ExpectedCall("get_weather", {"city": "Ulm", "days": 3})
RIGHT = call_text(("city", "Ulm"), ("days", "3"))


def judge(text: str, expected=EXPECTED, *, thinking: bool = False) -> bool:
    return is_right(parse_reply(text, TOOLS, thinking=thinking), expected)


def test_a_right_call_with_and_without_reasoning():
    assert judge(RIGHT)
    assert judge(f"The user wants Ulm.\n</think>\n\n{RIGHT}", thinking=True)
    reply = parse_reply(f"The user wants Ulm.\n</think>\n\n{RIGHT}", TOOLS, thinking=True)
    assert reply == Reply("The user wants Ulm.", "", (Call("get_weather", {"city": "Ulm", "days": 3}),))


def test_the_order_of_parameters_is_free():
    assert judge(call_text(("days", "3"), ("city", "Ulm")))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (call_text(("city", "Ulm"), ("days", "three")), "parameter days: expected integer, found 'three'"),
        (call_text(("city", "Ulm"), ("days", '"3"')), "parameter days: expected integer"),
        (call_text(("city", "Ulm"), ("days", "3.0")), "parameter days: expected integer"),
        (call_text(("city", "Ulm"), ("days", "true")), "parameter days: expected integer"),
        (call_text(("city", "Ulm"), ("days", "4")), None),
        (call_text(("city", "ulm"), ("days", "3")), None),
        (call_text(("city", '"Ulm"'), ("days", "3")), None),
        (call_text(("city", "Ulm")), None),
        (call_text(("city", "Ulm"), ("days", "3"), ("metric", "true")), None),
        (call_text(("city", "Ulm"), ("days", "3"), ("town", "Ulm")), "parameter town: expected one of"),
        (call_text(("city", "Ulm"), ("days", "3"), ("days", "3")), "parameter days: expected once, found twice"),
        (call_text(("city", "Ulm"), ("days", "3"), name="weather"), "expected one of the tools ['get_weather']"),
        (f"{RIGHT}\n{RIGHT}", None),
        (f"Let me look. {RIGHT}", None),
        (f"{RIGHT}\nDone.", None),
        (RIGHT.removesuffix("</tool_call>"), "expected a complete one, found <tool_call> outside"),
        (RIGHT.replace("</function>", ""), "expected a complete one"),
        (RIGHT.replace("</parameter>\n</function>", "</function>"), "expected parameters only"),
        (RIGHT.replace("<parameter=days>", "for <parameter=days>"), "expected parameters only, found 'for'"),
        ("It is sunny.", None),
        ("", None),
    ],
)
def test_a_wrong_call_is_wrong_and_a_broken_form_is_named(text, problem):
    reply = parse_reply(text, TOOLS, thinking=False)
    assert not is_right(reply, EXPECTED)
    assert (reply.problem is None) if problem is None else (problem in reply.problem)


def test_values_have_the_type_of_the_schema():
    reply = parse_reply(
        call_text(
            ("city", "7"), ("days", "7"), ("limit", "2.5"), ("metric", "false"), ("hours", "[6, 18]"),
            ("options", '{"wind": true}'), ("note", "null"),
        ),
        TOOLS, thinking=False,
    )  # fmt: skip
    assert reply.problem is None
    expected = {"city": "7", "days": 7, "limit": 2.5, "metric": False, "hours": [6, 18], "options": {"wind": True}}
    assert reply.calls[0].arguments == expected | {"note": None}
    assert type(reply.calls[0].arguments["metric"]) is bool


def test_a_string_keeps_its_lines_but_for_the_layout():
    reply = parse_reply(call_text(("city", "Ulm \n\nBonn\n")), TOOLS, thinking=False)
    assert reply.calls[0].arguments == {"city": "Ulm \n\nBonn\n"}


def test_json_constants_that_python_alone_knows_are_no_numbers():
    reply = parse_reply(call_text(("city", "Ulm"), ("limit", "NaN")), TOOLS, thinking=False)
    assert "expected number, found 'NaN'" in reply.problem


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("hours", "[" * 5000, "expected array"),
        ("days", "1" * 6000, "expected integer"),
        ("limit", "1e400", "expected number"),
        ("options", '{"wind": 1, "wind": 2}', "expected object"),
        ("options", '{"wind": NaN}', "expected object"),
        *(("city", f"Ulm {mark} Bonn", mark) for mark in ("<tool_call>", "<function=f>", "<parameter=days>")),
        *(("city", f"Ulm {mark} Bonn", mark) for mark in ("</tool_call>", "</function>")),
    ],
)
def test_a_value_that_readers_would_take_in_several_ways_is_a_problem(key, value, problem):
    reply = parse_reply(call_text((key, value)), TOOLS, thinking=False)
    assert problem.rstrip(">").split("=")[0] in reply.problem and reply.calls[0].arguments == {key: value}


def test_tools_that_are_no_schemas_are_refused_when_a_reply_is_read():
    for tool in ({}, {"type": "function", "function": {"name": "f", "parameters": None}}):
        with pytest.raises(InputError, match=r"tools\[1\].*: expected a"):
            parse_reply(RIGHT, (WEATHER, tool), thinking=False)


@pytest.mark.parametrize(
    ("expected", "found", "same"),
    [(1, 1.0, True), (1, True, False), (0, False, False), ([1], [1, 1], False), ([True], [1], False), (None, 0, False)],
)
def test_arguments_are_equal_as_json_values(expected, found, same):
    reply = Reply(None, "", (Call("get_weather", {"x": {"y": found}}),))
    assert is_right(reply, ExpectedCall("get_weather", {"x": {"y": expected}})) is same


@pytest.mark.parametrize(
    ("text", "thinking", "right"),
    [
        ("It is sunny.", False, True),
        ("\n\nIt is sunny.\n", False, True),
        ("Look.\n</think>\n\nIt is sunny.", True, True),
        ("\n</think>\n\nIt is sunny.", True, True),
        ("It is sunny.", True, False),  # never stopped thinking
        ("Look.\n</think>\n\nIt is sunny.", False, False),
        ("It is sunny. Always.", False, False),
        ("it is sunny.", False, False),
        (f"It is sunny.\n{RIGHT}", False, False),
        ("", False, False),
    ],
)
def test_an_answer_is_right_when_its_text_is(text, thinking, right):
    assert judge(text, ExpectedAnswer("It is sunny."), thinking=thinking) is right


def test_reasoning_without_end_is_named():
    reply = parse_reply("So I think", TOOLS, thinking=True)
    assert reply.reasoning == "So I think" and "expected </think> after it" in reply.problem


def test_a_call_inside_the_reasoning_is_no_call():
    assert not judge(f"{RIGHT}\n</think>\n\nDone.", thinking=True)


def test_a_dialogue_survives_its_file(tmp_path):
    answer = ROW | {"id": "answer-001", "kind": "answer", "tools": [], "expected": {"answer": "Grüß Gott."}}
    file = tmp_path / "dialogues.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in (ROW, answer)), encoding="utf-8")
    first, second = read_dialogues(file)
    assert first.expected == EXPECTED and second.expected == ExpectedAnswer("Grüß Gott.")
    assert [first.to_json(), second.to_json()] == [ROW, answer]
    assert Dialogue.from_json(first.to_json()) == first


def changed(path: str, value) -> dict:
    row = copy.deepcopy(ROW)
    *parents, last = path.split(".")
    target = row
    for name in parents:
        target = target[int(name)] if name.isdecimal() else target[name]
    target[last] = value
    return row


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([], "expected a JSON object"),
        ({"id": "x"}, "fields: expected ['expected', 'id', "),
        (changed("id", ""), "id: expected a name"),
        (changed("kind", "chat"), "kind: expected one of answer, call"),
        (changed("thinking", 1), "thinking: expected true or false"),
        (changed("tools", {}), "tools: expected a list"),
        (changed("tools", [WEATHER, WEATHER]), "tools: expected each name once"),
        (changed("tools.0.type", "tool"), "tools[0]: expected a function schema"),
        (changed("tools.0.function.parameters.properties", []), "expected a JSON schema of an object"),
        (changed("tools.0.function.parameters.properties.city.type", "str"), "parameters.city: expected a schema"),
        *((changed("tools.0.function.name", name), "name: expected text without") for name in ("", "a>b", "a\nb", " ")),
        (changed("tools.0.function.parameters.properties.a>b", {}), "parameters: expected names, each text without"),
        (
            changed("tools.0.function.parameters.properties.city", {"anyOf": [{"type": "integer"}, {"type": "null"}]}),
            "parameters.city: expected a schema with a JSON type",
        ),
        (changed("messages", []), "messages: expected at least one"),
        (changed("messages.0.tool_calls", None), "messages[0].tool_calls: expected a list, found 'None'"),
        (changed("messages.0.role", "human"), "messages[0]: expected a message with a role"),
        (changed("messages.0.role", "assistant"), "expected a user's or a tool's message as the last"),
        (changed("messages.0.content", 1), "messages[0].content: expected a string"),
        (changed("messages.0.tool_calls", [{"function": {"name": "f", "arguments": "{}"}}]), "messages[0].tool_calls"),
        (changed("expected", {}), "expected: expected"),
        (changed("expected", {"answer": 1}), "expected: expected"),
        (changed("expected", {"answer": "a "}), "expected.answer: expected text without white space"),
        (changed("expected.call", {"name": "f"}), "expected: expected"),
        (changed("expected.call.name", "f"), "expected.call.name: expected one of the tools ['get_weather']"),
        (changed("expected.call.arguments", {"town": "Ulm"}), "arguments: expected values that a reply can give"),
        (changed("expected.call.arguments", {"days": "3"}), "a reply is read as {'days': 3}"),
        (changed("expected.call.arguments", {"days": 3.5}), "parameter days: expected integer"),
        (changed("expected.call.arguments", {"city": "a</parameter>"}), "expected parameters only"),
        (changed("expected.call.arguments", {"city": "a<function=b>"}), "expected a value without marks of a call"),
        (changed("expected", {"answer": "Write <tool_call>."}), "expected.answer: expected text without marks"),
    ],
)
def test_a_line_of_another_form_is_refused_by_file_line_and_field(tmp_path, row, expected):
    file = tmp_path / "dialogues.jsonl"
    file.write_text(json.dumps(ROW) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(InputError) as caught:
        read_dialogues(file)
    assert f"{file} line 2: " in str(caught.value) and expected in str(caught.value)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"{", "line 1: expected JSON, found at column 2"),
        (b"[" * 100_000, "line 1: expected JSON that can be read, found: maximum recursion depth"),
        (b'{"id": ' + b"1" * 6000 + b"}", "line 1: expected JSON that can be read, found: Exceeds the limit"),
        (b'{"id": NaN}', "line 1: expected JSON that can be read, found: NaN is no JSON"),
        (b'{"id": 1, "id": 2}', "line 1: expected JSON that can be read, found: one key twice"),
        (b"\xff", "expected UTF-8 text"),
        (json.dumps(ROW).encode() + b"\n" + json.dumps(ROW).encode(), "line 2: id: expected each once"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path, content, expected):
    file = tmp_path / "dialogues.jsonl"
    file.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_dialogues(file)
    assert expected in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match="cannot be read: No such file"):
        read_dialogues(tmp_path / "none.jsonl")
