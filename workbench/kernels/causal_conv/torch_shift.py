"""Causal convolution as `width` shifted multiply-adds in [B, T, channels] layout: no transposition, any device."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.kernels.causal_conv.spec import with_window
from workbench.kernels.registry import Call


def supports(call: Call) -> str | None:
    return None


def packed_rows(bounds: list[int], width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Row numbers in the buffer that holds, for each sequence, its window and then its tokens.

    Returns (the row of each token [total], the rows of each new window [S, width - 1]).
    """
    tokens, windows = [], []
    for sequence, (start, stop) in enumerate(itertools.pairwise(bounds)):
        shift = (sequence + 1) * (width - 1)
        tokens.append(torch.arange(start + shift, stop + shift))
        windows.append(torch.arange(stop + shift - (width - 1), stop + shift))
    return torch.cat(tokens).to(device), torch.stack(windows).to(device)


def packed_buffer(x: Tensor, window: Tensor | None, bounds: list[int], width: int) -> Tensor:
    """The window and the tokens of each sequence in turn, [total + S (width - 1), channels]."""
    sequences = len(bounds) - 1
    if window is None:
        window = x.new_zeros(sequences, width - 1, x.shape[-1])
    parts = [part for i in range(sequences) for part in (window[i], x[0, bounds[i] : bounds[i + 1]])]
    return torch.cat(parts)


def run(
    x: Tensor, weight: Tensor, *, window: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    width = weight.shape[1]
    tokens = x.shape[1]
    compute = torch.promote_types(x.dtype, torch.float32)
    if cu_seqlens is None and tokens == 1:
        frame = with_window(x, window, x.shape[0], width)
        y = (frame.to(compute) * weight.to(compute).T).sum(1, keepdim=True)
        return F.silu(y).to(x.dtype), frame[:, 1:]
    weight = weight.to(compute).T.contiguous()  # [width, channels]: strided rows would cost six times as much
    if cu_seqlens is None:
        extended = with_window(x, window, x.shape[0], width)
        new_window = extended[:, tokens:]
        shifted = [extended[:, j : j + tokens] for j in range(width)]
    else:
        bounds = cu_seqlens.tolist()
        buffer = packed_buffer(x, window, bounds, width)
        rows, window_rows = packed_rows(bounds, width, x.device)
        new_window = buffer[window_rows]
        shifted = [buffer[rows - (width - 1 - j)][None] for j in range(width)]
    y = shifted[0].to(compute) * weight[0]
    for j in range(1, width):
        y.addcmul_(shifted[j].to(compute), weight[j])
    return F.silu(y).to(x.dtype), new_window.clone()
