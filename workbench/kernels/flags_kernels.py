"""Raising the words of a tap point in a kernel in Triton: the layout is that of `tracing.flags`.

Thousands of programs that raise one word wait in line for its address, half a nanosecond each. So each reads the word
first and raises it only where it has more: a word that was read early is too low, never too high, so that none is
lost. Reading waits in the same line: a kernel of many short programs has no more than PROGRAMS where there are flags.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Programs of a kernel with flags, of all axes: several for each multiprocessor of a large card.
PROGRAMS = 2048


@triton.jit
def words_of(x):
    """The two words of a block x, in the dtype in which it is stored.

    As whole numbers the bits of positive values are above those of all negative ones, in their order, NaN last. So the
    largest of the bits is word 0, and with the signs turned word 1; a NaN is in one of them by its sign, and is put in
    both.
    """
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    bits = tl.reshape(bits, [bits.numel], can_reorder=True)  # each thread first, and no value moves for it
    turned = bits ^ -0x80000000
    high, low = tl.maximum(tl.max(bits, 0), 0), tl.maximum(tl.max(turned, 0), 0)
    larger = tl.maximum(high, low)
    return tl.where(larger > 0x7F800000, larger, high), tl.where(larger > 0x7F800000, larger, low)


@triton.jit
def larger(a, b):
    """The larger of two numbers, NaN if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def words_so_far(words, point: tl.constexpr):
    """The two words of row `point` as they are: read at the start of a program, they are there when it needs them."""
    place = words + 2 * point
    return tl.load(place, cache_modifier=".cg"), tl.load(place + 1, cache_modifier=".cg")


@triton.jit
def raise_words_above(words, point: tl.constexpr, x, so_far):
    """Raise the words of row `point` to the values of a block x; `so_far` is what `words_so_far` has read.

    Where x holds no value of the tensor it must be 0. `words` int32 [points, 2].
    """
    high, low = words_of(x)
    tl.atomic_max(words + 2 * point, high, mask=high > so_far[0], sem="relaxed")
    tl.atomic_max(words + 2 * point + 1, low, mask=low > so_far[1], sem="relaxed")


@triton.jit
def raise_words(words, point: tl.constexpr, x):
    """`raise_words_above` what the words are now."""
    raise_words_above(words, point, x, words_so_far(words, point))
