"""The kernel of `triton_conv`."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from workbench.kernels.flags_kernels import raise_words_above, words_so_far
from workbench.kernels.silu_kernels import silu


class Settings(NamedTuple):
    """Tokens and channels of a tile, and the warps that compute it; channels are a power of two."""

    tokens: int
    channels: int
    warps: int


def settings(tokens: int, dtype: torch.dtype) -> Settings:
    """16 bytes of channels for each lane of one warp; a sequence of few tokens is one tile."""
    return Settings(min(max(tokens, 1), 16), 512 // dtype.itemsize, 1)


@triton.jit
def larger(a, b):
    """The larger of two numbers, NaN if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def row_of(x, window, token, start, c, is_read, x_token_stride, channels, WIDTH: tl.constexpr):
    """The input of a token in the dtype of x; before `start` that of the window, zero without one."""
    value = tl.load(x + token.to(tl.int64) * x_token_stride + c, is_read & (token >= start), other=0.0)
    if window is not None:
        is_old = is_read & (token < start)
        old = tl.load(window + (token - start + (WIDTH - 1)) * channels + c, is_old, other=0.0)
        value = tl.where(token < start, old.to(value.dtype), value)
    return value


@triton.jit(do_not_specialize_on_alignment=["flags"])
def conv_kernel(
    x, weight, window, y, new_window, table, flags,
    tokens, channels, x_batch_stride, x_token_stride,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """y and the new window of `spec` for one tile. grid (channel tiles, token tiles of all sequences).

    The program goes from token to token with the last inputs in registers: each is read and widened once.

    x [B, T, channels], channels side by side; weight [channels, WIDTH], window and new_window [S, WIDTH - 1, channels]
    and y [B, T, channels] row major; table [tiles, 4] as `triton_conv.tiles` makes it, None for sequences of `tokens`
    each; flags int32 [1, 2] or None; window None is zero.
    """
    if flags is not None:
        so_far = words_so_far(flags, 0)
    tile = tl.program_id(1)
    if table is None:
        per_sequence = tl.maximum(tl.cdiv(tokens, TOKENS), 1)
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
    new_window += past
    if window is not None:
        window += past
    c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = c < channels

    weights = ()
    for j in tl.static_range(WIDTH):
        weights += (tl.load(weight + c * WIDTH + j, is_channel, other=0.0).to(tl.float32),)
    history = ()
    for j in tl.static_range(WIDTH - 1):
        row = row_of(x, window, first + (j - (WIDTH - 1)), start, c, is_channel, x_token_stride, channels, WIDTH)
        history += (row.to(tl.float32),)
    high, low = tl.zeros([CHANNELS], tl.float32), tl.zeros([CHANNELS], tl.float32)
    x_tile, y_tile = x + first.to(tl.int64) * x_token_stride + c, y + first.to(tl.int64) * channels + c
    for i in tl.static_range(TOKENS):
        is_read = is_channel & (first + i < end)
        row = tl.load(x_tile + i * x_token_stride, is_read, other=0.0).to(tl.float32)
        total = row * weights[WIDTH - 1]
        for j in tl.static_range(WIDTH - 1):
            total += history[j] * weights[j]
        result = silu(total)
        tl.store(y_tile + i * channels, result.to(y.dtype.element_ty), is_read)
        if flags is not None:
            result = tl.where(is_read, result, 0.0)
            high, low = larger(high, result), larger(low, -result)
        history += (row,)
        history = history[1:]
    if flags is not None:  # the largest of the rounded is the largest, rounded
        extremes = tl.join(high, -low).to(y.dtype.element_ty)
        raise_words_above(flags, 0, extremes, so_far)

    if first + TOKENS >= end:  # the last tile of its sequence
        for i in tl.static_range(WIDTH - 1):
            kept = row_of(x, window, end - (WIDTH - 1) + i, start, c, is_channel, x_token_stride, channels, WIDTH)
            tl.store(new_window + i * channels + c, kept, is_channel)
