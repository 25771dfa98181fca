"""The kernel of `triton_topk`: softmax and the best experts of a block of tokens, in one pass over the logits."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from workbench.kernels.flags_kernels import raise_words

LEAST = tl.constexpr(-(1 << 31))
LARGEST = tl.constexpr((1 << 31) - 1)


@triton.jit
def ordered(x):
    """int32 that order as the float32 values of x do, NaN above all; equal for both zeros; never LEAST."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ LARGEST, bits)
    return tl.where(x == x, bits, LARGEST)


@triton.jit
def topk_kernel(
    logits_ptr, weights_ptr, experts_ptr, flags_ptr, tokens, softmax_type: tl.constexpr,
    E: tl.constexpr, A: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANKS: tl.constexpr,
    NORMALISE: tl.constexpr, BY_PROBABILITY: tl.constexpr, CHAINED: tl.constexpr, RAISES_FLAGS: tl.constexpr,
):  # fmt: skip
    """Weights and experts [tokens, A] of logits [tokens, E], see `spec`; a program has ROWS tokens.

    COLUMNS and RANKS are E and A rounded up to powers of two. Logits and probabilities are rounded to `softmax_type`,
    which float32 leaves as they are; BY_PROBABILITY ranks by the latter.
    """
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    rank = tl.arange(0, RANKS)[None, :]
    is_inside = (row < tokens) & (column < E)
    logits = tl.load(logits_ptr + row.to(tl.int64) * E + column, mask=is_inside, other=-float("inf")).to(tl.float32)
    rounded = logits.to(softmax_type).to(tl.float32)
    shares = tl.exp(rounded - tl.max(rounded, 1, keep_dims=True))
    probabilities = (shares / tl.sum(shares, 1, keep_dims=True)).to(softmax_type).to(tl.float32)
    keys = tl.where(is_inside, ordered(probabilities if BY_PROBABILITY else logits), LEAST)
    weights = tl.zeros([ROWS, RANKS], tl.float32)
    experts = tl.zeros([ROWS, RANKS], tl.int32)
    for place in tl.static_range(A):
        best = tl.max(keys, 1, keep_dims=True)
        expert = tl.min(tl.where(keys == best, column, COLUMNS), 1, keep_dims=True)
        is_chosen = column == expert
        weight = tl.sum(tl.where(is_chosen, probabilities, 0.0), 1, keep_dims=True)
        weights = tl.where(rank == place, weight, weights)
        experts = tl.where(rank == place, expert, experts)
        keys = tl.where(is_chosen, LEAST, keys)
    if NORMALISE:
        weights = weights / tl.sum(weights, 1, keep_dims=True)
    found = weights.to(weights_ptr.dtype.element_ty)
    is_place = (row < tokens) & (rank < A)
    tl.store(weights_ptr + row * A + rank, found, mask=is_place)
    tl.store(experts_ptr + row * A + rank, experts.to(tl.int64), mask=is_place)
    if RAISES_FLAGS:
        raise_words(flags_ptr, 0, tl.where(is_place, found, 0.0))
