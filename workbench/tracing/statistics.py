"""One pass over a tensor: range, moments, and the shares of values that are not finite, zero, tiny or huge.

With F the finite values of a tensor of n values and L, S the largest finite and smallest normal number of
its dtype:

    min, max, absmax, mean, rms            over F; NaN where F is empty
    frac_nan, frac_pinf, frac_ninf         share of n that is NaN, +inf, -inf
    frac_zero                              share of n that equals zero
    frac_subnormal                         share of n with 0 < |x| < S
    frac_near_limit                        share of n that is finite with |x| > L / 2, one doubling from inf
    first_bad                              index of the first value (row-major) that is not finite, or None

Limits are those of the tensor's own dtype, moments are taken in float64 (where squares of float64 values would leave
its range or values are not finite: of x / absmax), so neither the squares of large float64 values nor the sums of
float16 ones can overflow. An empty tensor has NaN statistics and zero shares.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.errors import InputError

#: A value counts as near the limit above this share of the largest finite number of its dtype.
NEAR_LIMIT_SHARE = 0.5

#: Values that are widened to float64 at a time, so that statistics of large logits need no second copy of
#: them.
BLOCK_VALUES = 1 << 22

#: On a CPU as many as stay in the cache while they are read several times.
CPU_BLOCK_VALUES = 1 << 15

#: Magnitudes whose squares and sums of squares are normal float64 numbers.
_SAFE_SQUARES = (1e-140, 1e140)


@dataclass(frozen=True, slots=True)
class Statistics:
    """See the module's text for the definition of each field."""

    min: float
    max: float
    absmax: float
    mean: float
    rms: float
    frac_nan: float
    frac_pinf: float
    frac_ninf: float
    frac_zero: float
    frac_subnormal: float
    frac_near_limit: float
    first_bad: tuple[int, ...] | None


@torch.no_grad()
def describe(x: Tensor) -> Statistics:
    """Statistics of a floating-point tensor of any shape. Raises InputError for any other dtype."""
    if not x.is_floating_point():
        raise InputError(f"statistics: expected a floating-point tensor, found {x.dtype}")
    nan = math.nan
    if x.numel() == 0:
        return Statistics(nan, nan, nan, nan, nan, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, None)
    limits = torch.finfo(x.dtype)
    flat = x.detach().reshape(-1)
    if flat.dtype.itemsize == 1:
        flat = flat.float()  # 8-bit formats have no comparisons of their own; the limits above stay theirs
    if (found := _describe_finite(flat, limits)) is not None:
        return found
    finite = torch.isfinite(flat)
    magnitude = flat.abs()
    low = torch.where(finite, flat, torch.inf).amin()
    high = torch.where(finite, flat, -torch.inf).amax()
    counts = torch.stack(
        [
            finite.sum(),
            torch.isnan(flat).sum(),
            (flat == torch.inf).sum(),
            (flat == -torch.inf).sum(),
            (flat == 0).sum(),
            ((magnitude > 0) & (magnitude < limits.smallest_normal)).sum(),
            ((magnitude > NEAR_LIMIT_SHARE * limits.max) & finite).sum(),
        ]
    )
    low, high, *counts = torch.cat([torch.stack([low, high]).double(), counts.double()]).tolist()
    n_finite, shares = counts[0], [count / x.numel() for count in counts[1:]]
    first_bad = None
    if n_finite < x.numel():
        position = int((~finite).nonzero()[0])
        first_bad = tuple(int(i) for i in torch.unravel_index(torch.tensor(position), x.shape))
    if n_finite == 0:
        return Statistics(nan, nan, nan, nan, nan, *shares, first_bad)
    absmax = max(abs(low), abs(high))
    mean, rms = _moments(flat, finite, absmax, n_finite) if absmax > 0.0 else (0.0, 0.0)
    return Statistics(low, high, absmax, mean, rms, *shares, first_bad)


def _describe_finite(flat: Tensor, limits: torch.finfo) -> Statistics | None:
    """The statistics where every value is finite, block by block in few passes and one read of the results; else None.

    A sum of squares in float64 is finite only where every value is, and every narrower format stays within its range.
    """
    on_cpu = flat.device.type == "cpu"
    smallest = limits.smallest_normal
    below = float(torch.nextafter(torch.tensor(smallest, dtype=flat.dtype), torch.zeros((), dtype=flat.dtype)))
    none = torch.zeros((), dtype=torch.float64, device=flat.device)
    parts: list[Tensor] = []
    for block in flat.split(min(BLOCK_VALUES, CPU_BLOCK_VALUES) if on_cpu else BLOCK_VALUES):
        wide, magnitude = block.double(), block.abs()
        tiny = none
        if not (on_cpu and float(magnitude.amin()) >= smallest):
            # Values up to `below` become zero: a comparison writes a mask, which takes longer than all the rest.
            kept = torch.count_nonzero(torch.threshold_(magnitude, below, 0.0))
            tiny = (block.numel() - kept).double()
        parts += [wide.sum(), torch.dot(wide, wide), block.amin().double(), block.amax().double(), tiny]
    rows = torch.stack(parts).view(-1, 5).tolist()
    total, squares, low, high, tiny = zip(*rows, strict=True)
    if not math.isfinite(sum(squares)):
        return None
    values, low, high = flat.numel(), min(low), max(high)
    absmax = max(abs(low), abs(high))
    if flat.dtype == torch.float64 and not (_SAFE_SQUARES[0] < absmax < _SAFE_SQUARES[1]):
        return None
    zeros = values - int(torch.count_nonzero(flat)) if sum(tiny) else 0
    near = NEAR_LIMIT_SHARE * limits.max
    n_near = int(torch.count_nonzero(flat.abs() > near)) if absmax > near else 0
    return Statistics(
        low, high, absmax, sum(total) / values, math.sqrt(sum(squares) / values), 0.0, 0.0, 0.0,
        zeros / values, (sum(tiny) - zeros) / values, n_near / values, None,
    )  # fmt: skip


def _moments(flat: Tensor, finite: Tensor, absmax: float, n_finite: float) -> tuple[float, float]:
    """Mean and root mean square of the finite values, in float64 of x / absmax."""
    total, squares = 0.0, 0.0
    for values, usable in zip(flat.split(BLOCK_VALUES), finite.split(BLOCK_VALUES), strict=True):
        scaled = torch.where(usable, values, 0).double() / absmax
        block = torch.stack([scaled.sum(), scaled.square().sum()]).tolist()
        total, squares = total + block[0], squares + block[1]
    return absmax * (total / n_finite), absmax * math.sqrt(squares / n_finite)


#: Integer view, position and mask of the exponent field, and its bias, of each format.
_EXPONENT_FIELDS: dict[torch.dtype, tuple[torch.dtype, int, int, int]] = {
    torch.float64: (torch.int64, 52, 0x7FF, 1023),
    torch.float32: (torch.int32, 23, 0xFF, 127),
    torch.bfloat16: (torch.int16, 7, 0xFF, 127),
    torch.float16: (torch.int16, 10, 0x1F, 15),
    torch.float8_e5m2: (torch.uint8, 2, 0x1F, 15),
    torch.float8_e4m3fn: (torch.uint8, 3, 0xF, 7),
}


@torch.no_grad()
def exponent_histogram(x: Tensor) -> dict[int, int]:
    """How many values of x have each exponent: {e: number of finite values with 2^e <= |x| < 2^(e+1)}, e rising.

    Read off the exponent field of the format. Zeros count nowhere; subnormal values count together under e of the
    smallest normal number minus one. x is floating point of any shape; raises InputError for any other dtype.
    """
    if x.dtype not in _EXPONENT_FIELDS:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _EXPONENT_FIELDS)
        raise InputError(f"exponent histogram: expected one of {names}, found {x.dtype}")
    integer, shift, mask, bias = _EXPONENT_FIELDS[x.dtype]
    flat = x.detach().reshape(-1)
    counts = torch.zeros(mask + 1, dtype=torch.int64, device=x.device)
    zeros = torch.zeros((), dtype=torch.int64, device=x.device)
    for block in flat.split(BLOCK_VALUES):
        wide = block if block.dtype.itemsize > 1 else block.float()
        zeros += (wide == 0).sum()
        if block.dtype == torch.float8_e4m3fn:  # the one format whose highest exponent has finite values
            block = block[wide.isfinite()]
        field = block.view(integer).bitwise_right_shift(shift).bitwise_and_(mask)
        counts += torch.bincount(field, minlength=mask + 1)
    found = counts.tolist()
    found[0] -= int(zeros)
    if x.dtype != torch.float8_e4m3fn:
        found[mask] = 0  # infinities and NaN
    return {field - bias: count for field, count in enumerate(found) if count}
