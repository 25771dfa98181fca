"""The kernels of `triton_grouped`: a table of tiles, two grouped products and a sum over the experts of a token.

P = tokens * A token-expert pairs, row r the r-th of them sorted by expert. Tensor cores multiply 16-bit values, float32
ones are multiplied without rounding; sums are float32. WIDTH is I; ROWS, COLUMNS and DEPTH are the sizes of a tile and
of its steps along the inner axis, powers of two of at least 16.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from workbench.kernels import triton_runs
from workbench.kernels.flags_kernels import raise_words

INTERPRETED = tl.constexpr(triton_runs.is_interpreted())

#: Columns and warps of a program of `sum_kernel`.
SUM_COLUMNS, SUM_WARPS = 2048, 8


class Product(NamedTuple):
    """How a grouped product is computed. `tail` is a smaller number of rows of a tile, for the last rows of an expert
    where they are no more; 0 is none."""

    columns: int
    depth: int
    warps: int
    stages: int
    tail: int = 0


class Settings(NamedTuple):
    """The rows of a tile, which both products share, and each product's own settings."""

    rows: int
    gate_up: Product
    down: Product


def settings(rows_per_expert: float, dtype: torch.dtype, by_descriptor: bool) -> Settings:
    """The quickest on an H200 for 256 experts of 2048 x 512 by their mean number of rows.

    A tile of 128 x 256 values reads least for its products (what bounds smaller ones is the second-level cache), as
    long as its rows are those of one expert; below, rows computed in vain cost more.
    """
    if dtype == torch.float32:
        return Settings(32, Product(32, 32, 4, 2), Product(64, 32, 4, 2))
    if not by_descriptor:  # what a multiprocessor of any card of capability 8.0 and newer has room for
        return Settings(64, Product(64, 32, 4, 3), Product(128, 32, 4, 3))
    if rows_per_expert <= 12:
        return Settings(16, Product(64, 128, 4, 4), Product(128, 128, 4, 4))
    if rows_per_expert <= 24:
        return Settings(32, Product(64, 128, 4, 3), Product(128, 128, 4, 3))
    if rows_per_expert <= 48:
        return Settings(64, Product(128, 64, 4, 4), Product(128, 64, 4, 4))
    return Settings(128, Product(128, 64, 8, 4, tail=64), Product(128, 64, 4, 3, tail=64))


@triton.jit
def tile_table_kernel(offsets_ptr, tiles_ptr, count_ptr, E: tl.constexpr, ROWS: tl.constexpr, PADDED_E: tl.constexpr):
    """Cut the rows of each expert into tiles of up to ROWS; one program for each expert.

    offsets [E + 1] int64; tiles [most, 4] int32: expert, first row, end of the expert's rows, nothing; count [1] int32.
    """
    expert = tl.program_id(0)
    every = tl.arange(0, PADDED_E)
    starts = tl.load(offsets_ptr + every, mask=every < E, other=0)
    ends = tl.load(offsets_ptr + every + 1, mask=every < E, other=0)
    tiles = (ends - starts + (ROWS - 1)) // ROWS
    before = tl.sum(tl.where(every < expert, tiles, 0), axis=0)
    own = tl.sum(tl.where(every == expert, tiles, 0), axis=0)
    start = tl.load(offsets_ptr + expert).to(tl.int32)
    end = tl.load(offsets_ptr + expert + 1).to(tl.int32)
    for first in range(0, own, 32):
        tile = first + tl.arange(0, 32)
        place = tiles_ptr + (before + tile) * 4
        tl.store(place, expert, mask=tile < own)
        tl.store(place + 1, (start + tile * ROWS).to(tl.int32), mask=tile < own)
        tl.store(place + 2, end, mask=tile < own)
    if expert == E - 1:
        tl.store(count_ptr, (before + own).to(tl.int32))


@triton.jit
def add_product(rows, weight, total):
    """total + rows weight^T for rows [ROWS, DEPTH] and weight [COLUMNS, DEPTH]."""
    if INTERPRETED:  # which would multiply the bits of bfloat16 as whole numbers
        rows, weight = rows.to(tl.float32), weight.to(tl.float32)
    return tl.dot(rows, weight.T, total, input_precision="ieee")


@triton.jit
def gate_up_tile(
    x_ptr, rows_ptr, weight, hidden_ptr, expert, first, end, column,
    D: tl.constexpr, WIDTH: tl.constexpr, A: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BY_DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """ROWS x COLUMNS of `gate_up_kernel`, from row `first` on and from `column` on; gate and up are one product."""
    row = first + tl.arange(0, ROWS)
    is_row = row < end
    depth = tl.arange(0, DEPTH)
    token = tl.load(rows_ptr + row, mask=is_row, other=0) // A
    x_place = x_ptr + token[:, None] * D + depth[None, :]
    if not BY_DESCRIPTOR:
        line = tl.arange(0, 2 * COLUMNS)
        in_expert = (line // COLUMNS) * WIDTH + column + line % COLUMNS
        is_line = column + line % COLUMNS < WIDTH
        place = weight + expert.to(tl.int64) * (2 * WIDTH * D) + in_expert[:, None] * D + depth[None, :]
    both = tl.zeros([ROWS, 2 * COLUMNS], tl.float32)
    for k in range(0, D, DEPTH):
        if D % DEPTH == 0:
            x = tl.load(x_place + k)
        else:
            x = tl.load(x_place + k, mask=(k + depth < D)[None, :], other=0.0)
        if BY_DESCRIPTOR:
            w = weight.load([expert, 0, column, k]).reshape(2 * COLUMNS, DEPTH)
        else:
            w = tl.load(place + k, mask=is_line[:, None] & (k + depth < D)[None, :], other=0.0)
        both = add_product(x, w, both)
    gate, up = tl.split(both.reshape(ROWS, 2, COLUMNS).permute(0, 2, 1))
    hidden = gate * tl.sigmoid(gate) * up
    columns = column + tl.arange(0, COLUMNS)
    hidden_place = hidden_ptr + row.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    mask = is_row[:, None] & (columns < WIDTH)[None, :]
    tl.store(hidden_place, hidden.to(hidden_ptr.dtype.element_ty), mask=mask)


@triton.jit
def gate_up_kernel(
    x_ptr, rows_ptr, tiles_ptr, count_ptr, weight, hidden_ptr,
    D: tl.constexpr, WIDTH: tl.constexpr, A: tl.constexpr,
    ROWS: tl.constexpr, TAIL: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BY_DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """hidden[r] = silu(gate[e] x_t) * (up[e] x_t) for the rows r of expert e, t the token of row r.

    x [tokens, D]; rows [P] int64, the pair of each row; weight [E, 2 I, D], or a descriptor of it as [E, 2, I, D] with
    blocks [1, 2, COLUMNS, DEPTH]; hidden [P, I]. grid (tiles at most times tiles of columns).
    """
    tile_columns: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    index = tl.program_id(0) // tile_columns
    column = (tl.program_id(0) % tile_columns) * COLUMNS
    if index < tl.load(count_ptr):
        tile = tiles_ptr + index * 4
        expert = tl.load(tile)
        first = tl.load(tile + 1)
        end = tl.load(tile + 2)
        if TAIL > 0:
            if end - first > TAIL:
                gate_up_tile(
                    x_ptr, rows_ptr, weight, hidden_ptr, expert, first, end, column,
                    D, WIDTH, A, ROWS, COLUMNS, DEPTH, BY_DESCRIPTOR,
                )  # fmt: skip
            else:
                gate_up_tile(
                    x_ptr, rows_ptr, weight, hidden_ptr, expert, first, end, column,
                    D, WIDTH, A, TAIL, COLUMNS, DEPTH, BY_DESCRIPTOR,
                )  # fmt: skip
        else:
            gate_up_tile(
                x_ptr, rows_ptr, weight, hidden_ptr, expert, first, end, column,
                D, WIDTH, A, ROWS, COLUMNS, DEPTH, BY_DESCRIPTOR,
            )  # fmt: skip


@triton.jit
def down_tile(
    hidden, weight, out_ptr, whole_out, expert, first, end, column,
    D: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BY_DESCRIPTOR: tl.constexpr,
    IS_TAIL: tl.constexpr,
):  # fmt: skip
    """ROWS x COLUMNS of `down_kernel`, from row `first` on and from `column` on."""
    row = first + tl.arange(0, ROWS)
    is_row = row < end
    columns = column + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    if not BY_DESCRIPTOR:
        hidden_place = hidden + row.to(tl.int64)[:, None] * WIDTH + depth[None, :]
        place = weight + expert.to(tl.int64) * (D * WIDTH) + columns[:, None] * WIDTH + depth[None, :]
    out = tl.zeros([ROWS, COLUMNS], tl.float32)
    for k in range(0, WIDTH, DEPTH):
        if BY_DESCRIPTOR:  # rows after the expert's own are those of the next one: computed, not stored
            h = hidden.load([first, k])
            w = weight.load([expert * D + column, k])
        else:
            is_depth = (k + depth < WIDTH)[None, :]
            h = tl.load(hidden_place + k, mask=is_row[:, None] & is_depth, other=0.0)
            w = tl.load(place + k, mask=(columns < D)[:, None] & is_depth, other=0.0)
        out = add_product(h, w, out)
    value = out.to(out_ptr.dtype.element_ty)
    out_place = out_ptr + row.to(tl.int64)[:, None] * D + columns[None, :]
    mask = is_row[:, None] & (columns < D)[None, :]
    if BY_DESCRIPTOR and not IS_TAIL:
        if first + ROWS <= end:
            whole_out.store([first, column], value)
        else:
            tl.store(out_place, value, mask=mask)
    else:
        tl.store(out_place, value, mask=mask)


@triton.jit
def down_kernel(
    hidden, tail_of_hidden, tiles_ptr, count_ptr, weight, out_ptr, whole_out,
    D: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, TAIL: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BY_DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """out[r] = down[e] hidden[r] for the rows r of expert e.

    hidden [P, I], weight [E, D, I] and out [P, D]. With descriptors, `hidden` and `tail_of_hidden` are those of hidden
    with blocks [ROWS, DEPTH] and [TAIL, DEPTH], `weight` that of the weight as [E D, I] with blocks [COLUMNS, DEPTH],
    and `whole_out` that of out with blocks [ROWS, COLUMNS]. grid (tiles at most times tiles of columns).
    """
    tile_columns: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    index = tl.program_id(0) // tile_columns
    column = (tl.program_id(0) % tile_columns) * COLUMNS
    if index < tl.load(count_ptr):
        tile = tiles_ptr + index * 4
        expert = tl.load(tile)
        first = tl.load(tile + 1)
        end = tl.load(tile + 2)
        if TAIL > 0:
            if end - first > TAIL:
                down_tile(
                    hidden, weight, out_ptr, whole_out, expert, first, end, column,
                    D, WIDTH, ROWS, COLUMNS, DEPTH, BY_DESCRIPTOR, False,
                )  # fmt: skip
            else:
                down_tile(
                    tail_of_hidden, weight, out_ptr, whole_out, expert, first, end, column,
                    D, WIDTH, TAIL, COLUMNS, DEPTH, BY_DESCRIPTOR, True,
                )  # fmt: skip
        else:
            down_tile(
                hidden, weight, out_ptr, whole_out, expert, first, end, column,
                D, WIDTH, ROWS, COLUMNS, DEPTH, BY_DESCRIPTOR, False,
            )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["flags"])
def sum_kernel(
    rows_ptr, position_ptr, weights_ptr, out_ptr, flags, D: tl.constexpr, A: tl.constexpr, COLUMNS: tl.constexpr
):
    """out[t] = sum_a weights[t, a] rows[position[t, a]], in the order of the ranks. grid (tokens, tiles of columns).

    rows [P, D]; position [tokens, A] int64; weights [tokens, A]; out [tokens, D]; flags int32 [1, 2] or None.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < D
    total = tl.zeros([COLUMNS], tl.float32)
    for rank in tl.static_range(A):
        row = tl.load(position_ptr + token * A + rank)
        share = tl.load(weights_ptr + token * A + rank).to(tl.float32)
        total += share * tl.load(rows_ptr + row * D + column, mask=is_column, other=0.0).to(tl.float32)
    out = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * D + column, out, mask=is_column)
    if flags is not None:
        raise_words(flags, 0, out)
