"""The arbiter: the sum of `spec` in float64, sequence by sequence."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from workbench.kernels.causal_conv.spec import with_window
from workbench.kernels.registry import Call


def supports(call: Call) -> str | None:
    return None


def run(
    x: Tensor, weight: Tensor, *, window: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist()
        parts = [
            run(x[:, a:b], weight, window=None if window is None else window[i : i + 1])
            for i, (a, b) in enumerate(itertools.pairwise(bounds))
        ]
        return torch.cat([y for y, _ in parts], dim=1), torch.cat([w for _, w in parts])
    width = weight.shape[1]
    extended = with_window(x, window, x.shape[0], width)
    if x.shape[1] == 0:  # an empty sequence of a packed row has no frame to cut out
        return x.clone(), extended.clone()
    frames = extended.double().unfold(1, width, 1)  # [B, T, channels, width]
    y = torch.einsum("btcj,cj->btc", frames, weight.double())
    return (y * torch.sigmoid(y)).to(x.dtype), extended[:, x.shape[1] :].clone()
