"""Causal convolution as torch's depthwise convolution in channels-last layout: for fp32 on a CPU.

[B, T, channels] is what channels-last means for an image of height 1 and width T, so that nothing is transposed and
oneDNN does all taps in one pass over memory.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.kernels.causal_conv.spec import with_window
from workbench.kernels.causal_conv.torch_shift import packed_buffer, packed_rows
from workbench.kernels.registry import Call


def supports(call: Call) -> str | None:
    if call.device != "cpu":
        return f"chosen for oneDNN on a CPU, not for {call.device}"
    if call.dtype != torch.float32:
        return f"written for float32: {call.dtype} would be rounded before the activation"
    return None


def depthwise(x: Tensor, weight: Tensor) -> Tensor:
    """[B, T + width - 1, channels] -> [B, T, channels], before the activation."""
    image = x.transpose(1, 2).unsqueeze(2)  # [B, channels, 1, T + width - 1], channels last in memory
    return F.conv2d(image, weight[:, None, None], groups=weight.shape[0]).squeeze(2).transpose(1, 2)


def run(
    x: Tensor, weight: Tensor, *, window: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    width = weight.shape[1]
    if cu_seqlens is None:
        extended = with_window(x, window, x.shape[0], width)
        y, new_window = depthwise(extended, weight), extended[:, x.shape[1] :]
    else:
        bounds = cu_seqlens.tolist()
        buffer = packed_buffer(x, window, bounds, width)
        rows, window_rows = packed_rows(bounds, width, x.device)
        y = depthwise(buffer[None], weight).index_select(1, rows - (width - 1))
        new_window = buffer[window_rows]
    return F.silu(y, inplace=not y.requires_grad), new_window.clone()
