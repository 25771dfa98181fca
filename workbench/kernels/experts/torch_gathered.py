"""The weights of the experts hit are gathered, all pairs multiplied in one batch: for few tokens, no host sync."""

from __future__ import annotations

from torch import Tensor

from workbench.kernels.experts.spec import Chain, swiglu
from workbench.kernels.registry import Call


def supports(call: Call) -> str | None:
    return None


def run(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, *, chain: Chain) -> Tensor:
    hidden = swiglu((gate_up[experts] @ x[:, None, :, None]).squeeze(-1))  # [tokens, A, I]
    out = (down[experts] @ hidden[..., None]).squeeze(-1)  # [tokens, A, D]
    return (out * weights[..., None]).sum(1).to(x.dtype)
