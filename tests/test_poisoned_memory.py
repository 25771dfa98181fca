"""The NaN poison itself: it must reach the package, whatever the allocator, and nobody else."""

import pytest
import torch

from workbench.kernels.poisoned_memory import ALLOCATORS, poisoned, poisoned_memory

CALLS = [
    "torch.empty(3, 2)",
    "torch.empty(3, requires_grad=True)",
    "torch.empty(3, dtype=torch.float16)",
    "torch.empty(3, dtype=torch.bfloat16)",
    "torch.empty(3, dtype=torch.complex64)",
    "torch.empty_like(torch.zeros(3))",
    "torch.empty_strided((2, 3), (3, 1))",
    "torch.empty_permuted((2, 3), (1, 0))",
    "torch.zeros(1).new_empty(3)",
    "torch.zeros(1).new_empty_strided((3,), (1,))",
    "[torch.empty(2) for _ in range(1)][0]",
    "(lambda: torch.empty(2))()",
]


def evaluate_as(module_name: str, expression: str) -> torch.Tensor:
    return eval(expression, {"__name__": module_name, "torch": torch})


@pytest.mark.parametrize("expression", CALLS)
def test_package_gets_nan(expression):
    assert evaluate_as("workbench.kernels.some_op", expression).isnan().all()


def test_integers_and_meta_tensors_are_left_alone():
    assert evaluate_as("workbench.model", "torch.empty(3, dtype=torch.int64)").dtype == torch.int64
    assert evaluate_as("workbench.model", "torch.empty(3, device='meta')").is_meta


@pytest.mark.parametrize("module_name", ["__main__", "torch.nn.modules.linear", "workbench_of_somebody_else"])
def test_other_code_gets_what_torch_gave(module_name):
    allocate = poisoned(torch.zeros)  # memory whose content is known
    outside = eval("allocate(3)", {"__name__": module_name, "allocate": allocate})
    inside = eval("allocate(3)", {"__name__": "workbench", "allocate": allocate})
    with poisoned_memory():  # a block in a block must not take the outer wrapper's own frame for the package's
        assert not eval("nested(3)", {"__name__": module_name, "nested": poisoned(poisoned(torch.zeros))}).isnan().any()
    assert (outside == 0).all() and inside.isnan().all()


def test_a_block_can_name_other_packages_and_leaves_torch_as_it_was():
    before = [getattr(owner, name) for owner, name in ALLOCATORS]
    with poisoned_memory(("somebody.kernels",)):
        assert evaluate_as("somebody.kernels.linear", "torch.empty(3)").isnan().all()
        assert evaluate_as("somebody.kernels", "torch.zeros(1).new_empty(3)").isnan().all()
        assert evaluate_as("workbench.kernels", "torch.empty(3)").isnan().all()  # every test runs in a block too
        allocate = torch.empty
        with pytest.raises(ZeroDivisionError), poisoned_memory(("somebody",)):
            assert torch.empty is not allocate
            _ = 1 / 0
        assert torch.empty is allocate
    assert [getattr(owner, name) for owner, name in ALLOCATORS] == before
