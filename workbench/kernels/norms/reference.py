"""The arbiters: both norms of `spec` in float64 (the rounding inside the gated one is part of its definition)."""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.kernels.registry import Call


def supports(call: Call) -> str | None:
    return None


def run_rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    wide = x.double()
    return (wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + eps) * (1.0 + weight.double())).to(x.dtype)


def run_gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    wide = x.double()
    normalised = (wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype).double()
    gate = gate.double()
    return (weight.double() * normalised * gate * torch.sigmoid(gate)).to(x.dtype)
