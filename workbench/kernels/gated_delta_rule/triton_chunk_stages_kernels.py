"""What the kernels of `triton_chunk` write of a stage in their debug build: see `triton_chunk_stages`."""

from __future__ import annotations

import triton
import triton.language as tl

from workbench.kernels.gated_delta_rule import triton_chunk_stages

TENSORS, RANGES = tl.constexpr(triton_chunk_stages.TENSORS), tl.constexpr(triton_chunk_stages.RANGES)
NUMBERS = tl.constexpr(triton_chunk_stages.NUMBERS)


@triton.jit
def show(place, offsets, x, is_real, SEEN: tl.constexpr):
    """Store a block x of a stage at `place` + offsets, or its ranges at `place`; only what `is_real` of it."""
    if SEEN == TENSORS:
        tl.store(place + offsets, x, mask=is_real)
    else:
        is_nan, is_plus, is_minus = x != x, x == float("inf"), x == float("-inf")
        is_finite = is_real & (tl.abs(x) < float("inf"))
        tl.store(place, tl.min(tl.min(tl.where(is_finite, x, float("inf")), 1), 0))
        tl.store(place + 1, tl.max(tl.max(tl.where(is_finite, x, float("-inf")), 1), 0))
        tl.store(place + 2, tl.sum(tl.sum((is_real & is_nan).to(tl.float32), 1), 0))
        tl.store(place + 3, tl.sum(tl.sum((is_real & is_plus).to(tl.float32), 1), 0))
        tl.store(place + 4, tl.sum(tl.sum((is_real & is_minus).to(tl.float32), 1), 0))
