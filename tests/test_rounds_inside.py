"""A backend that rounds inside is held to the rounding of its inputs, in the dtypes that have one, and no further."""

import torch

from workbench.kernels.conformance import conform
from workbench.kernels.gated_delta_rule import reference
from workbench.kernels.registry import Backend

CASE = "heads of 128, from zero"


def with_narrow_state(*arguments, **named):
    """The arbiter with its state rounded to the dtype of the inputs, as tensor cores leave it."""
    out, state = reference.run(*arguments, **named)
    return out, state.to(arguments[0].dtype).to(state.dtype)


def of(rounds_inside: bool, dtype: torch.dtype, run=with_narrow_state) -> list:
    backend = Backend("gated_delta_rule", "narrow", run, lambda call: None, rounds_inside=rounds_inside)
    found = conform("gated_delta_rule", backend, dtypes=[dtype], cases=[CASE])
    return [row for row in found.rows if row.check == "value against the arbiter" and row.outcome == "failed"]


def test_a_state_of_bfloat16_is_wrong_unless_the_backend_says_so():
    (row,) = of(False, torch.bfloat16)
    assert row.output == "state" and 1e-3 < row.error < 4e-3
    assert of(True, torch.bfloat16) == []


def test_saying_so_excuses_nothing_else():
    def off_by_a_percent(*arguments, **named):
        out, state = with_narrow_state(*arguments, **named)
        return out, state * 1.01

    assert [row.output for row in of(True, torch.bfloat16, off_by_a_percent)] == ["state"]
    in_fp32 = lambda *arguments, **named: (  # noqa: E731
        reference.run(*arguments, **named)[0], reference.run(*arguments, **named)[1].bfloat16().float(),
    )  # fmt: skip
    assert [row.output for row in of(True, torch.float32, in_fp32)] == ["state"]
