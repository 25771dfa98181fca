"""Both norms of `spec` with torch's rms_norm, fp32 arithmetic."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.kernels.registry import Call


def supports(call: Call) -> str | None:
    return None


def run_rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    compute = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(compute), weight.shape, 1.0 + weight.to(compute), eps).to(x.dtype)


def run_gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    compute = torch.promote_types(x.dtype, torch.float32)
    normalised = F.rms_norm(x.to(compute), weight.shape, None, eps).to(x.dtype)
    return (weight.to(compute) * normalised * F.silu(gate.to(compute))).to(x.dtype)
