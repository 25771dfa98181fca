"""Contract of the causal depthwise convolution with SiLU, in front of the gated delta rule.

    y_t = silu(sum_j weight[:, j] * x_{t - (width - 1) + j}),   j = 0 ... width - 1

``run(x, weight, *, window, cu_seqlens) -> (y, window)``

x          [B, T, channels]
weight     [channels, width]          weight[:, width - 1] multiplies the current token
window     [S, width - 1, channels]   the last inputs of each of S sequences, oldest first; None is zero
cu_seqlens [S + 1]                    int, on the CPU; then B is 1
y          [B, T, channels]           dtype of x, accumulated in fp32 or better
window     [S, width - 1, channels]   dtype of x, a new tensor: raw inputs, before convolution and SiLU
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.kernels.registry import Call

OP = "causal_conv"


#: Below this many tokens the shifted sums are as quick as a convolution.
DEPTHWISE_TOKENS = 32


def automatic_order(call: Call) -> tuple[str, ...]:
    if call.tokens >= DEPTHWISE_TOKENS:
        return ("torch_depthwise", "torch_shift")
    return ("torch_shift", "torch_depthwise")


def with_window(x: Tensor, window: Tensor | None, sequences: int, width: int) -> Tensor:
    """The window in front of each sequence of an unpacked x: [S, width - 1 + T, channels]."""
    if window is None:
        window = x.new_zeros(sequences, width - 1, x.shape[-1])
    return torch.cat([window, x], dim=1)
