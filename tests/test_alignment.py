"""Tests of the op `alignment`: every backend lays out the same rows, and nothing is read back."""

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from workbench.analysis.launches import count_launches
from workbench.kernels import Kernels
from workbench.kernels.alignment.cases import choices
from workbench.kernels.alignment.spec import most_rows
from workbench.kernels.registry import OPERATIONS, Call
from workbench.numerics import NumericsPolicy

CALL = Call("alignment", "cpu", torch.int64, 100, False, False, NumericsPolicy())
#: Those that can run where the tests run; the conformance tests say of the others why not.
BACKENDS = [
    name for name, backend in OPERATIONS["alignment"].backends.items()
    if name != "reference" and backend.refusal(CALL) is None
]  # fmt: skip


def align(name, experts, count, block):
    return Kernels({"alignment": name}).alignment(experts, count, block)


def test_by_hand():
    """Experts 2 and 0 of token 0, 2 and 1 of token 1; nobody chose 3. Blocks of two rows; 4 stands for filling."""
    for name in ("reference", *BACKENDS):
        found = align(name, torch.tensor([[2, 0], [2, 1]]), 4, 2)
        assert found.offsets.tolist() == [0, 2, 4, 6, 6], name
        assert found.rows.tolist() == [1, 4, 3, 4, 0, 2, 4, 4]
        assert found.position.tolist() == [[4, 0], [5, 2]]
        assert found.tokens_of_rows().tolist() == [0, 0, 1, 0, 0, 1, 0, 0]
        assert found.experts_of_blocks().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("name", BACKENDS)
@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    tokens=st.integers(0, 40), count=st.integers(1, 12), block=st.sampled_from([1, 2, 8, 16]), seed=st.integers(0, 99),
    data=st.data(),
)  # fmt: skip
def test_every_backend_lays_out_what_the_arbiter_does(name, tokens, count, block, seed, data):
    experts = choices(tokens, count, data.draw(st.integers(1, count)), seed)
    found, expected = (align(which, experts, count, block) for which in (name, "reference"))
    for part in ("rows", "position", "offsets"):
        assert getattr(found, part).dtype == torch.int64
        assert torch.equal(getattr(found, part), getattr(expected, part)), part


@pytest.mark.parametrize("block", [1, 16])
@pytest.mark.parametrize("name", ["reference", *BACKENDS])
def test_each_pair_has_one_row_of_its_expert_and_blocks_have_one_expert(name, block):
    experts = choices(100, 256, 8)
    found = align(name, experts, 256, block)
    assert found.rows.shape == (most_rows(800, 256, block),)
    assert torch.equal(found.rows[found.position.flatten()], torch.arange(800))
    assert bool((found.offsets % block == 0).all())
    blocks = found.experts_of_blocks()
    real = found.rows < 800
    row = torch.arange(len(found.rows))
    assert torch.equal(blocks[row[real] // block], experts.flatten()[found.rows[real]])
    assert bool((blocks >= 0).all()) and bool((blocks < 256).all())


@pytest.mark.parametrize("name", BACKENDS)
def test_nothing_is_read_back(name):
    experts = choices(64, 32, 4)
    assert count_launches(lambda: align(name, experts, 32, 16)).syncs == 0


def test_all_tokens_on_one_set_and_one_token():
    for name in ("reference", *BACKENDS):
        found = align(name, torch.tensor([[5, 3]] * 7), 6, 1)
        assert found.offsets.tolist() == [0, 0, 0, 0, 7, 7, 14]
        assert found.rows.tolist() == [*range(1, 14, 2), *range(0, 14, 2)]
        assert align(name, torch.tensor([[1]]), 2, 1).rows.tolist() == [0]
