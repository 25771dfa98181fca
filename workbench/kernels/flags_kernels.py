"""Raising the words of a tap point in a kernel in Triton: the layout is that of `tracing.flags`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def magnitude_bits(x):
    """x in float32 as (bits of x where it is positive, of -x where it is negative), 0 elsewhere, NaN in both."""
    signed = x.to(tl.float32).to(tl.int32, bitcast=True)
    bits = signed & 0x7FFFFFFF
    is_nan = bits > 0x7F800000
    return tl.where((signed >= 0) | is_nan, bits, 0), tl.where((signed < 0) | is_nan, bits, 0)


@triton.jit
def raise_words(words, point: tl.constexpr, x):
    """Raise the two words of row `point` to the values of a block x, in the dtype in which it is stored.

    Where x holds no value of the tensor it must be 0. `words` int32 [points, 2]; two atomic operations.
    """
    high, low = magnitude_bits(x)
    tl.atomic_max(words + 2 * point, tl.max(high.reshape([high.numel]), 0), sem="relaxed")
    tl.atomic_max(words + 2 * point + 1, tl.max(low.reshape([low.numel]), 0), sem="relaxed")
