"""What a user may write after --backend, and what it chooses."""

import pytest

from workbench.errors import BackendError
from workbench.kernels import Kernels
from workbench.kernels.registry import OPERATIONS, parse_selection
from workbench.numerics import PRESETS, NumericsPolicy


def test_nothing_and_auto_leave_every_choice_to_the_ops():
    assert parse_selection(None).backends == {} == parse_selection("auto").backends
    assert parse_selection("auto:segsum").policy == "segsum"


def test_a_bare_name_applies_to_every_op_that_has_it():
    assert parse_selection("reference").backends == dict.fromkeys(OPERATIONS, "reference")
    assert parse_selection("torch_chunk:factored").backends == {"gated_delta_rule": "torch_chunk"}
    assert parse_selection("torch_chunk:factored").policy == "factored"


def test_an_op_named_by_itself_goes_before_a_bare_name_in_any_order():
    expected = dict.fromkeys(OPERATIONS, "reference") | {"experts": "torch_sorted"}
    assert parse_selection("reference, experts=torch_sorted").backends == expected
    assert parse_selection("experts=torch_sorted,reference").backends == expected
    without = {op: name for op, name in expected.items() if op != "experts"}
    assert parse_selection("reference,experts=auto").backends == without


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected \\[OP=\\]NAME"),
        (",", "expected \\[OP=\\]NAME"),
        ("gated_delta_rule=", "found 'gated_delta_rule='"),
        ("=torch_chunk", "found '=torch_chunk'"),
        ("torch_chunk:", "found 'torch_chunk:'"),
        ("nothing", "no op has a backend of that name, expected one of causal_conv1d"),
        ("norm=reference", "unknown op 'norm', expected one of alignment, attention"),
        ("experts=torch_chunk", "op experts: unknown backend 'torch_chunk', expected one of reference"),
        ("reference,torch_chunk", "op gated_delta_rule is named twice"),
        ("experts=torch_sorted,experts=reference", "op experts is named twice"),
        ("torch_chunk:safe,experts=torch_sorted:factored", "two policies, factored and safe"),
    ],
)
def test_what_cannot_be_meant_is_refused(text, message):
    with pytest.raises(BackendError, match=message):
        parse_selection(text)


def test_two_ways_to_name_a_policy_must_agree():
    assert Kernels("torch_chunk:factored", PRESETS["factored"]).policy == PRESETS["factored"]
    with pytest.raises(BackendError, match="names 'factored' and the policy itself is another"):
        Kernels("torch_chunk:factored", NumericsPolicy())
