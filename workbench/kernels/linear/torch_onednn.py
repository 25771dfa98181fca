"""The projection of `spec` with oneDNN, which torch carries: for fp32 on a CPU without a backward pass.

torch sends fp32 matrix products to MKL, whose code for CPUs not made by Intel stops at AVX2: on a CPU with
AVX-512 oneDNN takes half the time, and reads the matrix of a single row 12 % faster. Its kernels are compiled on
first use of a shape (0.3 ms), its call costs more than MKL's, so that the automatic order leaves small products to MKL.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.kernels.registry import Call

#: torch's inductor calls it under this name; None in builds without oneDNN.
_PRODUCT = getattr(getattr(torch.ops.mkldnn, "_linear_pointwise", None), "default", None)


def refusal(call: Call) -> str | None:
    """Why oneDNN's fp32 product cannot serve, or None; shared by the ops that are built on it."""
    if call.device != "cpu":
        return f"oneDNN serves the CPU, not {call.device}"
    if call.dtype != torch.float32:
        return f"written for float32; torch sends {call.dtype} products to oneDNN or its own code by itself"
    if call.needs_grad:
        return "torch's oneDNN product has no backward pass"
    if _PRODUCT is None or not torch.backends.mkldnn.is_available():
        return "this build of torch has no oneDNN"
    return None


def supports(call: Call) -> str | None:
    return refusal(call)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x weight^T for x [..., D] and weight [N, D], transposed at most: oneDNN's code for other strides crawls."""
    return _PRODUCT(x.contiguous(), weight, None, "none", [], "")


def run(x: Tensor, weight: Tensor) -> Tensor:
    return product(x, weight.contiguous())
