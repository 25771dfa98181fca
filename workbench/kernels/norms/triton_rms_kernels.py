"""The kernel of `triton_rms`."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from workbench.kernels.flags_kernels import larger, raise_words_above, words_so_far
from workbench.kernels.silu_kernels import silu

#: Columns that a program holds at a time; wider rows are read twice, in parts.
COLUMNS_AT_ONCE = 8192


class Settings(NamedTuple):
    """Rows of a program, columns that it holds at a time, both powers of two, and its warps."""

    rows: int
    columns: int
    warps: int


def settings(width: int, count: int) -> Settings:
    columns = min(triton.next_power_of_2(width), COLUMNS_AT_ONCE)
    rows = max(1, min(2048 // columns, triton.next_power_of_2(count)))
    # 512 programs keep every multiprocessor of a large card busy; beyond them rows share one, with their weights.
    while rows > 1 and count < 512 * rows:
        rows //= 2
    return Settings(rows, columns, max(1, min(8, rows * columns // 512)))


@triton.jit(do_not_specialize_on_alignment=["flags"], do_not_specialize=["eps"])
def norm_kernel(
    x, gate, weight, y, flags, count, eps,
    x_heads, x_outer, x_inner, gate_heads, gate_outer, gate_inner,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """y of `rms_norm` (gate None: weight is zero-centred) or of `gated_rms_norm`. grid (programs that share the groups
    of ROWS rows,).

    x and gate as `triton_rms.Rows`; weight [WIDTH]; y row major; flags int32 [1, 2] or None.
    """
    if flags is not None:
        so_far = words_so_far(flags, 0)
        high, low = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
    c = tl.arange(0, COLUMNS)
    for group in range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
        r = group * ROWS + tl.arange(0, ROWS)
        is_row = r < count
        r = r.to(tl.int64)
        x_rows = x + (r // x_heads * x_outer + r % x_heads * x_inner)[:, None]
        if gate is not None:
            gate_rows = gate + (r // gate_heads * gate_outer + r % gate_heads * gate_inner)[:, None]

        if WIDTH <= COLUMNS:
            mask = is_row[:, None] & (c < WIDTH)[None, :]
            value = tl.load(x_rows + c[None, :], mask, other=0.0).to(tl.float32)
            squares = tl.sum(value * value, 1)
        else:
            squares = tl.zeros([ROWS], tl.float32)
            for first in range(0, WIDTH, COLUMNS):
                part = tl.load(x_rows + (first + c)[None, :], is_row[:, None] & (first + c < WIDTH)[None, :], other=0.0)
                squares += tl.sum(part.to(tl.float32) * part.to(tl.float32), 1)
        scale = tl.rsqrt(squares / WIDTH + eps)[:, None]

        for first in tl.static_range(0, WIDTH, COLUMNS):
            mask = is_row[:, None] & (first + c < WIDTH)[None, :]
            if WIDTH > COLUMNS:
                value = tl.load(x_rows + (first + c)[None, :], mask, other=0.0).to(tl.float32)
            w = tl.load(weight + first + c, first + c < WIDTH, other=0.0).to(tl.float32)[None, :]
            result = value * scale
            if gate is None:
                result *= 1.0 + w
            else:
                g = tl.load(gate_rows + (first + c)[None, :], mask, other=0.0).to(tl.float32)
                result = result.to(y.dtype.element_ty).to(tl.float32) * w * silu(g)
            tl.store(y + r[:, None] * WIDTH + (first + c)[None, :], result.to(y.dtype.element_ty), mask)
            if flags is not None:
                result = tl.where(mask, result, 0.0)
                high, low = larger(high, result), larger(low, -result)
    if flags is not None:  # the largest of the rounded is the largest, rounded
        raise_words_above(flags, 0, tl.join(high, -low).to(y.dtype.element_ty), so_far)
