"""SiLU in a kernel in Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def silu(x):
    """x / (1 + e^-x) of fp32, to 4 units in the last place; NaN for -inf, as the formula has it.

    The square of a reciprocal square root takes half of the instructions of a division, which is what bounds a kernel
    that does little else.
    """
    root = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))
    return x * root * root
