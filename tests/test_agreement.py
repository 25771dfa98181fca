"""The measures of agreement, by hand: a result that is not finite is infinitely far."""

import math

import pytest
import torch

from workbench.errors import InputError
from workbench.kernels.agreement import first_bad_row, logit_difference, relative_error, worst_row

BAD = torch.tensor([1.0, math.nan, 1.0])


def test_relative_error_is_of_the_whole_tensor():
    reference = torch.tensor([3.0, 4.0])
    assert relative_error(torch.tensor([3.0, 4.5]), reference) == pytest.approx(0.1)
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0.0
    assert relative_error(torch.ones(2), torch.zeros(2)) == math.inf


def test_what_is_not_finite_is_infinitely_far():
    for measure in (relative_error, logit_difference):
        assert measure(BAD, torch.ones(3)) == math.inf
        assert measure(torch.tensor([1.0, math.inf, 1.0]), torch.ones(3)) == math.inf
    index, distance = worst_row(BAD[:, None], torch.ones(3, 1))
    assert (index, distance) == ((1,), math.inf)


@pytest.mark.parametrize("measure", [relative_error, logit_difference, worst_row])
def test_a_reference_must_be_finite_and_of_the_same_shape(measure):
    with pytest.raises(InputError, match="finite reference"):
        measure(torch.ones(3), BAD)
    with pytest.raises(InputError, match=r"expected shape \(3,\), found \(2,\)"):
        measure(torch.ones(2), torch.ones(3))


def test_worst_row_is_judged_by_the_largest_row():
    reference = torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
    index, distance = worst_row(reference + torch.tensor([[0.1, 0.0], [0.0, 0.1], [0.5, 0.0]]), reference)
    assert index == (2,) and distance == pytest.approx(0.25)
    assert worst_row(reference, reference) == ((0,), 0.0)


def test_logit_difference_and_first_bad_row():
    assert logit_difference(torch.tensor([1.0, -4.0]), torch.tensor([1.5, -5.0])) == pytest.approx(0.2)
    assert logit_difference(torch.zeros(2), torch.zeros(2)) == 0.0
    assert logit_difference(torch.ones(2), torch.zeros(2)) == math.inf
    x = torch.ones(2, 5, 3)
    assert first_bad_row(x) is None
    x[1, 3, 0], x[0, 4, 1] = math.nan, math.inf
    assert first_bad_row(x) == 3
