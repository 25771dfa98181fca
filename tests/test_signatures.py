"""Calls of foreign functions by their signatures: never by trial, never a value in the wrong place."""

import inspect
import keyword
import string

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from workbench.errors import BackendError
from workbench.kernels.signatures import Given, Ordered, bind, parse_signature


def names(*found: str) -> Ordered:
    return Ordered(Given(name) for name in found)


class Silent:
    """A function of an extension: no signature for Python, a text or none, by position alone."""

    __signature__ = "none"
    __name__ = "f"

    def __init__(self, text=None):
        self.__doc__ = text

    def __call__(self, *arguments):
        return arguments


# ---- keyword form


def test_by_name_and_by_known_other_names():
    def f(query, key, *, scale=1.0, other=None):
        return query, key, scale, other

    found = bind("f", f, (Given("q", ("query",)), Given("k", ("key",)), Given("scale", ("sm_scale",))))
    assert found.form == "keyword" and found(q=1, k=2, scale=3) == (1, 2, 3, None)
    assert found.reason == "f(query, key, scale, other) called in keyword form, read with inspect.signature"
    assert found.places("scale") and not found.places("other")


def test_a_value_that_is_not_needed_may_find_no_place_and_one_that_is_may_not():
    def f(x):
        return x

    found = bind("f", f, (Given("x"), Given("chunk", is_needed=False)))
    assert found(x=1, chunk=2) == 1 and not found.places("chunk")
    with pytest.raises(BackendError, match="no place for 'chunk'"):
        bind("f", f, names("x", "chunk"))


def test_nothing_goes_into_keywords_that_swallow():
    def f(x, **kwargs):
        raise AssertionError("called")

    with pytest.raises(BackendError, match=r"found \(x, \*\*kwargs\).*needed \(x, scale\); no place for 'scale'"):
        bind("f", f, names("x", "scale"))


def test_the_own_name_of_a_value_goes_before_the_alias_of_another():
    def f(g, gate):
        return g, gate

    assert bind("f", f, (Given("log_decay", ("gate", "g")), Given("gate")))(log_decay=1, gate=2) == (1, 2)


def test_an_unknown_signature_shows_both_and_says_what_to_do():
    def f(x, /, plan, *, stream=None):
        raise AssertionError("called")

    with pytest.raises(BackendError) as caught:
        bind("lib:f", f, (Given("x"), Given("w", ("weight",)), Given("eps", is_needed=False)))
    assert str(caught.value) == (
        "lib:f: its signature is not one that is known: found (x [by position], plan, stream=None [by keyword]), "
        "read with inspect.signature; needed (x, w/weight, eps [if it has a place]); nothing is known to go to "
        "'plan'; next: install a version that is listed in docs/backends.md, or add the name that it has for the "
        "value to the aliases of the backend"
    )


def test_the_first_form_that_fits_is_taken():
    def f(x, w1, w2, w3=None):
        return x, w1, w2, w3

    merged, separate = names("x", "w13", "w2"), names("x", "w1", "w2", "w3")
    found = bind("f", f, merged, separate)
    assert found(x=0, w1=1, w2=2, w3=3, w13=13) == (0, 1, 2, 3) and not found.places("w13")
    with pytest.raises(BackendError, match=r"needed \(x, w13, w2\) or \(x, y\)"):
        bind("f", f, merged, names("x", "y"))


def test_classes_and_methods():
    class Module:
        def __init__(self, heads, dim=8, **more):
            self.heads, self.dim = heads, dim

        def forward(self, q, /, k):
            return self.heads, q, k

    form = (Given("num_heads", ("heads",)), Given("head_dim", ("dim",)))
    made = bind("Module", Module, form)(num_heads=3, head_dim=5)
    assert (made.heads, made.dim) == (3, 5)
    forward = bind("Module.forward", made.forward, names("q", "k"))
    assert forward(q=1, k=2) == (3, 1, 2) and forward.positional == ("q",)


def test_a_wrapper_shows_what_it_wraps():
    """As torch.compiler.disable and functools.wraps leave a function."""

    def f(q, k, scale=None, **kwargs):
        return q, k, scale

    assert bind("f", torch.compiler.disable(f), names("q", "k", "scale"))(q=1, k=2, scale=3) == (1, 2, 3)


# ---- positional form


def test_hidden_names_are_filled_in_the_documented_order():
    def f(*args):
        return args

    found = bind("f", f, names("a", "b", "c"))
    assert found.form == "positional" and found(a=1, b=2, c=3) == (1, 2, 3)

    def g(arg0, arg1, /, scale, *, flag=False):
        return arg0, arg1, scale, flag

    found = bind("g", g, Ordered((*names("a", "b", "scale"), Given("flag", is_needed=False))))
    assert found(a=1, b=2, scale=3, flag=True) == (1, 2, 3, True) and found.keywords == (("flag", "flag"),)


def test_names_that_can_be_read_must_agree_with_the_order():
    def f(arg0, scale, arg2):
        raise AssertionError("called")

    with pytest.raises(BackendError, match="'scale' stands where the documented order has 'b'"):
        bind("f", f, names("a", "b", "scale"))
    with pytest.raises(BackendError, match="2 places for 3 values"):
        bind("f", eval("lambda arg0, arg1: None"), names("a", "b", "c"))
    with pytest.raises(BackendError, match="2 values for 3 places"):
        bind("f", eval("lambda arg0, arg1, arg2: None"), names("a", "b"))


@pytest.mark.parametrize("hiding", [lambda *args: args, Silent(), Silent("f(arg0: int, arg1: int) -> None")])
def test_without_a_documented_order_nothing_is_passed_by_position(hiding):
    """A library's form leaves out what it does not need: its order is not that of the function."""
    unordered = tuple(names("a", "b"))
    with pytest.raises(BackendError, match=r"no order of its arguments is documented; next: ") as caught:
        bind("f", hiding, unordered)
    assert "needed (a, b)" in str(caught.value) and "found " in str(caught.value)
    assert bind("f", hiding, unordered, names("b", "a"))(a=1, b=2) == (2, 1)  # the one that has an order


def test_a_gap_that_cannot_be_jumped_over_is_an_error():
    def f(a, other=None, b=None, /):
        raise AssertionError("called")

    with pytest.raises(BackendError, match="'b' can only be reached past 'other'"):
        bind("f", f, names("a", "b"))


# ---- functions that tell inspect nothing


def test_the_text_of_an_extension_is_read():
    text = "f(self: lib.Plan, query: at::Tensor, sizes: Dict[str, List[int]] = {}, scale: float = 0.5) -> Tensor"
    found = bind("f", Silent(text), (Given("q", ("query",)), Given("scale", is_needed=False)))
    assert found.positional == ("q",) and found.keywords == (("scale", "scale"),)
    assert found.reason.endswith("read from the first line of its text")
    nameless = bind("f", Silent("f(arg0: at::Tensor, arg1: int) -> None\n\nWhat it does."), names("a", "b"))
    assert nameless(a=1, b=2) == (1, 2)
    with pytest.raises(BackendError, match=r"found \(arg0, arg1\), read from the first line of its text"):
        bind("f", Silent("f(arg0: at::Tensor, arg1: int) -> None"), names("a", "b", "c"))


def test_overloads_are_tried_in_their_order_by_their_texts_alone():
    first, second = "1. f(x: int, plan: int) -> int", "2. f(x: int, y: int) -> int"
    text = f"f(*args, **kwargs)\nOverloaded function.\n\n{first}\n\n{second}\n"
    assert bind("f", Silent(text), names("x", "y"))(x=1, y=2) == (1, 2)
    with pytest.raises(BackendError, match=r"found \(x, plan\) or \(x, y\)"):
        bind("f", Silent(text), names("x", "z"))


@pytest.mark.parametrize("text", [None, "", "Multiply two things.", "g(x, y): another function", "f(x; y)"])
def test_without_any_text_the_documented_order_is_taken_and_said(text):
    found = bind("lib:f", Silent(text), names("a", "b"))
    assert found.form == "documented order" and found(b=2, a=1) == (1, 2)
    assert found.reason == "lib:f tells no signature: called in the documented order (a, b)"


def test_what_is_read_of_a_line():
    def shown(line):
        return [(p.name, p.kind.name, p.default is inspect.Parameter.empty) for p in parse_signature(line)]

    assert shown("f(at::Tensor& x, int64_t n=3, *, bool flag)") == [
        ("x", "POSITIONAL_OR_KEYWORD", True), ("n", "POSITIONAL_OR_KEYWORD", False), ("flag", "KEYWORD_ONLY", True)
    ]  # fmt: skip
    assert shown("f(a, /, b: Callable[[int], int] = lambda, *rest, **more) -> std::vector<int>") == [
        ("a", "POSITIONAL_ONLY", True), ("b", "POSITIONAL_OR_KEYWORD", False), ("rest", "VAR_POSITIONAL", True),
        ("more", "VAR_KEYWORD", True),
    ]  # fmt: skip
    assert shown("f()") == [] and parse_signature("no call") is None and parse_signature("f(a = 1, b)") is None


# ---- properties

WORDS = st.lists(
    st.text(string.ascii_lowercase, min_size=2, max_size=4).filter(lambda word: not keyword.iskeyword(word)),
    min_size=1, max_size=6, unique=True,
)  # fmt: skip
KINDS = st.sampled_from(["by position", "plain", "by keyword"])


def function(parameters: list[tuple[str, str, bool]]):
    """A function of these (name, kind, has a default) that returns what each of its parameters was given."""
    order = ["by position", "plain", "by keyword"]
    parameters = sorted(parameters, key=lambda p: order.index(p[1]))
    seen_default, parts, kinds = False, [], [kind for _, kind, _ in parameters]
    for i, (name, kind, has_default) in enumerate(parameters):
        if kind != "by keyword":
            seen_default = has_default = has_default or seen_default
        if kind == "by keyword" and "by keyword" not in kinds[:i]:
            parts.append("*")
        parts.append(f"{name}=None" if has_default else name)
        if kind == "by position" and "by position" not in kinds[i + 1 :]:
            parts.append("/")
    scope: dict = {}
    exec(f"def f({', '.join(parts)}): return dict(locals())", scope)
    return scope["f"]


@hypothesis.given(words=WORDS, data=st.data())
def test_whatever_is_bound_puts_every_value_in_the_place_of_its_name(words, data):
    parameters = [(word, data.draw(KINDS), data.draw(st.booleans())) for word in words]
    target = function(parameters)
    ours = data.draw(st.permutations(words))
    called = {word: f"our_{word}" for word in data.draw(st.sets(st.sampled_from(words)))}  # known under another name
    form = tuple(Given(called.get(word, word), (word,) if word in called else ()) for word in ours)
    values = {given.name: given.name for given in form}
    found = bind("f", target, form)(**values)
    assert found == {word: called.get(word, word) for word in words}


@hypothesis.given(words=WORDS, extra=st.booleans(), data=st.data())
def test_a_missing_or_a_surplus_value_is_an_error_that_shows_both(words, extra, data):
    parameters = [(word, data.draw(KINDS), False) for word in words]
    ours = [*words, "surplus"] if extra else words[:-1]
    with pytest.raises(BackendError) as caught:
        bind("f", function(parameters), names(*ours))
    text = str(caught.value)
    assert all(word in text for word in words) and "found (" in text and "needed (" in text and "\n" not in text


@hypothesis.given(words=WORDS, types=st.lists(st.sampled_from(["", ": int", ": at::Tensor", ": Dict[str, int]",
                                                               ": std::vector<std::pair<int, int>>"]), min_size=6))
def test_a_text_is_read_whatever_its_types(words, types):
    line = f"f({', '.join(word + kind for word, kind in zip(words, types, strict=False))}) -> None"
    assert [p.name for p in parse_signature(line)] == words


@hypothesis.given(count=st.integers(1, 6), given=st.integers(1, 6))
def test_nameless_places_are_filled_in_order_or_not_at_all(count, given):
    target = Silent(f"f({', '.join(f'arg{i}: at::Tensor' for i in range(count))}) -> None")
    form = names(*(f"value_of_{i}" for i in "abcdef"[:given]))
    if count != given:
        with pytest.raises(BackendError, match="places"):
            bind("f", target, form)
        return
    assert bind("f", target, form)(**{g.name: g.name for g in form}) == tuple(g.name for g in form)
