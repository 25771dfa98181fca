"""FlashInfer's RMS norm with a zero-centred weight, `gemma_rmsnorm`.

    y = gemma_rmsnorm(input, weight, eps, ...)

input [rows, D], weight [D] of the same dtype, bfloat16 or float16; arithmetic in fp32, rounded once. Read from versions
0.6.13 and 0.7.4, flashinfer/norm/__init__.py. It has no gated norm over more than 64 channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.kernels.layout import row_major
from workbench.kernels.registry import Call
from workbench.kernels.requirements import Requires
from workbench.kernels.signatures import Given, foreign

NORM = "flashinfer.norm:gemma_rmsnorm"
REQUIRES = Requires(devices=("cuda",), capability=(8, 0), dtypes=(torch.bfloat16, torch.float16), symbols=(NORM,))

_GIVEN = (Given("input", ("x",)), Given("weight"), Given("eps", ("epsilon",)))
FORMS = {NORM: (_GIVEN,)}


def supports(call: Call) -> str | None:
    return "has no backward pass" if call.needs_grad else None


def run_rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """See `spec`."""
    norm = foreign(NORM, FORMS[NORM])
    rows = row_major(x.reshape(-1, x.shape[-1]))
    return norm(input=rows, weight=row_major(weight), eps=eps).reshape(x.shape)
