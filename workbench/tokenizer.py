"""The tokenizer of a checkpoint: text to token ids, ids to text piece by piece, conversations to prompts.

>>> tokenizer = Tokenizer.from_directory("data/miniature")
>>> prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}])
>>> stream = tokenizer.stream_decoder()
>>> for token in tokens:
...     print(stream.push(token), end="")
>>> print(stream.finish())

Byte-level BPE only, which is what the supported models use: a token there is a string of bytes, and a
character may be spread over several tokens.
"""

import codecs
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import tokenizers
from jinja2 import Template, TemplateError, TemplateSyntaxError
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from workbench.config import read_json_object
from workbench.errors import CheckpointError, ConfigError, InputError

CHAT_TEMPLATE_FILE = "chat_template.jinja"
_SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


class Tokenizer:
    """Reads `tokenizer.json`, `tokenizer_config.json` (special tokens) and the chat template beside them.

    Attributes: `special_tokens` maps "eos_token" and the like to their text; `chat_template` is the
    template's text or None.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        source: str = "tokenizer.json",
    ):
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        self.source = source
        self._backend = backend
        self._added = backend.get_added_tokens_decoder()
        for name, token in self.special_tokens.items():
            if backend.token_to_id(token) is None:
                expected = "expected a token of the vocabulary"
                raise CheckpointError(f"{source}: {name}: {expected}, found {token!r}")
        decoder = json.loads(backend.to_str())["decoder"]
        kinds = [part["type"] for part in decoder.get("decoders", [decoder])] if decoder else []
        if "ByteLevel" not in kinds:
            found = ", ".join(kinds) or "none"
            raise CheckpointError(f"{source}: decoder: expected ByteLevel, found {found}")

    @classmethod
    def from_directory(cls, path: str | Path) -> "Tokenizer":
        """The tokenizer of a checkpoint directory. Raises `CheckpointError` with file, expected and found."""
        path = Path(path)
        file = path / "tokenizer.json"
        config_file = path / "tokenizer_config.json"
        try:
            read_json_object(file)  # the library's own message for a damaged file names no place in it
            config = read_json_object(config_file) if config_file.exists() else {}
        except ConfigError as fault:
            raise CheckpointError(str(fault)) from None
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as fault:  # noqa: BLE001 - the library raises nothing more specific
            raise CheckpointError(
                f"{file}: expected a tokenizer of the tokenizers library, found: {fault}"
            ) from None
        special = {name: _token_text(config_file, name, config.get(name)) for name in _SPECIAL_NAMES}
        return cls(
            backend,
            special_tokens={name: token for name, token in special.items() if token is not None},
            chat_template=_read_chat_template(path, config),
            source=str(file),
        )

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included. A model's own vocabulary may be padded beyond it."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def eos_token_id(self) -> int | None:
        """Id of the token that ends a text, None if the tokenizer names none."""
        token = self.special_tokens.get("eos_token")
        return None if token is None else self._backend.token_to_id(token)

    def token_id(self, token: str) -> int:
        """Id of one token given as text. Raises `InputError` if there is no such token."""
        found = self._backend.token_to_id(token)
        if found is None:
            raise InputError(f"{self.source}: expected a token of the vocabulary, found {token!r}")
        return found

    def encode(self, text: str) -> list[int]:
        """Token ids of a text. The text of a special token becomes that token; nothing is added around.

        Raises `InputError` for what is no text.
        """
        if not isinstance(text, str):
            raise InputError(f"encode: expected a string, found {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as fault:  # half of a surrogate pair, legal in a Python string alone
            where = f"a lone surrogate at character {fault.start}"
            raise InputError(f"encode: expected Unicode text, found {where}") from None
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Text of token ids. Bytes that form no UTF-8 character become U+FFFD.

        skip_special: leave special tokens out. Raises `InputError` for an id that is in no token.
        """
        stream = self.stream_decoder(skip_special=skip_special)
        return "".join([*(stream.push(token) for token in ids), stream.finish()])

    def stream_decoder(self, *, skip_special: bool = True) -> "StreamDecoder":
        """A decoder that is fed token by token and gives out only whole characters."""
        return StreamDecoder(self, skip_special=skip_special)

    def token_bytes(self, token: int) -> bytes:
        """The bytes one token stands for. Raises `InputError` for an id that is in no token."""
        if token in self._added:
            return self._added[token].content.encode()
        text = self._backend.id_to_token(token) if type(token) is int and token >= 0 else None
        if text is None:
            raise InputError(f"{self.source}: expected a token id below {self.vocab_size}, found {token!r}")
        if any(character not in _BYTE_OF_CHARACTER for character in text):
            return text.encode()  # no byte-level piece: the library takes such a token as it stands
        return bytes(_BYTE_OF_CHARACTER[character] for character in text)

    def is_special(self, token: int) -> bool:
        """Whether the token is a control token such as the end of a turn."""
        return token in self._added and self._added[token].special

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt text of a conversation, by the checkpoint's own Jinja template.

        messages: `{"role": ..., "content": ...}` and whatever else the template reads. tools: JSON schemas.
        enable_thinking: None leaves the choice to the template. add_generation_prompt: end with the opening
        of the assistant's turn.

        The template comes with the checkpoint and runs in a sandbox: it can build text from its arguments and
        reach nothing else. Raises `CheckpointError` for a template that is missing, malformed or tries to
        leave the sandbox, `InputError` for messages that the template rejects.
        """
        if self.chat_template is None:
            raise CheckpointError(f"{self.source}: expected a chat template beside it, found none")
        return render_chat(
            self.chat_template,
            messages,
            tools=tools,
            enable_thinking=enable_thinking,
            add_generation_prompt=add_generation_prompt,
            special_tokens=self.special_tokens,
            source=self.source,
        )


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    enable_thinking: bool | None = None,
    add_generation_prompt: bool = True,
    special_tokens: Mapping[str, str] | None = None,
    source: str = "chat_template.jinja",
) -> str:
    """The text of a conversation by the text of a chat template: see `Tokenizer.apply_chat_template`."""
    for position, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            found = repr(message)[:80]
            raise InputError(f'messages[{position}]: expected an object with a "role", found {found}')
    variables: dict[str, Any] = {
        "messages": messages,
        "tools": tools,
        "add_generation_prompt": add_generation_prompt,
        **(special_tokens or {}),
    }
    if enable_thinking is not None:
        variables["enable_thinking"] = enable_thinking
    where = f"{source}: chat template"
    try:
        return _compiled(template).render(variables)
    except SecurityError as fault:
        expected = "expected no access beyond its arguments"
        raise CheckpointError(f"{where}: {expected}, found: {fault}") from None
    except TemplateSyntaxError as fault:
        expected = "expected valid Jinja"
        raise CheckpointError(f"{where}: line {fault.lineno}: {expected}, found: {fault}") from None
    except TemplateError as fault:
        raise InputError(f"{where}: does not accept these messages: {fault}") from None
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as fault:
        kind = type(fault).__name__
        raise InputError(f"{where}: fails on these messages with {kind}: {fault}") from None


class StreamDecoder:
    """Turns tokens into text as they come, whole characters only.

    The pieces joined are exactly the text of all tokens decoded at once.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool):
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that this token completes; empty while a character is unfinished."""
        data = self._tokenizer.token_bytes(token)
        if self._skip_special and self._tokenizer.is_special(token):
            return ""
        return self._utf8.decode(data)

    def finish(self) -> str:
        """What is left at the end: U+FFFD for a character that was never finished."""
        return self._utf8.decode(b"", final=True)


def _byte_of_character() -> dict[str, int]:
    """Byte-level BPE writes each byte as one character: itself if printable, else one from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()


class _Sandbox(ImmutableSandboxedEnvironment):
    """The environment chat templates are written for, without a way out of it."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        # The default gives an undefined value that prints as nothing, so the attempt would pass unseen.
        raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__!r}")


@lru_cache(maxsize=8)
def _compiled(template: str) -> Template:
    return _Sandbox().from_string(template)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML; models are trained on plain JSON.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _token_text(file: Path, name: str, value: Any) -> str | None:
    """A special token stands as plain text or as an object with its text under `content`."""
    text = value.get("content") if isinstance(value, dict) else value
    if value is not None and not isinstance(text, str):
        raise CheckpointError(f"{file}: {name}: expected the text of a token, found {value!r:.80}")
    return text


def _read_chat_template(path: Path, config: dict[str, Any]) -> str | None:
    """From `chat_template.jinja` or the tokenizer's configuration; two that differ are an error."""
    config_file, template_file = path / "tokenizer_config.json", path / CHAT_TEMPLATE_FILE
    inline = config.get("chat_template")
    if isinstance(inline, list):
        named = [entry for entry in inline if isinstance(entry, dict) and entry.get("name") == "default"]
        inline = named[0].get("template") if named else None
    if inline is not None and not isinstance(inline, str):
        found = type(inline).__name__
        raise CheckpointError(f"{config_file}: chat_template: expected a string, found {found}")
    if not template_file.exists():
        return inline
    try:
        template = template_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise CheckpointError(f"{template_file}: expected UTF-8 text, found: {fault}") from None
    if inline is not None and inline != template:
        raise CheckpointError(
            f"{template_file}: expected the same chat template as in {config_file.name}, found another one; "
            "remove the wrong one"
        )
    return template
