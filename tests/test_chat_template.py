"""The chat template of the miniature: Qwen3.5's conventions, here and in transformers."""

import json
from pathlib import Path

import pytest

from workbench.dialogue import read_dialogues
from workbench.errors import InputError
from workbench.tokenizer import CHAT_TEMPLATE_FILE, render_chat

DATA = Path(__file__).parent.parent / "data"
TEMPLATE = (DATA / "miniature" / CHAT_TEMPLATE_FILE).read_text(encoding="utf-8")

USER = {"role": "user", "content": " Hi "}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"city": "Oslo", "n": 3, "on": True, "of": ["a"]}}}
WRITTEN = (
    "<tool_call>\n<function=f>\n<parameter=city>\nOslo\n</parameter>\n<parameter=n>\n3\n</parameter>\n<parameter=on>\n"
    'true\n</parameter>\n<parameter=of>\n["a"]\n</parameter>\n</function>\n</tool_call>'
)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
ASKED = "<|im_start|>user\nHi<|im_end|>\n"


def assistant(content: str | None = "", **more) -> dict:
    return {"role": "assistant", "content": content, **more}


CASES = {
    "thinking is on by default": ([USER], {}, ASKED + "<|im_start|>assistant\n<think>\n"),
    "thinking off": ([USER], {"enable_thinking": False}, ASKED + "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
    "no opening": ([USER], {"add_generation_prompt": False}, ASKED),
    "system": ([{"role": "system", "content": "Be brief."}, USER], {"add_generation_prompt": False},
               "<|im_start|>system\nBe brief.<|im_end|>\n" + ASKED),
    "reasoning before the last question is left out": (
        [USER, assistant("Yes.", reasoning_content="hm"), USER], {"add_generation_prompt": False},
        ASKED + "<|im_start|>assistant\nYes.<|im_end|>\n" + ASKED),
    "reasoning after it is kept": (
        [USER, assistant("Yes.", reasoning_content="hm")], {"add_generation_prompt": False},
        ASKED + "<|im_start|>assistant\n<think>\nhm\n</think>\n\nYes.<|im_end|>\n"),
    "reasoning in the content": (
        [USER, assistant("<think>\nhm\n</think>\n\nYes.")], {"add_generation_prompt": False},
        ASKED + "<|im_start|>assistant\n<think>\nhm\n</think>\n\nYes.<|im_end|>\n"),
    "reasoning in the content, long ago": (
        [USER, assistant("hm\n</think>\n\nYes."), USER], {"add_generation_prompt": False},
        ASKED + "<|im_start|>assistant\nYes.<|im_end|>\n" + ASKED),
    "calls and their results": (
        [USER, assistant(None, tool_calls=[CALL, CALL]), *({"role": "tool", "content": n} for n in "12")],
        {"add_generation_prompt": False},
        ASKED + f"<|im_start|>assistant\n<think>\n\n</think>\n\n{WRITTEN}\n{WRITTEN}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"),
    "content before a call": (
        [USER, assistant("Wait.", tool_calls=[CALL])], {"add_generation_prompt": False},
        ASKED + f"<|im_start|>assistant\n<think>\n\n</think>\n\nWait.\n\n{WRITTEN}<|im_end|>\n"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_turns_are_written_as_qwen_does(case):
    messages, options, expected = CASES[case]
    assert render_chat(TEMPLATE, messages, **options) == expected


def test_functions_stand_before_the_system_text():
    system = {"role": "system", "content": "Be brief."}
    text = render_chat(TEMPLATE, [system, USER], tools=TOOLS, add_generation_prompt=False)
    assert text.startswith("<|im_start|>system\n# Functions\n<tools>\n" + json.dumps(TOOLS[0]) + "\n</tools>\n")
    assert text.endswith("</tool_call>\n\nBe brief.<|im_end|>\n" + ASKED)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([assistant("Hi")], "expected one of a user, found none"),
        ([], "expected one of a user, found none"),
        ([USER, {"role": "system", "content": "x"}], "system message: expected it first, found it at place 2"),
        ([USER, {"role": "robot", "content": "x"}], "expected system, user, assistant or tool, found robot"),
        ([{"role": "user", "content": [{"type": "image"}]}], "content of a user message: expected text"),
        ([USER, assistant(tool_calls=[{"function": {"name": "f", "arguments": "{}"}}])], "arguments of f: expected an"),
    ],
)  # fmt: skip
def test_what_the_model_cannot_read_is_named(messages, message):
    with pytest.raises(InputError, match=message):
        render_chat(TEMPLATE, messages)


def test_transformers_writes_the_same_prompts():
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    for dialogue in read_dialogues(DATA / "dialogues.jsonl")[:40]:
        messages, tools = list(dialogue.messages), list(dialogue.tools) or None
        (theirs,), _ = utils.render_jinja_template(
            conversations=[messages], tools=tools, chat_template=TEMPLATE, add_generation_prompt=True,
            enable_thinking=dialogue.thinking,
        )  # fmt: skip
        assert theirs == render_chat(TEMPLATE, messages, tools=tools, enable_thinking=dialogue.thinking)
