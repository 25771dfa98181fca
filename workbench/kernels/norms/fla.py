"""flash-linear-attention's gated RMS norm, `rms_norm_gated`.

    y = rms_norm_gated(x, g, weight, bias, activation, residual, prenorm, residual_in_fp32, eps)

x, g [..., W], weight [W]; norm, weight and silu(g) in fp32, rounded once: the contract's rounding of the norm before
the weight is not made, which is within its tolerance. Read from version 0.6.0, fla/modules/norm/fused_norm_gate.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.kernels.layout import row_major
from workbench.kernels.registry import Call
from workbench.kernels.requirements import Requires
from workbench.kernels.signatures import Given, foreign

NORM = "fla.modules.norm.fused_norm_gate:rms_norm_gated"
REQUIRES = Requires(
    devices=("cuda",), capability=(8, 0), dtypes=(torch.bfloat16, torch.float16, torch.float32),
    symbols=(NORM,),
)  # fmt: skip

_GIVEN = (Given("x"), Given("g", ("gate", "z")), Given("weight"), Given("bias"), Given("activation"), Given("eps"))
FORMS = {NORM: (_GIVEN,)}


def supports(call: Call) -> str | None:
    return "its backward pass is not held to the contract; name torch_rms for training" if call.needs_grad else None


def run_gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """See `spec`."""
    norm = foreign(NORM, FORMS[NORM])
    y = norm(
        x=row_major(x), g=row_major(gate), weight=row_major(weight), bias=None, activation="swish", eps=eps
    )
    return y.to(x.dtype)
