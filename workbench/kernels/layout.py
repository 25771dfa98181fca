"""The layout in memory that a foreign kernel reads: the strides of the shape."""

from __future__ import annotations

from torch import Tensor


def row_major(x: Tensor) -> Tensor:
    """`x` with exactly the strides of its shape; itself or a view where its values lie so, a copy elsewhere.

    `Tensor.contiguous` leaves the stride of an axis of one element as it is, since no element is reached by it; kernels
    that assert ``x.stride(-1) == 1`` refuse such a tensor.
    """
    x = x.contiguous()
    if x.numel() and 1 not in x.shape:
        return x
    strides, step = [], 1
    for size in reversed(x.shape):
        strides.append(step)
        step *= max(size, 1)
    strides = tuple(reversed(strides))
    return x if x.stride() == strides else x.as_strided(x.shape, strides)
