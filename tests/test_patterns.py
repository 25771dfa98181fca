"""Every pattern of bad rows is made by a fault that it allows, and never by one that it rules out."""

import math

import pytest
import torch
from torch import Tensor

from workbench.analysis import patterns
from workbench.analysis.patterns import PATTERNS, read_pattern, read_requests
from workbench.errors import InputError
from workbench.kernels import Kernels
from workbench.kernels.gated_delta_rule import spec
from workbench.kernels.gated_delta_rule.reference import oracle

T, V = 192, 4


def inputs(log_decay: float = -0.05, **changes) -> dict:
    return spec.example(tokens=T, log_decay=log_decay, **changes)


def run(case: dict, policy: str = "safe", backend: str = "torch_chunk", **named) -> Tensor:
    """The output [T, V, W]."""
    return Kernels({"gated_delta_rule": backend}, policy).gated_delta_rule(**case, **named)[0][0]


def bad_rows(out: Tensor, case: dict, **named) -> Tensor:
    """Rows that are not finite, or off by a thousandth of the root mean square row."""
    exact = oracle(**case, **named)[0][0]
    off = (out.double() - exact).norm(dim=-1)
    return ~torch.isfinite(out).all(-1) | (off > 1e-3 * exact.norm(dim=-1).square().mean().sqrt())


def reading(case: dict, policy: str = "safe", backend: str = "torch_chunk", gates: bool = False, **named):
    bad = bad_rows(run(case, policy, backend, **named), case)
    return read_pattern(bad, chunk=64, key_heads=2, log_decay=case["log_decay"][0] if gates else None)


def assert_allows(found, name: str, cause: str) -> None:
    assert found.pattern.name == name
    assert cause in found.allows and cause not in found.pattern.rules_out
    assert PATTERNS[name].rows in str(found)


def test_a_sound_output_has_no_pattern():
    found = reading(inputs())
    assert found.pattern.name == "none" and found.first is None and str(found) == "no row is wrong"


def test_factored_gates_spoil_every_row_and_one_strong_head_only_its_own():
    assert_allows(reading(inputs(-1.5), "factored"), "every_row", patterns.FACTORED)
    case = inputs()
    case["log_decay"][:, 64:128, 2] = -1.5
    found = reading(case, "factored")
    assert_allows(found, "from_chunk_on", patterns.FACTORED)
    assert (found.numbers, found.heads.name, found.first) == ((2,), "some", 64)


def test_a_where_mask_leaves_the_first_rows_sound():
    case = inputs(0.0)
    case["log_decay"][:, 64:128] = -1.39
    found = reading(case, "factored_mask_after")
    assert found.first == 127 and found.pattern.name in ("from_token_on", "last_rows")
    assert patterns.FACTORED_WHERE in found.allows


def test_a_mask_multiplied_after_exp_spoils_the_first_rows():
    case = inputs(-1.45)
    bad = bad_rows(run(case, "multiply_mask"), case)
    assert bad[:, 0].nonzero().flatten().tolist() == [0, 1, 64, 65, 128, 129]
    assert_allows(read_pattern(bad, chunk=64), "first_rows", patterns.MULTIPLIED_MASK)


def test_the_rows_before_a_strong_gate():
    """numerics: mask after exp on a backend that multiplies, one gate of -90 at token 70: rows 64 to 69."""
    bad = torch.zeros(T, V, dtype=torch.bool)
    bad[64:70] = True
    gates = torch.full((T, V), -0.01)
    gates[70] = -90.0
    found = read_pattern(bad, chunk=64, log_decay=gates)
    assert_allows(found, "first_rows", patterns.MASK_AFTER)
    assert found.gate == 70 and found.allows[0] == patterns.MASK_AFTER and patterns.BOUNDARY not in found.allows
    assert read_pattern(bad, chunk=64).gate is None


@pytest.mark.parametrize(("backend", "first", "name"), [("torch_chunk", 64, "from_chunk_on"),
                                                        ("torch_recurrent", 77, "from_token_on")])  # fmt: skip
def test_a_nan_input_spoils_from_its_token_on_in_the_recurrence_and_from_its_chunk_on_in_chunks(backend, first, name):
    case = inputs()
    sound = {key: x.clone() for key, x in case.items()}
    case["beta"][:, 77] = math.nan
    bad = bad_rows(run(case, backend=backend), sound)
    found = read_pattern(bad, chunk=64)
    assert_allows(found, name, patterns.NAN_INPUT)
    assert found.first == first and found.heads.name == "all"


def test_another_code_path_from_a_row_count_on():
    case = inputs()
    wrong = run(case).clone()
    wrong[64:] *= 1.5
    assert_allows(read_pattern(bad_rows(wrong, case), chunk=64), "from_chunk_on", patterns.DISPATCH)


def test_a_state_that_is_not_handed_on():
    case = inputs()
    kernels = Kernels(policy="safe")
    half = {key: x[:, :128] for key, x in case.items()}, {key: x[:, 128:] for key, x in case.items()}
    out = torch.cat([kernels.gated_delta_rule(**part)[0][0] for part in half])  # the second from a zero state
    found = read_pattern(bad_rows(out, case), chunk=64)
    assert patterns.HANDOFF in found.allows and found.first == 128 and found.pattern.name == "from_chunk_on"


def test_heads_that_are_tiled_and_not_repeated():
    """2 key and 4 value heads: 0 and 3 are right, 1 and 2 are not."""
    case = inputs()
    tiled = {**case, **{name: case[name].repeat(1, 1, 2, 1) for name in ("q", "k")}}
    bad = bad_rows(run(tiled), case)
    found = read_pattern(bad, chunk=64, key_heads=2)
    assert found.numbers == (1, 2) and found.heads.name == "mapped" and found.allows[0] == patterns.HEAD_MAP


def test_edges_of_chunks_and_single_tokens():
    for rows, name, cause in (
        ([64, 128], "chunk_starts", patterns.BOUNDARY),
        ([17], "one_token", patterns.ADDRESSING),
        (range(64, 128), "whole_chunks", patterns.UNINITIALISED),
        ([3, 40, 41, 99], "scattered", patterns.ADDRESSING),
        ([*range(60, 64), *range(124, 128)], "last_rows", patterns.BOUNDARY),
    ):
        bad = torch.zeros(T, V, dtype=torch.bool)
        bad[list(rows)] = True
        assert_allows(read_pattern(bad, chunk=64), name, cause)


def test_no_pattern_allows_what_it_rules_out_and_each_is_reachable():
    for pattern in PATTERNS.values():
        assert not set(pattern.allows) & set(pattern.rules_out)
    assert len(PATTERNS) == 10


def test_requests_one_after_another():
    assert [read_requests(bad) for bad in ([True, False, False], [False, True, True], [True] * 3, [False] * 2,
                                           [False, True, False])] == [
        "first_only", "after_first", "all", "none", "some"
    ]  # fmt: skip
    assert patterns.REQUEST_PATTERNS["first_only"][1] == (patterns.UNINITIALISED,)
    with pytest.raises(InputError, match="expected at least one request"):
        read_requests([])


def test_bad_arguments_are_refused_in_one_line():
    with pytest.raises(InputError, match=r"expected bad rows \[T, V\] of bool"):
        read_pattern(torch.zeros(3, 2), chunk=64)
    bad = torch.zeros(3, 2, dtype=torch.bool)
    with pytest.raises(InputError, match=r"log_decay: expected \(3, 2\) as bad"):
        read_pattern(bad, chunk=64, log_decay=torch.zeros(1, 3, 2))
    for key_heads in (-1, 0, 3):
        with pytest.raises(InputError, match="key_heads: expected a divisor of 2 heads"):
            read_pattern(bad, chunk=64, key_heads=key_heads)
    with pytest.raises(InputError, match="chunk: expected at least 1"):
        read_pattern(torch.zeros(3, 2, dtype=torch.bool), chunk=0)
