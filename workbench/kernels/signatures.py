"""Calls of foreign functions by what their signature says, and never by trial.

A library's function may name a parameter otherwise than we do, take some by position alone, or tell nothing. `bind`
reads the signature once and decides how the call is made:

1. keyword form: every value goes to the parameter of its name, or of a name that is known for it;
2. positional form: where the function hides its names (positional-only, ``*args``, ``arg0`` as pybind11 writes them),
   the values stand in the documented order, and names that can be read must agree with it;
3. no signature at all (a builtin without one and without a line of text): the documented order, said so in `reason`.

The last two need an order that is documented without a gap: a form is `Ordered` where there is one. Anything else is an
unknown signature: BackendError shows both, theirs as found and ours as needed. No value is ever put into ``**kwargs``,
where a misspelt name would be swallowed, and no call is made to see whether it works.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.errors import BackendError, one_line
from workbench.kernels.requirements import load_symbol

Parameter = inspect.Parameter

#: The form of a call that nothing could be read for.
DOCUMENTED_ORDER = "documented order"

#: Names that say nothing: what pybind11 and generated wrappers call a parameter whose name nobody wrote down.
_ANONYMOUS = re.compile(r"_*(arg|args|param|p|a|x)?_?\d+")


@dataclass(frozen=True, slots=True)
class Given:
    """A value that we have for a foreign function.

    name      our name for it
    aliases   what the function may call it instead, the likeliest first
    is_needed whether a call without it would compute something else; one that is not may find no place
    """

    name: str
    aliases: tuple[str, ...] = ()
    is_needed: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


class Ordered(tuple):
    """A form whose values stand in the order of the function's parameters, from the first on and without a gap."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Binding:
    """How a foreign function is called.

    target      the function, or the class whose constructor it is
    positional  our names of the values that are passed by position, in order
    keywords    (its parameter, our name) of those passed by keyword
    form        keyword, positional or documented order
    reason      the form and what it was read from, for the attestation
    """

    target: Callable[..., Any]
    positional: tuple[str, ...]
    keywords: tuple[tuple[str, str], ...]
    form: str
    reason: str

    def places(self, name: str) -> bool:
        """Whether the function takes the value that we call `name`."""
        return name in self.positional or any(name == ours for _, ours in self.keywords)

    def __call__(self, **values: Any) -> Any:
        """Call with our values by our names; those without a place are left out. KeyError for one that is missing."""
        return self.target(*(values[name] for name in self.positional), **{key: values[n] for key, n in self.keywords})


def foreign(symbol: str, forms: Sequence[Sequence[Given]]) -> Binding:
    """`bind` for a symbol as `requirements.load_symbol` has it. Raises BackendError where it is missing or unknown."""
    return bind(symbol, load_symbol(symbol), *forms)


def bind(what: str, target: Callable[..., Any], *forms: Sequence[Given]) -> Binding:
    """The way to call `target`, by the first of `forms` (sets of values) that it fits.

    `what` names the function in messages. Raises BackendError, showing both signatures, where none fits.
    """
    return _bind(what, target, tuple((tuple(form), isinstance(form, Ordered)) for form in forms))


@functools.lru_cache(maxsize=256)
def _bind(what: str, target: Callable[..., Any], forms: tuple[tuple[tuple[Given, ...], bool], ...]) -> Binding:
    found, source = _parameters(target)
    ordered = next((form for form, is_ordered in forms if is_ordered), None)
    if source is None and ordered is not None:
        order = tuple(given.name for given in ordered)
        reason = f"{what} tells no signature: called in the documented order ({', '.join(order)})"
        return Binding(target, order, (), DOCUMENTED_ORDER, reason)
    faults = []
    for parameters in found:
        for form, is_ordered in forms:
            placed = _placed(parameters, form, is_ordered, by_position=source == _FROM_TEXT)
            if not isinstance(placed, str):
                positional, keywords, kind = placed
                shown = ", ".join(p.name for p in parameters)
                return Binding(target, positional, keywords, kind, f"{what}({shown}) called in {kind} form, {source}")
            faults.append(placed)
    theirs = " or ".join(f"({', '.join(map(_shown, parameters))})" for parameters in found)
    ours = " or ".join(f"({', '.join(_needed(given) for given in form)})" for form, _ in forms)
    if source is None:
        theirs, source = "none", "since it tells no signature"
        faults.append("no order of its arguments is documented")
    raise BackendError(
        f"{what}: its signature is not one that is known: found {theirs}, {source}; needed {ours}; "
        f"{'; '.join(dict.fromkeys(faults))}; next: install a version that is listed in docs/backends.md, or add the "
        "name that it has for the value to the aliases of the backend"
    )


# ---- what the function says of itself

_INSPECTED, _FROM_TEXT = "read with inspect.signature", "read from the first line of its text"


def _parameters(target: Callable[..., Any]) -> tuple[list[tuple[Parameter, ...]], str | None]:
    """(the signatures that there are to read, where they were read); ([], None) where nothing is to be read."""
    try:
        return [tuple(inspect.signature(target).parameters.values())], _INSPECTED
    except (ValueError, TypeError):  # a builtin, or a class whose constructor is one: inspect has nothing to go by
        text = getattr(target, "__doc__", None)
    read = [parsed for line in _signature_lines(text, target) if (parsed := parse_signature(line)) is not None]
    return (read, _FROM_TEXT) if read else ([], None)


def _signature_lines(text: object, target: Callable[..., Any]) -> list[str]:
    """The lines of a docstring that state signatures: the first, or pybind11's numbered overloads below it."""
    if not isinstance(text, str) or not text.strip():
        return []
    lines = [line.strip() for line in text.strip().splitlines()]
    overloads = [re.sub(r"^\d+\.\s*", "", line) for line in lines if re.match(r"^\d+\.\s*\w[\w.]*\(", line)]
    if overloads and "overloaded function" in text.lower():
        return overloads
    name = re.escape(getattr(target, "__name__", "") or "")
    return lines[:1] if re.match(rf"^(\w+\.)*({name}|__init__)\(", lines[0]) else []


def parse_signature(line: str) -> tuple[Parameter, ...] | None:
    """Parameters of ``name(a: T, b: int = 3, /, *, c) -> R`` as docstrings state it, without types; None if it is none.

    The types may be C++ (``at::Tensor``), which no parser of Python reads: they are cut away before.
    """
    opened = line.find("(")
    closed = _closing(line, opened)
    if opened < 1 or closed is None:
        return None
    bare = []
    for part in _split(line[opened + 1 : closed]):
        name, default = _cut(part.strip())
        if not re.fullmatch(r"\*{0,2}[A-Za-z_]\w*|\*|/", name):
            return None
        bare.append(f"{name}=None" if default is not None else name)
    if bare and bare[0] == "self":
        bare = bare[1:]
    try:
        arguments = ast.parse(f"def f({', '.join(bare)}): ...").body[0].args
    except SyntaxError:
        return None
    return _from_ast(arguments)


def _from_ast(arguments: ast.arguments) -> tuple[Parameter, ...]:
    plain = [*arguments.posonlyargs, *arguments.args]
    first_default = len(plain) - len(arguments.defaults)
    found = [
        Parameter(
            argument.arg,
            Parameter.POSITIONAL_ONLY if i < len(arguments.posonlyargs) else Parameter.POSITIONAL_OR_KEYWORD,
            default=Parameter.empty if i < first_default else None,
        )
        for i, argument in enumerate(plain)
    ]  # fmt: skip
    if arguments.vararg:
        found.append(Parameter(arguments.vararg.arg, Parameter.VAR_POSITIONAL))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        kind = Parameter.KEYWORD_ONLY
        found.append(Parameter(argument.arg, kind, default=Parameter.empty if default is None else None))
    if arguments.kwarg:
        found.append(Parameter(arguments.kwarg.arg, Parameter.VAR_KEYWORD))
    return tuple(found)


_OPEN, _CLOSE = "([{<", ")]}>"


def _closing(text: str, opened: int) -> int | None:
    """The place of the bracket that closes the one at `opened`."""
    depth = 0
    for place in range(max(opened, 0), len(text)):
        if text[place : place + 2] == "->":
            continue
        if text[place] in _OPEN:
            depth += 1
        elif text[place] in _CLOSE and not (text[place] == ">" and text[place - 1] == "-"):
            depth -= 1
            if depth == 0:
                return place
    return None


def _split(text: str) -> list[str]:
    """Parts of a list of parameters: split at the commas that stand in no bracket."""
    parts, depth, start = [], 0, 0
    for place, character in enumerate(text):
        depth += (character in _OPEN) - (character in _CLOSE and text[place - 1 : place + 1] != "->")
        if character == "," and depth == 0:
            parts.append(text[start:place])
            start = place + 1
    return [part for part in (*parts, text[start:]) if part.strip()]


def _cut(part: str) -> tuple[str, str | None]:
    """(name, default or None) of ``name: type = default``, or of C++'s ``type name = default``."""
    left, equals, default = part.partition("=")
    name, colon, _ = left.partition(": ")
    name = (name if colon else left.strip().removesuffix(":")).strip()
    if not colon and re.fullmatch(r"[\w:<>,&*\s]+\s[&*]*\w+", name):  # at::Tensor& name
        name = name.rpartition(" ")[2].lstrip("&*")
    return name, default.strip() if equals else None


# ---- which value goes where


def _placed(
    parameters: Sequence[Parameter], form: Sequence[Given], is_ordered: bool, by_position: bool
) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...], str] | str:
    """(names by position, (parameter, name) by keyword, form), or why the values do not fit the parameters.

    `by_position` keeps to positions as far as there is no gap: a text names parameters of functions that may not take
    keywords.
    """
    by_parameter: dict[str, str] = {}
    plain = [p for p in parameters if p.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)]
    known = {p.name for p in plain}
    for given in sorted(form, key=lambda given: given.name not in known):  # no alias takes what another one is called
        place = next((name for name in given.names if name in known and name not in by_parameter), None)
        if place is not None:
            by_parameter[place] = given.name
    named = set(by_parameter.values())
    hidden = [p for p in plain if p.kind != Parameter.KEYWORD_ONLY and p.name not in by_parameter and
              _ANONYMOUS.fullmatch(p.name)]  # fmt: skip
    open_end = any(p.kind == Parameter.VAR_POSITIONAL for p in parameters)
    unknown = [p for p in plain if p.default is Parameter.empty and p.name not in by_parameter and p not in hidden]
    if unknown:
        return f"nothing is known to go to {', '.join(repr(p.name) for p in unknown)}"
    homeless = [given.name for given in form if given.is_needed and given.name not in named]
    if not homeless and not any(p.default is Parameter.empty for p in hidden):
        return _by_name(plain, by_parameter, by_position)
    if not hidden and not open_end:
        return f"no place for {', '.join(map(repr, homeless))}"
    if not is_ordered:
        return "it hides names, and no order of its arguments is documented"
    return _in_positional_form(plain, by_parameter, form, open_end)


def _by_name(
    plain: Sequence[Parameter], by_parameter: dict[str, str], by_position: bool
) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...], str] | str:
    """All by keyword, but positional-only parameters, which must come first and without a gap."""
    positional: list[str] = []
    gap = None
    for p in plain:
        is_open = by_position and gap is None and p.kind == Parameter.POSITIONAL_OR_KEYWORD
        if p.kind != Parameter.POSITIONAL_ONLY and not is_open:
            continue
        if p.name not in by_parameter:
            gap = p.name
        elif gap is not None:
            return f"{p.name!r} can only be reached past {gap!r}, for which there is nothing"
        else:
            positional.append(by_parameter[p.name])
    keywords = tuple((key, ours) for key, ours in by_parameter.items() if ours not in positional)
    return tuple(positional), keywords, "positional" if positional and not keywords else "keyword"


def _in_positional_form(
    plain: Sequence[Parameter], by_parameter: dict[str, str], form: Sequence[Given], open_end: bool
) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...], str] | str:
    """The documented order, where names that can be read agree with it."""
    slots = [p for p in plain if p.kind != Parameter.KEYWORD_ONLY]
    behind = {
        p.name: by_parameter[p.name] for p in plain if p.kind == Parameter.KEYWORD_ONLY and p.name in by_parameter
    }
    order = [given for given in form if given.name not in behind.values()]
    while order and not order[-1].is_needed and len(order) > len(slots) and not open_end:
        order.pop()  # the last ones may stay away
    if len(order) > len(slots) and not open_end:
        return f"{len(slots)} places for {len(order)} values"
    least = sum(p.default is Parameter.empty for p in slots)
    if len(order) < least:
        return f"{len(order)} values for {least} places"
    for p, given in zip(slots, order, strict=False):
        if p.name in by_parameter and by_parameter[p.name] != given.name:
            return f"{p.name!r} stands where the documented order has {given.name!r}"
        if p.name not in by_parameter and not _ANONYMOUS.fullmatch(p.name):
            return f"{p.name!r} stands where the documented order has {given.name!r}"
    return tuple(given.name for given in order), tuple(behind.items()), "positional"


def _shown(p: Parameter) -> str:
    star = {Parameter.VAR_POSITIONAL: "*", Parameter.VAR_KEYWORD: "**"}.get(p.kind, "")
    default = "" if p.default is Parameter.empty else f"={one_line(f'{p.default!r:.30}')}"
    mark = {Parameter.POSITIONAL_ONLY: " [by position]", Parameter.KEYWORD_ONLY: " [by keyword]"}.get(p.kind, "")
    return f"{star}{p.name}{default}{mark}"


def _needed(given: Given) -> str:
    return "/".join(given.names) + ("" if given.is_needed else " [if it has a place]")
