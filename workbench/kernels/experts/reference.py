"""The arbiter: the sum of `spec` in float64, one token-expert pair after another."""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.kernels.experts.spec import Chain, swiglu
from workbench.kernels.registry import Call


def supports(call: Call) -> str | None:
    return None


def run(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, *, chain: Chain) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token, chosen in enumerate(experts.tolist()):
        for rank, expert in enumerate(chosen):
            hidden = swiglu(gate_up[expert].double() @ x[token].double())
            out[token] += weights[token, rank].double() * (down[expert].double() @ hidden)
    return out.to(x.dtype)
