"""One expert after another as it is first written: its tokens searched, copied, computed, added where they belong.

A host sync for every expert, also for one that nobody chose: what the other backends are measured against.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.kernels.experts.spec import Chain, swiglu
from workbench.kernels.registry import Call


def supports(call: Call) -> str | None:
    return None


def run(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, *, chain: Chain) -> Tensor:
    out = torch.zeros_like(x)
    for expert in range(gate_up.shape[0]):
        token, rank = torch.where(experts == expert)
        if token.numel() == 0:
            continue
        hidden = swiglu(F.linear(x[token], gate_up[expert]))
        out = out.index_add(0, token, F.linear(hidden, down[expert]) * weights[token, rank, None])
    return out
