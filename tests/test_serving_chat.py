"""Dialogues through a chat server: what is asked, what counts as right, and every way a server fails."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from fake_chat_server import chat_server, completion

from workbench.dialogue import Dialogue, ExpectedAnswer, ExpectedCall
from workbench.errors import InputError, ServerError
from workbench.serving.chat import ChatServer, served_score

TIMER = {
    "type": "function",
    "function": {"name": "set_timer", "parameters": {"type": "object", "properties": {"minutes": {"type": "integer"}}}},
}
EARLIER = (
    {"role": "user", "content": "A timer for five minutes."},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "set_timer", "arguments": {"minutes": 5}}}],
    },
    {"role": "tool", "content": "set", "tool_call_id": "call_1"},
    {"role": "user", "content": "The same again."},
)
CALL = Dialogue("again", "follow_up", True, (TIMER,), EARLIER, ExpectedCall("set_timer", {"minutes": 5}))
ANSWER = Dialogue("hello", "answer", False, (), ({"role": "user", "content": "Hello"},), ExpectedAnswer("Hello."))
RIGHT = completion(reasoning="Again five.\n", content="\n\n", calls=[("set_timer", '{"minutes": 5}')])


def score(answer, dialogues, **options):
    with chat_server(answer) as (url, requests):
        return served_score(ChatServer(url), dialogues, **options), requests


def test_a_request_carries_the_dialogue_as_the_api_has_it():
    found, requests = score(lambda body: RIGHT if "tools" in body else completion("Hello."), [CALL, ANSWER])
    assert found.share == 1.0
    bodies = {len(body["messages"]): body for path, body in requests if path == "/v1/chat/completions"}
    again, hello = bodies[4], bodies[1]
    assert again["model"] == "miniature" and again["temperature"] == 0.0
    assert again["tools"] == [TIMER] and again["tool_choice"] == "auto"
    assert again["chat_template_kwargs"] == {"enable_thinking": True}
    (call,) = again["messages"][1]["tool_calls"]
    assert call["id"] == "call_1" and json.loads(call["function"]["arguments"]) == {"minutes": 5}
    assert "tools" not in hello and "tool_choice" not in hello
    assert hello["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (completion(calls=[("set_timer", '{"minutes": "5"}')]), None),
        (completion(calls=[("set_timer", '{"minutes": 5, "seconds": 0}')]), None),
        (completion(calls=[("set_timer", "{}")]), None),
        (completion(calls=[("set_timer", '{"minutes": 5}')] * 2), None),
        (completion("Sure.", calls=[("set_timer", '{"minutes": 5}')]), None),
        (completion(calls=[("timer", '{"minutes": 5}')]), None),
        (completion(calls=[("set_timer", '{"minutes": ')]), "expected arguments as a JSON object"),
        (completion(calls=[("set_timer", "[5]")]), "expected arguments as a JSON object"),
        (completion(calls=[("set_timer", '{"minutes": 5}')], reason="length"), "expected an end, found none in 192"),
        (completion(calls=[("set_timer", "[" * 100_000)]), "expected arguments as a JSON object"),
        (completion(calls=[("set_timer", '{"minutes": ' + "5" * 6000 + "}")]), "expected arguments as a JSON object"),
        (RIGHT | {"choices": [RIGHT["choices"][0] | {"finish_reason": "abort"}]}, "finish_reason: expected stop or"),
        (RIGHT | {"choices": [RIGHT["choices"][0] | {"finish_reason": None}]}, "finish_reason: expected stop or"),
        (completion("Done."), None),
        (completion(), None),
    ],
)
def test_a_wrong_reply_is_wrong(answer, problem):
    (outcome,) = score(lambda body: answer, [CALL])[0].replies
    assert not outcome.right
    assert (outcome.problem is None) if problem is None else (problem in outcome.problem)


def test_reasoning_under_its_older_name_is_shown():
    answer = completion("Hello.")
    answer["choices"][0]["message"] |= {"reasoning": None, "reasoning_content": "A greeting."}
    (outcome,) = score(lambda body: answer, [ANSWER])[0].replies
    assert outcome.right and json.loads(outcome.text) == {"reasoning": "A greeting.", "content": "Hello."}


def test_replies_keep_the_order_of_the_dialogues_and_requests_run_at_once():
    together = threading.Barrier(4, timeout=10)  # breaks, and so fails, unless four requests are there at once

    def answer(body):
        together.wait()
        return completion("Hello." if "1" in body["messages"][0]["content"] else "No.")

    dialogues = [
        Dialogue(f"d{n}", "answer", False, (), ({"role": "user", "content": str(n)},), ExpectedAnswer("Hello."))
        for n in range(4)
    ]
    lines = []
    found, _ = score(answer, dialogues, parallel=4, progress=lines.append)
    assert [(outcome.id, outcome.right) for outcome in found.replies] == [
        ("d0", False), ("d1", True), ("d2", False), ("d3", False)
    ]  # fmt: skip
    assert lines == ["4 of 4 dialogues, 1 right"]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ((400, {"error": {"message": "maximum context length is 8"}}), "HTTP 400 Bad Request: maximum context length"),
        ((404, {"message": "no such model"}), "HTTP 404 Not Found: no such model"),
        ((500, b"Internal\nServer Error"), "HTTP 500 Internal Server Error: Internal Server Error"),
        ((503, b""), "HTTP 503 Service Unavailable: no reason given"),
        (b"<html>", "expected a JSON object, found other text"),
        (b"\xff\xfe", "expected a JSON object, found other text"),
        (b"[" * 100_000, "expected a JSON object, found other text"),
        (b"[1]", "expected a JSON object, found '[1]'"),
        ({"choices": []}, "dialogue again: expected a chat completion with choices"),
        ({"choices": [{"message": "Hi", "finish_reason": "stop"}]}, "dialogue again: expected a chat completion"),
        ({"choices": [{"message": {}}]}, "KeyError: 'finish_reason'"),
        (completion(calls=[("set_timer", {"minutes": 5})]), "dialogue again: expected a chat completion"),
    ],
)
def test_a_server_that_fails_ends_the_score_with_one_line(answer, expected):
    with pytest.raises(ServerError) as caught:
        score(lambda body: answer, [CALL])
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_a_server_that_is_not_there_is_named():
    with chat_server(lambda body: {}) as (url, _):
        pass
    with pytest.raises(ServerError, match=f"{url}/v1/models: cannot be reached: .*refused.*; is it running"):
        served_score(ChatServer(url), [CALL])


def test_an_answer_that_takes_too_long_is_an_error():
    gone = threading.Event()
    with pytest.raises(ServerError, match=r"expected an answer within 0\.2 s, found none"):
        with chat_server(lambda body: gone.wait(10) and {}) as (url, _):
            try:
                ChatServer(url, timeout_s=0.2).ask(CALL, "miniature")
            finally:
                gone.set()


def test_several_models_need_a_name():
    with chat_server(lambda body: RIGHT, models=("a", "b")) as (url, requests):
        with pytest.raises(InputError, match="expected the name of one of its models, a, b; found none"):
            served_score(ChatServer(url), [CALL])
        assert served_score(ChatServer(url), [CALL], model="b").share == 1.0
        assert requests[0][1]["model"] == "b"


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8000", "file:///etc/passwd", "http://", "", "http://:8000", "http://[::1", "http://host:port",
        "http://host:99999", "http://host:8000/v1", "http://host:8000/v1/",
    ],
)  # fmt: skip
def test_only_http_addresses_are_taken(url):
    with pytest.raises(InputError, match="url: expected http://host:port"):
        ChatServer(url)


def test_asking_a_server_needs_no_torch():
    check = "import sys, workbench.serving.chat; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], cwd=Path(__file__).parent.parent).returncode == 0
