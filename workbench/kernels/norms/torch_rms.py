"""Both norms of `spec` from elementwise operations, fp32 arithmetic.

torch's own rms_norm widens, multiplies and narrows in ten operations of its own on a CPU; these are seven.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.kernels.registry import Call


def supports(call: Call) -> str | None:
    return None


def widen(x: Tensor) -> Tensor:
    """fp32, or fp64 if it is that."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def normalised(x: Tensor, eps: float) -> Tensor:
    """x rsqrt(mean(x^2) + eps), a new tensor. In-place steps work on temporaries that no gradient needs."""
    return x * x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()


def run_rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    y = normalised(widen(x), eps)
    return torch.addcmul(y, y, weight.to(y.dtype)).to(x.dtype)


def run_gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    y = normalised(widen(x), eps).to(x.dtype)
    gated = F.silu(gate.to(torch.promote_types(x.dtype, torch.float32)))
    return (gated.mul_(weight.to(gated.dtype)).mul_(y)).to(x.dtype)
