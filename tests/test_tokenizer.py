"""The tokenizer: exact decoding piece by piece, and chat templates that cannot leave their sandbox."""

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from workbench.errors import CheckpointError, InputError
from workbench.tokenizer import Tokenizer

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "naïve café, Ærø, schön",
    "日本語のテキスト",
    "emoji: 🙂🙃 👩‍👩‍👧 and flags 🇪🇺",
    "tabs\tand\nlines\r\n  spaces   ",
    "\u0000\u001f control",
    "�",
    "",
]

TEMPLATE = """\
{%- if tools %}
{{- '<tools>' + (tools | tojson) + '</tools>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'hidden' %}{% continue %}{% endif %}
    {%- if message.role not in ['user', 'assistant'] %}
        {{- raise_exception('Unexpected role ' + message.role) }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""


@pytest.fixture(scope="module")
def backend() -> tokenizers.Tokenizer:
    """Byte-level BPE with so few merges that most characters outside ASCII take several tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(["<think>", "naïve token"])
    return tokenizer


@pytest.fixture
def folder(backend, tmp_path) -> Path:
    (tmp_path / "tokenizer.json").write_text(backend.to_str(), encoding="utf-8")
    config = {"eos_token": "<|im_end|>", "pad_token": {"content": "<|endoftext|>"}, "bos_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path


@pytest.fixture(scope="module")
def tokenizer(backend) -> Tokenizer:
    return Tokenizer(backend, special_tokens={"eos_token": "<|im_end|>"}, chat_template=TEMPLATE)


def with_template(backend, template: str) -> Tokenizer:
    return Tokenizer(backend, chat_template=template, source="some/tokenizer.json")


# ---- encoding and decoding


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_encoding_and_decoding(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens(tokenizer, backend):
    ids = tokenizer.encode("hi<|im_end|><think>")
    assert ids[-2:] == [backend.token_to_id("<|im_end|>"), backend.token_to_id("<think>")]
    assert tokenizer.decode(ids) == "hi<|im_end|><think>"
    assert tokenizer.decode(ids, skip_special=True) == "hi<think>"  # a marker, not a control token
    assert tokenizer.eos_token_id == tokenizer.token_id("<|im_end|>") == ids[-2]
    assert tokenizer.is_special(ids[-2]) and not tokenizer.is_special(ids[-1])
    assert tokenizer.vocab_size == backend.get_vocab_size()


@settings(max_examples=300)
@given(data=st.data())
def test_decoding_of_any_ids_is_that_of_the_library(tokenizer, backend, data):
    """Random tokens mostly give broken UTF-8; the replacement characters must agree as well."""
    last = backend.token_to_id("<think>")  # the token after it is the library's own exception, see below
    ids = data.draw(st.lists(st.integers(0, last), max_size=30))
    assert tokenizer.decode(ids, skip_special=True) == backend.decode(ids, skip_special_tokens=True)
    assert tokenizer.decode(ids) == backend.decode(ids, skip_special_tokens=False)


def test_added_token_is_decoded_as_its_own_text(tokenizer, backend):
    assert tokenizer.decode([backend.token_to_id("naïve token")]) == "naïve token"


@settings(max_examples=300)
@given(text=st.text(max_size=40), data=st.data())
def test_stream_gives_whole_characters_at_the_earliest_token(tokenizer, text, data):
    ids = tokenizer.encode(text)
    stream = tokenizer.stream_decoder()
    given = ""
    n_bytes = 0
    whole = text.encode()
    for token in ids:
        piece = stream.push(token)
        given += piece
        n_bytes += len(tokenizer.token_bytes(token))
        # all characters that are complete so far, and nothing of the next
        assert given == whole[:n_bytes].decode("utf-8", "ignore")
    assert stream.finish() == "" and given == text


def test_stream_of_an_emoji_waits_for_its_last_byte(tokenizer):
    ids = tokenizer.encode("🦊")
    assert len(ids) > 1
    stream = tokenizer.stream_decoder()
    assert [stream.push(token) for token in ids] == [""] * (len(ids) - 1) + ["🦊"]
    cut = tokenizer.stream_decoder()
    assert cut.push(ids[0]) == "" and cut.finish() == "\ufffd"


def test_stream_skips_control_tokens_unless_asked(tokenizer):
    ids = tokenizer.encode("a<|im_end|>b")
    for skip, wanted in ((True, "ab"), (False, "a<|im_end|>b")):
        stream = tokenizer.stream_decoder(skip_special=skip)
        assert "".join(stream.push(token) for token in ids) == wanted


@pytest.mark.parametrize("token", [-1, 10**9, "a", True])
def test_decoding_refuses_ids_that_are_no_tokens(tokenizer, token):
    with pytest.raises(InputError, match="expected a token id below"):
        tokenizer.decode([token])


@pytest.mark.parametrize(
    ("text", "wanted"),
    [(b"bytes", "expected a string, found bytes"), ("ab\ud800", "lone surrogate at character 2")],
)
def test_encoding_refuses_what_is_no_text(tokenizer, text, wanted):
    with pytest.raises(InputError, match=wanted):
        tokenizer.encode(text)


def test_unknown_token_by_name(tokenizer):
    with pytest.raises(InputError, match="expected a token of the vocabulary, found '<nope>'"):
        tokenizer.token_id("<nope>")


# ---- chat template


MESSAGES = [{"role": "user", "content": "Größe?"}, {"role": "hidden", "content": "x"}]


def test_template_renders_as_it_is_meant_to(tokenizer):
    assert tokenizer.apply_chat_template(MESSAGES) == (
        "<|im_start|>user\nGröße?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=False) == (
        "<|im_start|>user\nGröße?<|im_end|>\n"
    )


@pytest.mark.parametrize(("thinking", "has_block"), [(None, False), (True, False), (False, True)])
def test_thinking_switch(tokenizer, thinking, has_block):
    text = tokenizer.apply_chat_template(MESSAGES, enable_thinking=thinking)
    assert ("<think>" in text) == has_block


def test_tools_are_plain_json_with_unicode_kept(tokenizer):
    text = tokenizer.apply_chat_template(MESSAGES, tools=[{"name": "größe", "doc": "<b> & 'c'"}])
    assert text.startswith('<tools>[{"name": "größe", "doc": "<b> & \'c\'"}]</tools>')


def test_special_tokens_are_variables_of_the_template(backend):
    tokenizer = Tokenizer(
        backend, special_tokens={"eos_token": "<|im_end|>"}, chat_template="{{ eos_token }}"
    )
    assert tokenizer.apply_chat_template(MESSAGES) == "<|im_end|>"


def test_rejection_by_the_template_is_the_users_error(tokenizer):
    with pytest.raises(InputError, match="does not accept these messages: Unexpected role system"):
        tokenizer.apply_chat_template([{"role": "system", "content": ""}])


@pytest.mark.parametrize("messages", [["hi"], [{"content": "hi"}], [{"role": 1, "content": "hi"}]])
def test_messages_without_a_role(tokenizer, messages):
    with pytest.raises(InputError, match=r'messages\[0\]: expected an object with a "role"'):
        tokenizer.apply_chat_template(messages)


ESCAPES = {
    "class": "{{ ''.__class__ }}",
    "class walk": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "by item": "{{ ''['__class__'] }}",
    "by filter": "{{ ''|attr('__class__') }}",
    "by format": "{{ '{0.__class__}'.format(1) }}",
    "by format_map": "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "by map": "{{ ['']|map(attribute='__class__')|list }}",
    "globals of a function": "{{ raise_exception.__globals__ }}",
    "globals of a builtin": "{{ cycler.__init__.__globals__ }}",
    "namespace": "{{ namespace.__init__.__globals__['os'] }}",
    "self": "{{ self.__init__ }}",
    "changing the messages": "{{ messages.append(1) }}",
    "changing a message": "{{ messages[0].update({'role': 'x'}) }}",
}


@pytest.mark.parametrize("case", ESCAPES)
def test_escape_from_the_sandbox_is_one_clear_error(backend, case):
    tokenizer = with_template(backend, "line\n" + ESCAPES[case])
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(CheckpointError) as caught:
        tokenizer.apply_chat_template(messages)
    message = str(caught.value)
    assert message.startswith(
        "some/tokenizer.json: chat template: expected no access beyond its arguments, found: "
    )
    assert "\n" not in message and messages == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("template", "error", "wanted"),
    [
        ("a\n{% if %}", CheckpointError, "chat template: line 2: expected valid Jinja"),
        ("{{ 1|no_such_filter }}", CheckpointError, "no_such_filter"),
        ("{% include 'other' %}", InputError, "no loader"),
        ("{{ 1 / 0 }}", InputError, "ZeroDivisionError"),
        ("{{ messages[9].role.x }}", InputError, "does not accept these messages"),
        ("{{ 1 + 'a' }}", InputError, "TypeError"),
        ("{{ range(10**9)|list }}", InputError, "OverflowError"),
    ],
)
def test_broken_template(backend, template, error, wanted):
    with pytest.raises(error) as caught:
        with_template(backend, template).apply_chat_template(MESSAGES)
    assert wanted in str(caught.value) and "some/tokenizer.json: chat template: " in str(caught.value)


def test_no_template(backend):
    with pytest.raises(CheckpointError, match="expected a chat template beside it, found none"):
        Tokenizer(backend).apply_chat_template(MESSAGES)


# ---- files


def test_from_directory(folder, tokenizer):
    read = Tokenizer.from_directory(folder)
    assert read.special_tokens == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    assert read.encode("Ærø<|im_end|>") == tokenizer.encode("Ærø<|im_end|>")
    assert read.apply_chat_template(MESSAGES) == tokenizer.apply_chat_template(MESSAGES)


@pytest.mark.parametrize("inline", [TEMPLATE, [{"name": "default", "template": TEMPLATE}]])
def test_template_inside_the_configuration(folder, tokenizer, inline):
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": inline}))
    for _ in range(2):  # with the same template in a file too, then alone
        assert Tokenizer.from_directory(folder).chat_template == TEMPLATE
        (folder / "chat_template.jinja").unlink(missing_ok=True)


def test_tokenizer_alone_is_enough_to_encode(folder):
    (folder / "tokenizer_config.json").unlink()
    (folder / "chat_template.jinja").unlink()
    read = Tokenizer.from_directory(folder)
    assert (
        read.eos_token_id is None and read.chat_template is None and read.decode(read.encode("a b")) == "a b"
    )


@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        ("tokenizer.json", None, "tokenizer.json: file not found"),
        ("tokenizer.json", "{", "tokenizer.json: invalid JSON"),
        ("tokenizer.json", "{}", "tokenizer.json: expected a tokenizer of the tokenizers library"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json: expected a JSON object"),
        ("tokenizer_config.json", '{"eos_token": "<nope>"}', "eos_token: expected a token of the vocabulary"),
        ("tokenizer_config.json", '{"eos_token": 3}', "eos_token: expected the text of a token, found 3"),
        ("tokenizer_config.json", '{"chat_template": 3}', "chat_template: expected a string, found int"),
        (
            "tokenizer_config.json",
            '{"chat_template": "other"}',
            "chat_template.jinja: expected the same chat template",
        ),
    ],
)
def test_unusable_files(folder, name, content, wanted):
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.from_directory(folder)
    assert wanted in str(caught.value) and str(folder) in str(caught.value)


def test_tokenizer_that_is_not_byte_level(backend):
    other = tokenizers.Tokenizer(models.BPE())
    with pytest.raises(CheckpointError, match="decoder: expected ByteLevel, found none"):
        Tokenizer(other)
    other.decoder = decoders.Metaspace()
    with pytest.raises(CheckpointError, match="decoder: expected ByteLevel, found Metaspace"):
        Tokenizer(other)


# ---- transformers


def test_transformers_agrees(folder):
    transformers = pytest.importorskip("transformers")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    peer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    ours = Tokenizer.from_directory(folder)
    for text in TEXTS:
        assert ours.encode(text) == peer.encode(text, add_special_tokens=False)
    tools = [{"type": "function", "function": {"name": "größe"}}]
    for options in ({}, {"tools": tools}, {"enable_thinking": False}, {"add_generation_prompt": False}):
        wanted = peer.apply_chat_template(
            MESSAGES, tokenize=False, **{"add_generation_prompt": True, **options}
        )
        assert ours.apply_chat_template(MESSAGES, **options) == wanted
