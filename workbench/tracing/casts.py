"""Checked casts: what every narrowing cast of a traced computation did to the values that it was given.

With p the significant bits of the target format (11 of float16, 8 of bfloat16, 24 of float32), of the values of a cast

    overflowed   finite before, not finite after
    flushed      not zero before, zero after
    halved       neither, but left with fewer than half of the bits that the format has: the relative error exceeds
                 2^(-p/2). Ordinary rounding errs by 2^-p at most; this is what becomes of numbers that end up subnormal

Values that were not finite before count nowhere. A cast is narrowing when its target cannot hold every value of its
source: float16 to bfloat16 loses bits, bfloat16 to float16 loses range, both are. Roundings inside an operator (a
bfloat16 matrix product rounds its sums once) are no casts and have no wide value that one could look at.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.tracing.statistics import BLOCK_VALUES

#: Operators that change nothing but the dtype (and place) of a tensor. In inference mode the composites `to` and
#: `type_as` arrive whole, otherwise as the `_to_copy` or `copy_` that they are made of.
CAST_OPERATORS = frozenset({"aten::_to_copy", "aten::to", "aten::type_as", "aten::copy_", "aten::copy"})

#: Columns of `Casts.table`, in order.
CAST_COLUMNS = ("tap", "from", "to", "values", "overflowed", "flushed", "halved")

#: Stands for a tap point after the last one that was reached.
AFTER_THE_LAST = "(after the last)"


@dataclass(slots=True)
class CastCounts:
    """Numbers of values, as the module's text defines them."""

    values: int = 0
    overflowed: int = 0
    flushed: int = 0
    halved: int = 0

    def add(self, other: CastCounts) -> None:
        self.values += other.values
        self.overflowed += other.overflowed
        self.flushed += other.flushed
        self.halved += other.halved


@functools.cache
def is_narrowing(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether `target`, a floating-point format too, lacks values of `source`."""
    if not (source.is_floating_point and target.is_floating_point) or source == target:
        return False
    before, after = torch.finfo(source), torch.finfo(target)
    return after.eps > before.eps or after.max < before.max or after.smallest_normal > before.smallest_normal


@torch.no_grad()
def count_cast(source: Tensor, result: Tensor) -> CastCounts:
    """What became of `source` in `result`, the same values in a narrower dtype; any shape, compared in float64."""
    error_limit = torch.finfo(result.dtype).eps ** 0.5 * 2**-0.5  # eps = 2^(1 - p)
    counts = CastCounts(values=source.numel())
    source, result = source.detach().expand(result.shape).reshape(-1), result.detach().reshape(-1)
    for before, after in zip(source.split(BLOCK_VALUES), result.split(BLOCK_VALUES), strict=True):
        before, after = before.to(after.device).double(), after.double()
        finite, stays = before.isfinite(), after.isfinite()
        kept = stays & (after != 0)
        found = torch.stack(
            [
                (finite & ~stays).sum(),
                (finite & (before != 0) & (after == 0)).sum(),
                (finite & kept & ((before - after).abs() > error_limit * before.abs())).sum(),
            ]
        )
        overflowed, flushed, halved = found.tolist()
        counts.add(CastCounts(0, overflowed, flushed, halved))
    return counts


class Casts(TorchDispatchMode):
    """Counts the narrowing casts inside its context; `seen_at(tap)` gives those since the last call to a tap point."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: dict[tuple[str, torch.dtype, torch.dtype], CastCounts] = {}
        self._waiting: list[tuple[torch.dtype, torch.dtype, CastCounts]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func._schema.name not in CAST_OPERATORS:
            return func(*args, **kwargs)
        writes = func._schema.name in ("aten::copy_", "aten::copy")
        source = args[1] if writes else args[0]
        result = func(*args, **kwargs)
        if is_narrowing(source.dtype, result.dtype) and not result.is_meta:
            self._waiting.append((source.dtype, result.dtype, count_cast(source, result)))
        return result

    def seen_at(self, tap: str) -> None:
        """Book what was counted since the last call under `tap`, the point where its effect is first seen."""
        for source, target, counts in self._waiting:
            self._counts.setdefault((tap, source, target), CastCounts()).add(counts)
        self._waiting.clear()

    @property
    def table(self) -> pd.DataFrame:
        """A row for each tap point and pair of formats, in the order of computation, summed over all passes.

        `tap` is the first tap point after the cast; `from` and `to` are dtypes; the rest is in numbers of values.
        """
        counts = list(self._counts.items())
        for source, target, waiting in self._waiting:
            counts.append(((AFTER_THE_LAST, source, target), waiting))
        rows = [
            (tap, str(source).removeprefix("torch."), str(target).removeprefix("torch."),
             c.values, c.overflowed, c.flushed, c.halved)
            for (tap, source, target), c in counts
        ]  # fmt: skip
        return pd.DataFrame(rows, columns=list(CAST_COLUMNS))
