"""torch's grouped matrix product over the pairs sorted by expert: two launches for all experts, no host sync.

Whether a device has it is found by a small product there, not by a version number.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.kernels.experts.spec import Chain, swiglu
from workbench.kernels.experts.torch_sorted import weighted_sum
from workbench.kernels.registry import Call

#: torch.nn.functional's, or the private one of older releases; None before there was one.
_PRODUCT = getattr(F, "grouped_mm", getattr(torch, "_grouped_mm", None))

#: From this compute capability on torch has the product; measured on 9.0 alone.
GROUPED_CAPABILITY = (9, 0)

#: A row of any operand must be a whole multiple of this many bytes.
ALIGNED_BYTES = 16


@lru_cache(maxsize=32)
def refusal(dtype: torch.dtype, device: str) -> str | None:
    """Why torch's product cannot serve this dtype on this kind of device; it multiplies two small groups there."""
    if _PRODUCT is None:
        return f"torch {torch.__version__} has no grouped matrix product"
    if device == "cuda" and dtype != torch.bfloat16:
        return f"written for bfloat16 on CUDA; torch loops over the groups of {dtype} with a host sync"
    rows, weight = torch.full((8, 16), 0.5, dtype=dtype), torch.full((2, 16, 8), 0.5, dtype=dtype)
    try:
        ends = torch.tensor([3, 8], dtype=torch.int32, device=device)
        found = _PRODUCT(rows.to(device), weight.to(device), offs=ends).float().cpu()
    except (RuntimeError, NotImplementedError, AssertionError) as error:  # the last: torch without the device
        return f"torch's grouped product fails for {dtype} on {device}: {str(error).splitlines()[0]}"
    return None if bool((found == 4.0).all()) else f"torch's grouped product is wrong for {dtype} on {device}"


def supports(call: Call) -> str | None:
    if call.weight_shape:
        _, doubled, hidden = call.weight_shape
        for name, size in (("D", hidden), ("I", doubled // 2)):
            if size * call.dtype.itemsize % ALIGNED_BYTES:
                return f"needs rows of whole {ALIGNED_BYTES} bytes, found {name} = {size} of {call.dtype}"
    if call.machine.is_here:
        return refusal(call.dtype, call.device)
    return _rehearsed_refusal(call)


def _rehearsed_refusal(call: Call) -> str | None:
    """What a rehearsed card is known to lack; then the product must work where the tensors are."""
    if call.device == "cuda":
        found = call.machine.capability
        if call.dtype != torch.bfloat16:
            return f"written for bfloat16 on CUDA; torch loops over the groups of {call.dtype} with a host sync"
        if found is None or found < GROUPED_CAPABILITY:
            least, known = (".".join(map(str, pair or ("unknown",))) for pair in (GROUPED_CAPABILITY, found))
            return f"torch has a grouped product from compute capability {least} on, found {known}"
    return refusal(call.dtype, call.tensor_device)


def run(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, *, chain: Chain) -> Tensor:
    if not x.shape[0]:
        return torch.zeros_like(x)
    plan = chain.align(experts, gate_up.shape[0], 1)
    ends = plan.offsets[1:].to(torch.int32)
    rows = x.index_select(0, plan.tokens_of_rows())
    # Other strides are refused by torch; a copy of what lies in order costs nothing.
    hidden = swiglu(_PRODUCT(rows, gate_up.contiguous().transpose(1, 2), offs=ends))
    out = _PRODUCT(hidden, down.contiguous().transpose(1, 2), offs=ends)
    return weighted_sum(out, plan.position, weights).to(x.dtype)
