"""vLLM's norms: its C++ `rms_norm`, and the Triton gated norm that it took over from state-space models.

    rms_norm(out, input, weight, epsilon)
    y = rmsnorm_fn(x, weight, bias, z, eps, group_size, norm_before_gate, activation)

input, out [rows, D]. `rms_norm` multiplies by a plain weight in the dtype of its input: 1 + weight rounded to 16 bits
would lose up to half a unit of it, so that the call is made in fp32. The gated norm computes in fp32 and rounds once:
the contract's rounding of the norm before the weight is not made, which is within its tolerance. Read from version
0.26.0, vllm/_custom_ops.py and vllm/third_party/flash_linear_attention/ops/layernorm_guard.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.kernels.layout import row_major
from workbench.kernels.registry import Call
from workbench.kernels.requirements import Requires
from workbench.kernels.signatures import Given, foreign

NORM = "vllm._custom_ops:rms_norm"
GATED_NORM = "vllm.third_party.flash_linear_attention.ops.layernorm_guard:rmsnorm_fn"
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
REQUIRES = Requires(devices=("cuda",), capability=(7, 5), dtypes=_DTYPES, symbols=(NORM,))
GATED_REQUIRES = Requires(devices=("cuda",), capability=(8, 0), dtypes=_DTYPES, symbols=(GATED_NORM,))

_GIVEN = (Given("out"), Given("input"), Given("weight"), Given("epsilon", ("eps",)))
_GATED_GIVEN = (
    Given("x"), Given("weight"), Given("bias"), Given("z", ("gate", "g")), Given("eps"), Given("norm_before_gate"),
    Given("activation", is_needed=False),  # there is one alone in older versions, the one that is asked for here
)  # fmt: skip
FORMS = {NORM: (_GIVEN,), GATED_NORM: (_GATED_GIVEN,)}


def supports(call: Call) -> str | None:
    return "has no backward pass" if call.needs_grad else None


def run_rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """See `spec`."""
    rows = row_major(x.reshape(-1, x.shape[-1]).to(torch.float32))
    out = torch.empty_like(rows)
    foreign(NORM, FORMS[NORM])(out=out, input=rows, weight=row_major(1.0 + weight.to(torch.float32)), epsilon=eps)
    return out.reshape(x.shape).to(x.dtype)


def run_gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """See `spec`."""
    y = foreign(GATED_NORM, FORMS[GATED_NORM])(
        x=row_major(x), weight=row_major(weight), bias=None, z=row_major(gate), eps=eps, norm_before_gate=True,
        activation="swish",
    )  # fmt: skip
    return y.to(x.dtype)
