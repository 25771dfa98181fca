"""The kernels of `triton_count`: a counting sort of the pairs by expert, in the order of the pairs.

Each program has a part of `PART` pairs. Integers alone, no atomics on memory: the same result every time.
"""

import triton
import triton.language as tl


@triton.jit
def count_kernel(
    experts_ptr, counts_ptr, rows_ptr, pairs, most_rows, E: tl.constexpr, PADDED_E: tl.constexpr, PART: tl.constexpr,
    FILL: tl.constexpr,
):  # fmt: skip
    """counts[part, e] = pairs of the part on expert e, int32 [parts, E]; and every row of `rows` is filling so far.

    experts [pairs] int64; FILL rows of `rows` [most_rows] are this program's to fill, 0 where none needs it.
    """
    part = tl.program_id(0)
    pair = part * PART + tl.arange(0, PART)
    expert = tl.load(experts_ptr + pair, mask=pair < pairs, other=0).to(tl.int32)
    found = tl.histogram(expert, PADDED_E, mask=pair < pairs)
    every = tl.arange(0, PADDED_E)
    tl.store(counts_ptr + part * E + every, found, mask=every < E)
    if FILL > 0:
        row = part * FILL + tl.arange(0, FILL)
        tl.store(rows_ptr + row, tl.full([FILL], 0, tl.int64) + pairs, mask=row < most_rows)


@triton.jit
def place_kernel(
    experts_ptr, counts_ptr, rows_ptr, position_ptr, offsets_ptr, pairs, parts, block,
    E: tl.constexpr, PADDED_E: tl.constexpr, PART: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """rows, position and offsets of `spec`, from the counts of all parts, read `LINES` parts at a time."""
    part = tl.program_id(0)
    every = tl.arange(0, PADDED_E)
    line = tl.arange(0, LINES)
    before = tl.zeros([PADDED_E], tl.int32)
    total = tl.zeros([PADDED_E], tl.int32)
    for first in range(0, parts, LINES):
        other = (first + line)[:, None]
        found = tl.load(counts_ptr + other * E + every[None, :], mask=(other < parts) & (every < E)[None, :], other=0)
        total += tl.sum(found, axis=0)
        before += tl.sum(tl.where(other < part, found, 0), axis=0)
    own = tl.load(counts_ptr + part * E + every, mask=every < E, other=0)
    padded = (total + (block - 1)) // block * block
    ends = tl.cumsum(padded, axis=0)
    if part == 0:
        tl.store(offsets_ptr + every + 1, ends.to(tl.int64), mask=every < E)
        tl.store(offsets_ptr, tl.full([], 0, tl.int64))

    # Sorted, the pairs of an expert stand side by side: its row is where they begin plus the place among them.
    local = tl.arange(0, PART)
    pair = part * PART + local
    expert = tl.load(experts_ptr + pair, mask=pair < pairs, other=PADDED_E).to(tl.int32)
    key = tl.sort(expert * PART + local)
    expert = key // PART
    pair = part * PART + key % PART
    shift = (ends - padded) + before - (tl.cumsum(own, axis=0) - own)
    row = (tl.gather(shift, tl.minimum(expert, PADDED_E - 1), axis=0) + local).to(tl.int64)
    is_pair = pair < pairs
    tl.store(rows_ptr + row, pair.to(tl.int64), mask=is_pair)
    tl.store(position_ptr + pair, row, mask=is_pair)
