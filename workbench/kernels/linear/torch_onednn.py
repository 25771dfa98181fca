"""The projection of `spec` with oneDNN, which torch carries: for fp32 on a CPU without a backward pass.

torch sends fp32 matrix products to MKL, whose code for CPUs not made by Intel stops at AVX2: on a CPU with
AVX-512 oneDNN takes half the time. Its kernels are compiled on first use of a shape (0.3 ms), its call costs
more than MKL's, so that a few rows are left to MKL.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.kernels.registry import Call

#: torch's inductor calls it under this name; None in builds without oneDNN.
_PRODUCT = getattr(getattr(torch.ops.mkldnn, "_linear_pointwise", None), "default", None)

#: Below this many rows the overhead of the call is larger than what is saved.
LEAST_ROWS = 32


def refusal(call: Call, least_rows: int) -> str | None:
    """Why oneDNN's fp32 product cannot serve, or None; shared by the ops that are built on it."""
    if call.device != "cpu":
        return f"oneDNN serves the CPU, not {call.device}"
    if call.dtype != torch.float32:
        return f"written for float32; torch sends {call.dtype} products to oneDNN or its own code by itself"
    if call.needs_grad:
        return "torch's oneDNN product has no backward pass"
    if call.tokens < least_rows:
        return f"the call costs more than it saves below {least_rows} rows"
    if _PRODUCT is None or not torch.backends.mkldnn.is_available():
        return "this build of torch has no oneDNN"
    return None


def supports(call: Call) -> str | None:
    return refusal(call, LEAST_ROWS)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x weight^T for x [..., D] and weight [N, D], transposed at most: oneDNN's code for other strides crawls."""
    return _PRODUCT(x.contiguous(), weight, None, "none", [], "")


def run(x: Tensor, weight: Tensor) -> Tensor:
    return product(x, weight.contiguous())
