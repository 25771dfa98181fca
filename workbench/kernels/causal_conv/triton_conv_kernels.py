"""The kernel of `triton_conv`."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from workbench.kernels.flags_kernels import raise_words


class Settings(NamedTuple):
    """Tokens and channels of a tile, both powers of two, and the warps that compute it."""

    tokens: int
    channels: int
    warps: int


def settings(tokens: int, dtype: torch.dtype) -> Settings:
    """Tiles of few tokens are narrow, so that many run at a time."""
    channels = 512 // dtype.itemsize  # 16 bytes for each lane of a warp
    if tokens < 16:
        return Settings(triton.next_power_of_2(max(tokens, 1)), channels, 1)
    return Settings(16, channels, 4)


@triton.jit(do_not_specialize_on_alignment=["flags"])
def conv_kernel(
    x, weight, window, y, new_window, table, flags,
    tokens, channels, x_batch_stride, x_token_stride,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """y and the new window of `spec` for one tile. grid (channel tiles, token tiles of all sequences).

    x [B, T, channels], channels side by side; weight [channels, WIDTH], window and new_window [S, WIDTH - 1, channels]
    and y [B, T, channels] row major; table [tiles, 4] as `triton_conv.tiles` makes it, None for sequences of `tokens`
    each; flags int32 [1, 2] or None; window None is zero.
    """
    tile = tl.program_id(1)
    if table is None:
        per_sequence = tl.cdiv(tokens, TOKENS)
        per_sequence = tl.maximum(per_sequence, 1)
        sequence = tile // per_sequence
        start, end, first = 0, tokens, (tile - sequence * per_sequence) * TOKENS
        x += sequence.to(tl.int64) * x_batch_stride
        y += sequence.to(tl.int64) * tokens * channels
    else:
        sequence = tl.load(table + 4 * tile)
        start = tl.load(table + 4 * tile + 1)
        end = tl.load(table + 4 * tile + 2)
        first = tl.load(table + 4 * tile + 3)
    past = sequence.to(tl.int64) * (WIDTH - 1) * channels

    c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    t = first + tl.arange(0, TOKENS)
    is_channel = c < channels
    is_token = t < end
    is_first = first == start

    total = tl.zeros([TOKENS, CHANNELS], tl.float32)
    for j in tl.static_range(WIDTH):
        source = t + (j - (WIDTH - 1))
        rows = source.to(tl.int64)[:, None] * x_token_stride + c[None, :]
        value = tl.load(x + rows, (is_token & (source >= start))[:, None] & is_channel[None, :], other=0.0)
        if window is not None:
            if is_first:  # source - start is -(WIDTH - 1) for the oldest input of the window
                old = past + (source - start + (WIDTH - 1))[:, None] * channels + c[None, :]
                is_old = (is_token & (source < start))[:, None] & is_channel[None, :]
                value = tl.where(is_old, tl.load(window + old, is_old, other=0.0).to(value.dtype), value)
        total += value.to(tl.float32) * tl.load(weight + c * WIDTH + j, is_channel, other=0.0).to(tl.float32)[None, :]
    result = (total / (1.0 + tl.exp(-total))).to(y.dtype.element_ty)
    is_result = is_token[:, None] & is_channel[None, :]
    tl.store(y + t.to(tl.int64)[:, None] * channels + c[None, :], result, is_result)
    if flags is not None:
        raise_words(flags, 0, tl.where(is_result, result, 0.0))

    if first + TOKENS >= end:  # the last tile of its sequence
        for i in tl.static_range(WIDTH - 1):
            kept = end - (WIDTH - 1) + i
            row = tl.load(x + kept.to(tl.int64) * x_token_stride + c, is_channel & (kept >= start), other=0.0)
            if window is not None:
                is_older = is_channel & (kept < start)
                older = past + (kept - start + (WIDTH - 1)) * channels + c
                row = tl.where(is_older, tl.load(window + older, is_older, other=0.0).to(row.dtype), row)
            tl.store(new_window + past + i * channels + c, row, is_channel)
