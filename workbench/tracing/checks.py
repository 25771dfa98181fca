"""Checks for values that are not finite, cheaper than all statistics: of every value, or of a sample at both ends.

    exact     one pass without a second tensor: the smallest and largest value of a tensor that holds a NaN are NaN, of
              one that holds an infinity infinite. What is bad is then counted
    sampled   the first 64 and the last 64 values in row-major order; all of a tensor that has no more. A fault that
              touches neither end is missed: `analysis.nan_checks` measures how often

    ranges    the smallest and largest finite value, and what is not finite: all that a kernel can say of a stage inside
              it without writing it to memory (`taps.Ranges`). Of such a stage `first_bad` is None

The first two give `Statistics` whose moments and range are NaN, not measured; those of the sample are shares of the
sample.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor

from workbench.taps import Ranges
from workbench.tracing.statistics import Statistics, describe

#: Values that the sampled check reads at each end.
SAMPLE_VALUES = 64


def ends(x: Tensor, count: int = SAMPLE_VALUES) -> Tensor:
    """The first and the last `count` values of x in row-major order, [2 count]; all of a smaller x. Copies no more."""
    size = x.numel()
    if size <= 2 * count:
        return x.reshape(-1)
    if x.is_contiguous():
        flat = x.view(-1)
        return torch.cat([flat[:count], flat[-count:]])
    positions = torch.cat([torch.arange(count), torch.arange(size - count, size)]).to(x.device)
    return x[torch.unravel_index(positions, x.shape)]


def is_finite(x: Tensor) -> bool:
    """Whether every value is finite, from one pass over x."""
    if x.numel() == 0:
        return True
    if x.dtype.itemsize == 1:
        x = x.float()  # 8-bit formats have no order of their own
    return bool(torch.isfinite(torch.stack(torch.aminmax(x))).all())


def _shares(x: Tensor) -> Statistics:
    """Shares of what is not finite in x, and the first such index."""
    nan = math.nan
    if is_finite(x):
        return Statistics(nan, nan, nan, nan, nan, 0.0, 0.0, 0.0, nan, nan, nan, None)
    flat = x.reshape(-1)
    flat = flat.float() if flat.dtype.itemsize == 1 else flat
    counts = torch.stack([flat.isnan().sum(), (flat == torch.inf).sum(), (flat == -torch.inf).sum()])
    place = int((~flat.isfinite()).nonzero()[0])
    first_bad = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), x.shape))
    of_nan, of_pinf, of_ninf = (count / x.numel() for count in counts.tolist())
    return Statistics(nan, nan, nan, nan, nan, of_nan, of_pinf, of_ninf, nan, nan, nan, first_bad)


@torch.no_grad()
def check_exact(x: Tensor) -> Statistics:
    """Shares of all values that are NaN, +inf, -inf, and the first such index."""
    return _shares(x)


@torch.no_grad()
def check_sampled(x: Tensor) -> Statistics:
    """The same of the values at both ends; the index is that in x."""
    sample = ends(x)
    found = _shares(sample)
    if found.first_bad is None:
        return found
    (place,) = found.first_bad
    if place >= SAMPLE_VALUES and x.numel() > 2 * SAMPLE_VALUES:
        place += x.numel() - 2 * SAMPLE_VALUES
    found_at = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), x.shape))
    return dataclasses.replace(found, first_bad=found_at)


@torch.no_grad()
def check_ranges(x: Tensor) -> Statistics:
    """Smallest and largest finite value, shares of NaN, +inf, -inf, and the first such index."""
    found = _shares(x)
    wide = x.float() if x.dtype.itemsize == 1 else x
    if found.first_bad is not None:
        wide = wide[wide.isfinite()]
    if wide.numel() == 0:
        return found
    low, high = (limit.item() for limit in torch.aminmax(wide))
    return dataclasses.replace(found, min=low, max=high, absmax=max(abs(low), abs(high)))


def of_ranges(ranges: Ranges) -> Statistics:
    """The same of a stage that a kernel has told the ranges of; waits for the device."""
    nan, size = math.nan, max(1, math.prod(ranges.shape))
    if not ranges.values.numel():
        return Statistics(nan, nan, nan, nan, nan, 0.0, 0.0, 0.0, nan, nan, nan, None)
    values = ranges.values.flatten(0, -2).double()
    low, high, *counts = torch.cat([values[:, :1].amin(0), values[:, 1:2].amax(0), values[:, 2:].sum(0)]).tolist()
    if low > high:  # not one finite value
        low = high = nan
    return Statistics(
        low, high, max(abs(low), abs(high)), nan, nan, *(count / size for count in counts), nan, nan, nan, None
    )


#: What a trace measures of each tensor, by the name that `workbench.trace(model, check=NAME)` takes.
CHECKS: dict[str, Callable[[Tensor], Statistics]] = {
    "statistics": describe, "exact": check_exact, "sampled": check_sampled, "ranges": check_ranges,
}  # fmt: skip
