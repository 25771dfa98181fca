"""The norm kernel: both contracts, words of flags, and rows as they lie."""

import pytest
import torch
from triton_cases import triton_device  # noqa: F401 - a fixture

from workbench.kernels import conformance
from workbench.kernels.norms import reference, triton_rms
from workbench.kernels.norms.triton_rms import rows_of


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("op", ["rms_norm", "gated_rms_norm"])
def test_it_keeps_the_contract(triton_device, op, dtype):  # noqa: F811
    found = conformance.conform(op, "triton_rms", device=triton_device, dtypes=[dtype])
    assert found.outcome == "passed", found.reason
    assert (conformance.FLAGS in found.counts()) == (op == "gated_rms_norm")


def test_rows_wider_than_a_program_are_read_in_parts(triton_device, monkeypatch):  # noqa: F811
    from workbench.kernels.norms import triton_rms_kernels

    monkeypatch.setattr(triton_rms_kernels, "COLUMNS_AT_ONCE", 64)
    x, gate = torch.randn(2, 3, 150, device=triton_device), torch.randn(2, 3, 150, device=triton_device)
    weight = torch.randn(150, device=triton_device)
    words = torch.full((1, 2), -1, dtype=torch.int32, device=triton_device)
    found = triton_rms.run_gated_rms_norm(x, gate, weight, eps=1e-6, flags=words)
    assert (found - reference.run_gated_rms_norm(x, gate, weight, eps=1e-6)).abs().max() < 1e-5
    assert words.view(torch.float32).tolist() == [[found.max().item(), -found.min().item()]]
    found = triton_rms.run_rms_norm(x, weight, eps=1e-6)
    assert (found - reference.run_rms_norm(x, weight, eps=1e-6)).abs().max() < 1e-5


def test_a_part_of_a_projection_is_read_where_it_lies():
    wide = torch.randn(2, 5, 3 * 4 * 8)
    gate = wide[..., 32:64].view(2, 5, 4, 8)
    rows = rows_of(gate)
    assert rows.x is gate and (rows.heads, rows.outer, rows.inner) == (4, 96, 8)
    for x in (gate, wide, wide[0, 0], gate[:, :1], gate.transpose(0, 1), wide[:, ::2], gate[..., ::2], wide[:, :, :1]):
        rows = rows_of(x)
        count, flat = x.numel() // x.shape[-1], x.reshape(-1, x.shape[-1])
        starts = [r // rows.heads * rows.outer + r % rows.heads * rows.inner for r in range(count)]
        memory = rows.x.as_strided((max(starts) + x.shape[-1],), (1,))
        assert all(torch.equal(memory[a : a + x.shape[-1]], row) for a, row in zip(starts, flat, strict=True)), x.shape
