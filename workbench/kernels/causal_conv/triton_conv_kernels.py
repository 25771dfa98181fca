"""The kernel of `triton_conv`."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from workbench.kernels.flags_kernels import larger, raise_words_above, words_so_far
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
def row_of(x, window, token, start, c, is_read, x_token_stride, channels, WIDTH: tl.constexpr):
    """The input of a token in the dtype of x; before `start` that of the window, zero without one."""
    value = tl.load(x + token.to(tl.int64) * x_token_stride + c, is_read & (token >= start), other=0.0)
    if window is not None:
        is_old = is_read & (token < start)
        old = tl.load(window + (token - start + (WIDTH - 1)) * channels + c, is_old, other=0.0)
        value = tl.where(token < start, old.to(value.dtype), value)
    return value


@triton.jit
def convolved(
    tile, high, low, weights, c, is_channel, x, window, y, new_window, table, tokens, channels,
    x_batch_stride, x_token_stride, WIDTH: tl.constexpr, TOKENS: tl.constexpr, HAS_FLAGS: tl.constexpr,
):  # fmt: skip
    """One tile of `conv_kernel`: (high, low), the largest y and -y of each channel so far, where HAS_FLAGS."""
    if table is None:
        per_sequence = tl.maximum(tl.cdiv(tokens, TOKENS), 1)
        sequence = tile // per_sequence
        start, end, first = 0, tokens, (tile - sequence * per_sequence) * TOKENS
        x_rows = x + sequence.to(tl.int64) * x_batch_stride
        y_rows = y + sequence.to(tl.int64) * tokens * channels
    else:
        sequence = tl.load(table + 4 * tile)
        start = tl.load(table + 4 * tile + 1)
        end = tl.load(table + 4 * tile + 2)
        first = tl.load(table + 4 * tile + 3)
        x_rows, y_rows = x, y
    past = sequence.to(tl.int64) * (WIDTH - 1) * channels
    old = window
    if window is not None:
        old = window + past

    history = ()
    for j in tl.static_range(WIDTH - 1):
        token = first + (j - (WIDTH - 1))
        row = row_of(x_rows, old, token, start, c, is_channel, x_token_stride, channels, WIDTH)
        history += (row.to(tl.float32),)
    x_tile = x_rows + first.to(tl.int64) * x_token_stride + c
    y_tile = y_rows + first.to(tl.int64) * channels + c
    for i in tl.static_range(TOKENS):
        is_read = is_channel & (first + i < end)
        row = tl.load(x_tile + i * x_token_stride, is_read, other=0.0).to(tl.float32)
        total = row * weights[WIDTH - 1]
        for j in tl.static_range(WIDTH - 1):
            total += history[j] * weights[j]
        result = silu(total)
        tl.store(y_tile + i * channels, result.to(y.dtype.element_ty), is_read)
        if HAS_FLAGS:
            result = tl.where(is_read, result, 0.0)
            high, low = larger(high, result), larger(low, -result)
        history += (row,)
        history = history[1:]

    if first + TOKENS >= end:  # the last tile of its sequence
        for i in tl.static_range(WIDTH - 1):
            token = end - (WIDTH - 1) + i
            kept = row_of(x_rows, old, token, start, c, is_channel, x_token_stride, channels, WIDTH)
            tl.store(new_window + past + i * channels + c, kept, is_channel)
    return high, low


@triton.jit(do_not_specialize_on_alignment=["flags"])
def conv_kernel(
    x, weight, window, y, new_window, table, flags,
    tokens, channels, tiles, x_batch_stride, x_token_stride,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """y and the new window of `spec` tile by tile. grid (channel tiles, programs that share the
    `tiles` token tiles of all sequences).

    The program goes from token to token with the last inputs in registers: each is read and widened once.

    x [B, T, channels], channels side by side; weight [channels, WIDTH], window and new_window [S, WIDTH - 1, channels]
    and y [B, T, channels] row major; table [tiles, 4] as `triton_conv.tiles` makes it, None for sequences of `tokens`
    each; flags int32 [1, 2] or None; window None is zero.
    """
    c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = c < channels
    high, low = tl.zeros([CHANNELS], tl.float32), tl.zeros([CHANNELS], tl.float32)
    if flags is not None:
        so_far = words_so_far(flags, 0)
    weights = ()
    for j in tl.static_range(WIDTH):
        weights += (tl.load(weight + c * WIDTH + j, is_channel, other=0.0).to(tl.float32),)
    if flags is None:
        convolved(
            tl.program_id(1), high, low, weights, c, is_channel, x, window, y, new_window, table, tokens, channels,
            x_batch_stride, x_token_stride, WIDTH, TOKENS, False,
        )  # fmt: skip
    else:
        for tile in range(tl.program_id(1), tiles, tl.num_programs(1)):
            high, low = convolved(
                tile, high, low, weights, c, is_channel, x, window, y, new_window, table, tokens, channels,
                x_batch_stride, x_token_stride, WIDTH, TOKENS, True,
            )  # fmt: skip
        # The largest of the rounded is the largest, rounded.
        raise_words_above(flags, 0, tl.join(high, -low).to(y.dtype.element_ty), so_far)
