"""Launches, host syncs and peak memory of a computation, counted without a GPU."""

import torch

from workbench.analysis.launches import count_launches
from workbench.analysis.memory import peak_tensor_bytes
from workbench.kernels import Kernels
from workbench.kernels.gated_delta_rule import spec
from workbench.numerics import NumericsPolicy


def test_views_and_allocations_launch_nothing():
    x = torch.ones(4, 4)
    found = count_launches(lambda: (x.view(2, 8), x.t(), torch.empty(3), x[1:], x + 1, x @ x))
    assert (found.kernels, found.syncs) == (2, 0) and set(found.by_op) == {"add", "mm"}


def test_reading_a_value_is_a_sync():
    x = torch.arange(4.0)
    found = count_launches(lambda: (x.sum().item(), x.nonzero(), bool((x > 1).any())))
    assert found.syncs == 3


def launches(backend: str, solver: str, chunk: int) -> int:
    inputs = spec.example(tokens=512)
    kernels = Kernels({"gated_delta_rule": backend}, NumericsPolicy(solver=solver, chunk=chunk))
    found = count_launches(lambda: kernels.gated_delta_rule(**inputs))
    assert found.syncs == 0
    return found.kernels


def test_a_row_loop_launches_by_the_row_and_two_phases_save_launches():
    assert launches("torch_chunk", "row_loop", 64) > 2 * launches("torch_chunk", "block_substitution", 64)
    assert launches("torch_chunk", "solve_triangular", 64) < launches("torch_chunk", "block_substitution", 64)
    assert launches("torch_chunk", "solve_triangular", 16) > 2 * launches("torch_chunk", "solve_triangular", 64)
    for solver in ("row_loop", "block_substitution", "solve_triangular"):
        assert launches("torch_interleaved", solver, 64) > 3 * launches("torch_chunk", solver, 64)


def test_peak_memory_counts_what_is_alive_at_once():
    def work():
        a = torch.zeros(1000)
        b = a + 1
        del a
        return (b * 2)[:10]

    assert peak_tensor_bytes(work) == 8000
    kept: list = []
    assert peak_tensor_bytes(lambda: kept.extend(torch.zeros(100) for _ in range(5))) == 5 * 400
