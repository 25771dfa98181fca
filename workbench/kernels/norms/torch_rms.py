"""Both norms of `spec` from elementwise operations, fp32 arithmetic.

torch's own rms_norm takes ten operations on a CPU, these are five: a token of decode is bound by their number.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.kernels.registry import Call


def supports(call: Call) -> str | None:
    return None


def widen(x: Tensor) -> Tensor:
    """fp32, or fp64 if it is that."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in `dtype`; a cast that changes nothing is not free when a token is all there is to do."""
    return x if x.dtype == dtype else x.to(dtype)


@functools.lru_cache(maxsize=32)
def constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # a tensor of inference mode could not take part in training later
        return torch.tensor(value, dtype=dtype, device=device)


def normalised(x: Tensor, eps: float) -> Tensor:
    """x rsqrt(mean(x^2) + eps), a new tensor."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    mean_square = torch.addcmul(constant(eps, x.dtype, x.device), norm, norm, value=1.0 / x.shape[-1])
    return x * mean_square.rsqrt_()


def run_rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    y = normalised(widen(x), eps)
    weight = narrow(weight, y.dtype)
    needs_grad = torch.is_grad_enabled() and (y.requires_grad or weight.requires_grad)
    y = torch.addcmul(y, y, weight) if needs_grad else y.addcmul_(y, weight)
    return narrow(y, x.dtype)


def run_gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    y = narrow(normalised(widen(x), eps), x.dtype)
    gated = F.silu(widen(gate))
    return narrow(gated.mul_(narrow(weight, gated.dtype)).mul_(y), x.dtype)
