"""One token-expert pair after another, matrix times vector: for few tokens on a CPU.

Nothing is copied: a gather of the experts' weights would cost ten times what reading them costs. The expert numbers
are read on the host, which would be a synchronisation on a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.kernels.experts.spec import Chain, swiglu
from workbench.kernels.registry import Call


def supports(call: Call) -> str | None:
    return None if call.device == "cpu" else f"reads expert numbers on the host: a synchronisation on {call.device}"


def run(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, *, chain: Chain) -> Tensor:
    outs = []
    for row, weight, chosen in zip(x.unbind(), weights.unsqueeze(-1).unbind(), experts.tolist(), strict=True):
        hidden = swiglu(torch.stack([torch.mv(gate_up[expert], row) for expert in chosen])) * weight  # [A, I]
        out = torch.mv(down[chosen[0]], hidden[0])
        for rank in range(1, len(chosen)):
            out = torch.addmv(out, down[chosen[rank]], hidden[rank])
        outs.append(out)
    if not outs:
        return torch.zeros_like(x)
    return outs[0][None] if len(outs) == 1 else torch.stack(outs)
