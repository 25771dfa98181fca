"""Dialogues through an OpenAI-compatible chat server, whose own parsers read calls and reasoning.

>>> server = ChatServer("http://127.0.0.1:8000")
>>> served_score(server, fixed_dialogues(20)).share

The server applies the checkpoint's chat template and must have its tool and reasoning parsers on; for vLLM these are
`--enable-auto-tool-choice --tool-call-parser qwen3_coder --reasoning-parser qwen3`. Needs no torch.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from workbench.dialogue import Call, Dialogue, DialogueScore, Outcome, Reply
from workbench.errors import InputError, ServerError

#: As the workbench's own scores allow; a reply that is not over by then is wrong.
MAX_NEW_TOKENS = 192

#: How a server says that the model ended its turn by itself.
ENDS = ("stop", "tool_calls")


@dataclass(frozen=True, slots=True)
class ChatServer:
    """Where a server listens (`http://host:port`, without `/v1`), and how many seconds one answer may take."""

    url: str
    timeout_s: float = 120.0

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # half a bracket, a port that is no number
            is_address = False
        if not is_address or parts.path.rstrip("/").endswith("/v1"):
            raise InputError(f"url: expected http://host:port, without /v1, found {self.url!r}")

    def model_names(self) -> list[str]:
        """Names of the models that are served. Raises ServerError as `ask` does."""
        answer = self._exchange("/v1/models", None)
        rows = answer.get("data")
        names = [row.get("id") for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
        if not names or not all(isinstance(name, str) for name in names):
            raise ServerError(f"{self.url}/v1/models: expected a list of models, found {str(answer)[:80]!r}")
        return names

    def ask(self, dialogue: Dialogue, model: str, *, max_new_tokens: int = MAX_NEW_TOKENS) -> Outcome:
        """The greedy reply to one dialogue, judged.

        Raises ServerError where the server cannot be reached, does not answer in time, refuses the request (HTTP 4xx
        and 5xx), or answers in another form than chat completions.
        """
        answer = self._exchange("/v1/chat/completions", request_body(dialogue, model, max_new_tokens))
        try:
            choice = answer["choices"][0]
            message, reason = choice["message"], choice["finish_reason"]
            reply, text = read_message(message)
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise ServerError(
                f"{self.url}: dialogue {dialogue.id}: expected a chat completion with choices, message and "
                f"finish_reason, found {str(answer)[:120]!r} ({type(error).__name__}: {error})"
            ) from None
        if reason == "length":
            return Outcome.failed(dialogue, text, f"expected an end, found none in {max_new_tokens} tokens")
        if reason not in ENDS:
            return Outcome.failed(dialogue, text, f"finish_reason: expected {' or '.join(ENDS)}, found {reason!r}")
        return Outcome.of(dialogue, reply, text)

    def _exchange(self, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        url = self.url.rstrip("/") + path
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as response:
                answer = json.loads(response.read())
        except urllib.error.HTTPError as error:
            with error:
                said = _message(error.read())
            raise ServerError(f"{url}: HTTP {error.code} {error.reason}: {said}") from None
        except (TimeoutError, urllib.error.URLError, http.client.HTTPException, ConnectionError) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                raise ServerError(f"{url}: expected an answer within {self.timeout_s:g} s, found none") from None
            raise ServerError(f"{url}: cannot be reached: {reason or type(error).__name__}; is it running?") from None
        except (ValueError, RecursionError):  # neither UTF-8 nor JSON that can be read
            raise ServerError(f"{url}: expected a JSON object, found other text") from None
        if not isinstance(answer, dict):
            raise ServerError(f"{url}: expected a JSON object, found {str(answer)[:80]!r}")
        return answer


def served_score(
    server: ChatServer,
    dialogues: Sequence[Dialogue],
    *,
    model: str | None = None,
    max_new_tokens: int = MAX_NEW_TOKENS,
    parallel: int = 8,
    progress: Callable[[str], None] | None = None,
) -> DialogueScore:
    """`quality.dialogue_score` of a served model, `parallel` requests at a time.

    `model` None takes the only one that is served. The first request that fails ends the score with its ServerError:
    a share of the dialogues that happened to get through would be no score.
    """
    names = server.model_names()
    if model is None and len(names) > 1:
        raise InputError(f"{server.url}: expected the name of one of its models, {', '.join(names)}; found none")
    chosen = names[0] if model is None else model
    outcomes: list[Outcome] = []
    pool = ThreadPoolExecutor(parallel)
    try:
        for outcome in pool.map(lambda d: server.ask(d, chosen, max_new_tokens=max_new_tokens), dialogues):
            outcomes.append(outcome)
            if progress is not None and (len(outcomes) % 20 == 0 or len(outcomes) == len(dialogues)):
                right = sum(outcome.right for outcome in outcomes)
                progress(f"{len(outcomes)} of {len(dialogues)} dialogues, {right} right")
    finally:
        pool.shutdown(cancel_futures=True)
    return DialogueScore.of(outcomes)


def request_body(dialogue: Dialogue, model: str, max_new_tokens: int) -> dict[str, Any]:
    """The body of POST /v1/chat/completions: arguments of earlier calls are JSON text there, and calls have ids."""
    body = {
        "model": model,
        "messages": [_wire_message(message) for message in dialogue.messages],
        "temperature": 0.0,
        "max_tokens": max_new_tokens,
        "chat_template_kwargs": {"enable_thinking": dialogue.thinking},
    }
    if dialogue.tools:
        body |= {"tools": list(dialogue.tools), "tool_choice": "auto"}
    return body


def read_message(message: Mapping[str, Any]) -> tuple[Reply, str]:
    """(reply, its text to show) of a message. Raises LookupError, AttributeError or TypeError for another form."""
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    content = (message.get("content") or "").strip()
    calls, problem = [], None
    for call in message.get("tool_calls") or ():
        name, text = call["function"]["name"], call["function"]["arguments"]
        try:
            arguments = json.loads(text)
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            problem = problem or f"call of {name}: expected arguments as a JSON object, found {text[:40]!r}"
            arguments = {}
        calls.append(Call(name, arguments))
    reasoning = reasoning.strip() if reasoning is not None else None
    shown = {"reasoning": reasoning, "content": content, "calls": [[call.name, call.arguments] for call in calls]}
    text = json.dumps({key: value for key, value in shown.items() if value}, ensure_ascii=False)
    return Reply(reasoning, content, tuple(calls), problem), text


def _wire_message(message: Mapping[str, Any]) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return dict(message)
    calls = [
        {
            "id": call.get("id", f"call_{number}"),
            "type": "function",
            "function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False)},
        }
        for number, call in enumerate(message["tool_calls"], start=1)
    ]
    return {**message, "tool_calls": calls}


def _message(data: bytes) -> str:
    """What an error's body says: its message where it is JSON with one, else its first characters."""
    text = data.decode("utf-8", "replace")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return text[:200] or "no reason given"
    content = content.get("error", content) if isinstance(content, dict) else content
    return str(content.get("message", content) if isinstance(content, dict) else content)[:300]
