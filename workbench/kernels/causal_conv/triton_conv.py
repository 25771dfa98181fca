"""Causal convolution, SiLU and the new window in one kernel in Triton: reads each input once, writes each output once.

A program computes a tile of tokens times channels of one sequence. The shifted rows of a tile are loaded once for each
place in the window, of which all but the first come from the cache. The first tile of a sequence reads the old window
too, the last writes the new one, and with packed sequences a table says which tile belongs to which of them.
"""

from __future__ import annotations

import functools
import itertools

import torch
from torch import Tensor

from workbench import taps
from workbench.kernels import triton_runs
from workbench.kernels.layout import row_major
from workbench.kernels.registry import Call

REQUIRES = triton_runs.REQUIRES
FLAGS = (taps.GDN_CONV,)


def supports(call: Call) -> str | None:
    return triton_runs.refusal(call)


@functools.lru_cache(maxsize=64)
def tiles(bounds: tuple[int, ...], block: int, device: torch.device) -> Tensor:
    """[tiles, 4] int32: the number of the sequence, its first token and its end, and the first token of the tile.

    A sequence without tokens has one tile, which hands its window on.
    """
    rows = [
        (sequence, start, end, first)
        for sequence, (start, end) in enumerate(itertools.pairwise(bounds))
        for first in range(start, max(end, start + 1), block)
    ]
    with torch.inference_mode(False):  # kept for later calls
        return torch.tensor(rows, dtype=torch.int32).to(device)


def run(
    x: Tensor, weight: Tensor, *, window: Tensor | None = None, cu_seqlens: Tensor | None = None,
    flags: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `spec`. `flags` int32 [1, 2]: words of `taps.GDN_CONV`."""
    from workbench.kernels.causal_conv import triton_conv_kernels as kernels
    from workbench.kernels.flags_kernels import PROGRAMS

    batch, tokens, channels = x.shape
    width = weight.shape[1]
    bounds = None if cu_seqlens is None else tuple(cu_seqlens.tolist())
    sequences = batch if bounds is None else len(bounds) - 1
    y, new_window = x.new_empty(x.shape), x.new_empty(sequences, width - 1, channels)
    if sequences == 0 or channels == 0:
        return y, new_window
    if x.stride(2) != 1:
        x = row_major(x)
    window = None if window is None else row_major(window)
    settings = kernels.settings(tokens, x.dtype)
    table = None if bounds is None else tiles(bounds, settings.tokens, x.device)
    count = batch * max(1, -(-tokens // settings.tokens)) if table is None else len(table)
    columns = -(-channels // settings.channels)
    programs = count if flags is None else min(count, max(1, PROGRAMS // columns))
    kernels.conv_kernel[(columns, programs)](
        x, row_major(weight), window, y, new_window, table, flags,
        tokens, channels, count, x.stride(0), x.stride(1),
        WIDTH=width, TOKENS=settings.tokens, CHANNELS=settings.channels, num_warps=settings.warps,
    )  # fmt: skip
    return y, new_window
