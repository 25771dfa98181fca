"""How long one call takes on a device: in a CUDA graph, between CUDA events, or by the clock of the processor.

A kernel's inputs are cold in a model: other layers ran in between. So a call is timed over several sets of inputs in
turn, together larger than the second-level cache, and not over one that stays in it. In a CUDA graph the host takes no
part: that is the time of the kernels. A call that makes the host wait cannot be captured; it is timed by itself,
between events, with the cache flushed before, which includes what the host takes to launch it. Which of the two it was
is told with every time.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from workbench.errors import BackendFailure, InputError, one_line

GRAPH, EAGER = "graph", "eager"

#: Inputs in turn, and outputs that are kept so that none is written where the last one was: so many times the cache. A
#: cache that does not drop the oldest first still holds a part of each round, at most one in so many.
CACHES = 16
#: A replayed graph, and what lies between two events, takes about as long; in less its own launch would show.
GRAPH_US, SAMPLE_US = 500.0, 1000.0
MOST_CALLS = 512
#: What a card without a figure of its own is taken to have.
CACHE_BYTES = 50 << 20

Run = Callable[[], object]


@dataclass(slots=True)
class Clock:
    """One side, ready to be timed. `sample()` is the time of one call in microseconds; `how` says what was timed."""

    how: str
    sample: Callable[[], float]
    first: object = None
    owned: list[object] = field(default_factory=list)


def cache_bytes(device: str) -> int:
    """Bytes of the second-level cache."""
    if device == "cpu":
        return CACHE_BYTES
    return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)) or CACHE_BYTES


def sets_needed(moved: float, device: str, most: int = 64) -> int:
    """How many sets of inputs there must be, of which a call touches `moved` bytes, so that none is still cached."""
    return max(1, min(most, math.ceil(CACHES * cache_bytes(device) / max(moved, 1.0))))


def prepare(calls: Sequence[Run], device: str, clock: str = GRAPH) -> Clock:
    """The clock of a side: `calls` are the same computation on different inputs. Each must have run once before.

    `first` of the result is what the first call gave when it was last timed: to be checked, since a replay runs none
    of Python's checks. Raises InputError for an unknown clock.
    """
    if clock not in (GRAPH, EAGER):
        raise InputError(f"clock {clock!r}: expected {GRAPH} or {EAGER}")
    if device.split(":")[0] == "cpu":
        return _by_processor(calls)
    if clock == EAGER:
        return _by_events(calls, device, "")
    waits = host_wait(calls[0])
    if waits is not None:
        return _by_events(calls, device, f"no CUDA graph: {waits}; ")
    return _in_graph(calls, device)


def host_wait(run: Run) -> str | None:
    """What makes the host wait for the device in a call, in one line; None where nothing does."""
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except (RuntimeError, BackendFailure) as error:
        if "synchronizing CUDA operation" not in str(error):
            raise
        return "the host waits for the device"
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return None


def _by_processor(calls: Sequence[Run]) -> Clock:
    turn = _turns(calls)
    clock = Clock("wall clock, one call", lambda: 0.0)

    def sample() -> float:
        run, is_first = next(turn)
        started = time.perf_counter()
        found = run()
        seconds = time.perf_counter() - started
        if is_first:
            clock.first = found
        return 1e6 * seconds

    clock.sample = sample
    return clock


def _by_events(calls: Sequence[Run], device: str, why: str) -> Clock:
    turn, flushed = _turns(calls), torch.empty(4 * cache_bytes(device), dtype=torch.uint8, device=device)
    clock = Clock(f"{why}CUDA events around one call, cache flushed", lambda: 0.0, owned=[flushed])

    def sample() -> float:
        run, is_first = next(turn)
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flushed.zero_()
        torch.cuda.synchronize()
        start.record()
        found = run()
        stop.record()
        stop.synchronize()
        if is_first:
            clock.first = found
        return 1e3 * start.elapsed_time(stop)

    clock.sample = sample
    return clock


def _turns(calls: Sequence[Run]):
    while True:
        for place, run in enumerate(calls):
            yield run, place == 0


def _in_graph(calls: Sequence[Run], device: str) -> Clock:
    try:
        graph, first, kept = _captured(calls, device, 1)
    except (RuntimeError, BackendFailure) as error:
        torch.cuda.synchronize()
        return _by_events(calls, device, f"no CUDA graph: {one_line(str(error))[:160]}; ")
    once = _replayed_us(graph, 3)
    repeats = max(1, min(math.ceil(GRAPH_US / once), MOST_CALLS // len(calls)))
    if repeats > 1:
        del graph, first, kept
        graph, first, kept = _captured(calls, device, repeats)
        once = _replayed_us(graph, 3)
    count, replays = repeats * len(calls), max(1, math.ceil(SAMPLE_US / once))
    how = f"CUDA graph of {count} call{'' if count == 1 else 's'} on {len(calls)} set{'' if len(calls) == 1 else 's'}"
    return Clock(how, lambda: _replayed_us(graph, replays) / count, first, [graph, kept])


def _captured(calls: Sequence[Run], device: str, repeats: int) -> tuple[torch.cuda.CUDAGraph, object, object]:
    """(graph, what the first call in it gives, the outputs that must live on)."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # what a library allocates on a stream of its own
        calls[0]()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph, kept, size, first = torch.cuda.CUDAGraph(), deque(), 0, None
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # a library's other threads are its own affair
        for number in range(repeats * len(calls)):
            found = calls[number % len(calls)]()
            if first is None:
                first = found
            kept.append(found)
            size += _bytes(found)
            while len(kept) > 1 and size - _bytes(kept[0]) >= CACHES * cache_bytes(device):
                size -= _bytes(kept.popleft())
    torch.cuda.synchronize()
    return graph, first, kept


def _bytes(found: object) -> int:
    return sum(x.numel() * x.element_size() for x in tree_leaves(found) if isinstance(x, Tensor))


def _replayed_us(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    """Microseconds of one replay."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(replays):
        graph.replay()
    stop.record()
    stop.synchronize()
    return 1e3 * start.elapsed_time(stop) / replays
