"""The kernel of `triton_topk`: softmax and the best experts of a block of tokens, in one pass over the logits."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from workbench.kernels.flags_kernels import raise_words

LEAST = tl.constexpr(-(1 << 31))
LARGEST = tl.constexpr((1 << 31) - 1)
#: The low bits of a float32 that holds a value of 16 bits: 0.
FREE = tl.constexpr((1 << 13) - 1)


@triton.jit
def ordered(x):
    """int32 that order as the float32 values of x do, NaN above all; equal for both zeros; never LEAST."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ LARGEST, bits)
    return tl.where(x == x, bits, LARGEST)


@triton.jit
def value_of(keys):
    """The float32 values that `ordered` made these of."""
    return tl.where(keys < 0, keys ^ LARGEST, keys).to(tl.float32, bitcast=True)


@triton.jit
def topk_kernel(
    logits_ptr, weights_ptr, experts_ptr, flags_ptr, tokens, softmax_type: tl.constexpr,
    E: tl.constexpr, A: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANKS: tl.constexpr,
    NORMALISE: tl.constexpr, PACKED: tl.constexpr, CHAINED: tl.constexpr, RAISES_FLAGS: tl.constexpr,
):  # fmt: skip
    """Weights and experts [tokens, A] of logits [tokens, E], see `spec`; a program has ROWS tokens.

    COLUMNS and RANKS are E and A rounded up to powers of two. `softmax_type` None ranks by the logits, another type by
    probabilities rounded to it, as the logits are before. PACKED, for logits of 16 bits and up to FREE + 1 experts,
    holds the number of an expert in bits of its key that are free, so that one maximum finds both.
    """
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    rank = tl.arange(0, RANKS)[None, :]
    is_expert = column < E
    read = tl.minimum(row, tokens - 1).to(tl.int64)  # rows past the last token repeat it
    logits = tl.load(logits_ptr + read * E + column, mask=is_expert, other=-float("inf")).to(tl.float32)
    if softmax_type is None:
        keys = ordered(logits)
    else:
        rounded = logits.to(softmax_type).to(tl.float32)
        shares = tl.exp(rounded - tl.max(rounded, 1, keep_dims=True))
        keys = ordered((shares / tl.sum(shares, 1, keep_dims=True)).to(softmax_type).to(tl.float32))
    if PACKED:
        keys = (keys & ~FREE) | (FREE - column)
    keys = tl.where(is_expert, keys, LEAST)
    ranked = tl.zeros([ROWS, RANKS], tl.int32)
    experts = tl.zeros([ROWS, RANKS], tl.int32)
    for place in tl.static_range(A):
        best = tl.max(keys, 1, keep_dims=True)
        if PACKED:
            is_chosen = keys == best
            ranked = tl.where(rank == place, best, ranked)
        else:
            expert = tl.min(tl.where(keys == best, column, COLUMNS), 1, keep_dims=True)
            is_chosen = column == expert
            ranked = tl.where(rank == place, best, ranked)
            experts = tl.where(rank == place, expert, experts)
        keys = tl.where(is_chosen, LEAST, keys)
    if PACKED:
        experts = FREE - (ranked & FREE)
        ranked = tl.where(ranked < 0, ranked | FREE, ranked & ~FREE)  # `ordered` sets these bits of negative values
    weights = value_of(ranked)
    if softmax_type is None:
        largest = tl.max(logits, 1, keep_dims=True)
        weights = tl.exp(weights - largest) / tl.sum(tl.exp(logits - largest), 1, keep_dims=True)
    is_place = rank < A
    weights = tl.where(is_place, weights, 0.0)
    if NORMALISE:
        weights = weights / tl.sum(weights, 1, keep_dims=True)
    weights = weights.to(weights_ptr.dtype.element_ty)
    tl.store(weights_ptr + row * A + rank, weights, mask=is_place & (row < tokens))
    tl.store(experts_ptr + row * A + rank, experts.to(tl.int64), mask=is_place & (row < tokens))
    if RAISES_FLAGS:
        raise_words(flags_ptr, 0, tl.where(is_place, weights, 0.0))
