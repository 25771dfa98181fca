"""Every expert over every token, weighted by zero where it was not chosen: E / A times the work, no host sync.

Shapes do not depend on the routing, so it can be captured in a CUDA graph; training the miniature uses it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.kernels.experts.spec import Chain, swiglu
from workbench.kernels.registry import Call


def supports(call: Call) -> str | None:
    return None


def run(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, *, chain: Chain) -> Tensor:
    count = gate_up.shape[0]
    share = torch.zeros(x.shape[0], count, dtype=weights.dtype, device=x.device).scatter(1, experts, weights)
    hidden = swiglu(x[None] @ gate_up.transpose(1, 2))  # [E, tokens, I]
    # The weight goes onto the narrow side: a NaN of an expert that was not chosen still reaches the sum as 0 * NaN.
    hidden = hidden * share.T[..., None]
    return torch.einsum("eti,edi->td", hidden, down).to(x.dtype)
