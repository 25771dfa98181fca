"""What the machine can do at most, measured beside what is timed: bytes moved by a copy, flops of one large product."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

import torch

from workbench.errors import InputError
from workbench.kernels.requirements import dtype_name

#: Values on a side of the product that is measured, and bytes of the tensor that is copied.
SIDE = {"cuda": 8192, "cpu": 768}
COPIED = {"cuda": 1 << 31, "cpu": 1 << 26}


@dataclass(frozen=True, slots=True)
class Limits:
    """bandwidth  bytes/s that a copy reads and writes;  rates  flop/s of a product, by the name of its dtype."""

    bandwidth: float
    rates: Mapping[str, float]

    def seconds(self, moved: float, flops: float, dtype: torch.dtype) -> tuple[float, str]:
        """(the least time in which `moved` bytes and `flops` can be had, which of them bounds it: memory or compute).

        Raises InputError for flops of a dtype whose rate was not measured.
        """
        name = dtype_name(dtype)
        if flops and name not in self.rates:
            raise InputError(f"limits: expected a measured rate of {name}, found {', '.join(self.rates) or 'none'}")
        memory, compute = moved / self.bandwidth, flops / self.rates[name] if flops else 0.0
        return (compute, "compute") if compute > memory else (memory, "memory")


def measure_limits(device: str, dtype: torch.dtype) -> Limits:
    """Copy bandwidth and the rate of a square product in `dtype`, each the median of some runs."""
    kind = device.split(":")[0]
    source = torch.empty(COPIED[kind], dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    bandwidth = 2 * source.numel() / _median_seconds(lambda: target.copy_(source), kind)
    a, b = (torch.randn(SIDE[kind], SIDE[kind], device=device).to(dtype) for _ in range(2))
    product = _median_seconds(lambda: a @ b, kind)
    return Limits(bandwidth, {dtype_name(dtype): 2.0 * SIDE[kind] ** 3 / product})


def _median_seconds(run: Callable[[], object], kind: str, runs: int = 9) -> float:
    found = []
    for number in range(3 + runs):
        if kind == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            stop.record()
            stop.synchronize()
            seconds = 1e-3 * start.elapsed_time(stop)
        else:
            begun = time.perf_counter()
            run()
            seconds = time.perf_counter() - begun
        if number >= 3:
            found.append(seconds)
    return median(found)
