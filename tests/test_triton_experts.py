"""The grouped products of the experts and the counting sort before them: the contract, every size of tile, parts."""

import pytest
import torch
from triton_cases import triton_device  # noqa: F401 - a fixture

from workbench.kernels import conformance
from workbench.kernels.agreement import relative_error
from workbench.kernels.alignment import torch_sort, triton_count
from workbench.kernels.alignment.cases import choices
from workbench.kernels.experts import reference, spec, triton_grouped
from workbench.kernels.experts.spec import Chain
from workbench.kernels.workspace import Workspace

#: Cases of the contract that one dtype is enough for in the interpreter: as many tiles of another size.
FEW = ("1 token, top 2 of 8", "31 tokens, top 8 of 8", "31 tokens, top 1 of 5", "40 tokens, rows of whole 16 bytes",
       "40 tokens, experts of 128 x 64", "an empty tail")  # fmt: skip


def align(experts, count, block):
    return triton_count.run(experts, num_experts=count, block=block)


def on(device, arguments, dtype):
    return {
        name: value.to(device, dtype) if value.is_floating_point() else value.to(device)
        for name, value in arguments.items()
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_experts_keep_the_contract(triton_device, dtype):  # noqa: F811
    cases = None if dtype == torch.bfloat16 or triton_device == "cuda" else FEW
    found = conformance.conform("experts", "triton_grouped", device=triton_device, dtypes=[dtype], cases=cases)
    assert found.outcome == "passed", found.reason
    assert found.counts()[conformance.VALUE]["passed"] >= len(FEW)


def test_alignment_keeps_the_contract(triton_device):  # noqa: F811
    found = conformance.conform("alignment", "triton_count", device=triton_device)
    assert found.outcome == "passed", found.reason


@pytest.mark.parametrize("block", [1, 16])
def test_alignment_adds_up_the_parts(triton_device, monkeypatch, block):  # noqa: F811
    """Parts of 16 pairs, counts of four parts at a time, and one with pairs missing at the end."""
    monkeypatch.setattr(triton_count, "PARTS", ((0, 16),))
    monkeypatch.setattr(triton_count, "READ", 64)
    experts = choices(75, 12, 3).to(triton_device)
    found, expected = align(experts, 12, block), torch_sort.run(experts, num_experts=12, block=block)
    for part in ("rows", "position", "offsets"):
        assert torch.equal(getattr(found, part), getattr(expected, part)), part


@pytest.mark.parametrize("rows_per_expert", [10, 20, 40, 200])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_size_of_tile(triton_device, monkeypatch, rows_per_expert, dtype):  # noqa: F811
    """Of experts with no row, with one, with a tile and more; columns and depth that fill no tile."""
    from workbench.kernels.experts import triton_grouped_kernels as kernels

    chosen = kernels.settings
    monkeypatch.setattr(kernels, "settings", lambda _mean, *more: chosen(rows_per_expert, *more))
    case = on(triton_device, spec.example(tokens=150, experts=4, top_k=1, hidden=72, width=40), dtype)
    case["experts"] = torch.tensor([0] + [2] * 9 + [3] * 140, device=triton_device)[:, None]
    found = triton_grouped.run(**case, chain=Chain(align))
    expected = reference.run(**on(triton_device, case, torch.float64), chain=Chain(align))
    assert relative_error(found, expected) < 4 * torch.finfo(dtype).eps / 2
    assert torch.equal(found, triton_grouped.run(**case, chain=Chain(align)))


def test_what_has_no_whole_16_bytes_is_read_by_pointers_and_says_so(triton_device):  # noqa: F811
    for hidden, how in ((24, "tensor descriptors"), (20, "pointers")):
        case = on(triton_device, spec.example(hidden=hidden), torch.bfloat16)
        said = triton_grouped.path(**case, chain=Chain(align))
        assert said.endswith(f"weights by {how}")
        found = triton_grouped.run(**case, chain=Chain(align))
        expected = reference.run(**on(triton_device, case, torch.float64), chain=Chain(align))
        assert relative_error(found, expected) < 4 * torch.finfo(torch.bfloat16).eps / 2


def test_scratch_memory_is_that_of_the_chain(triton_device):  # noqa: F811
    case = on(triton_device, spec.example(), torch.float32)
    workspace = Workspace(triton_device)
    spec.declare_scratch(workspace, tokens=16, top_k=2, hidden=32, width=24, dtype=torch.float32)
    workspace.allocate()
    for tokens in (16, 3):
        part = case | {name: case[name][:tokens] for name in ("x", "weights", "experts")}
        found = triton_grouped.run(**part, chain=Chain(align, workspace))
        assert torch.equal(found, triton_grouped.run(**part, chain=Chain(align)))
