"""Interleaved repeats and their spread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from workbench.errors import InputError


def interleave(
    runs: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warmup: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each run in each round: A B, B A, A B, ... after `warmup` unmeasured rounds.

    Whatever slows the machine for a while slows all sides, and none always runs in the wake of the same
    other. A run that works asynchronously must wait for its own end. Raises InputError without runs or
    rounds.
    """
    if not runs or rounds < 1:
        raise InputError(f"timing: expected at least one run and one round, found {len(runs)} and {rounds}")
    samples: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs)
    for number in range(warmup + rounds):
        for name in order if number % 2 == 0 else reversed(order):
            start = clock()
            runs[name]()
            seconds = clock() - start
            if number >= warmup:
                samples[name].append(seconds)
    return samples


def spread(samples: Sequence[float]) -> tuple[float, float]:
    """(median, interquartile range); the range of fewer than two samples is 0."""
    if not samples:
        raise InputError("timing: expected at least one sample, found none")
    if len(samples) < 2:
        return samples[0], 0.0
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return middle, high - low
