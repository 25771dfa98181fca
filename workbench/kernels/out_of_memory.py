"""Which errors say that memory ran out: what a backend's failure is told apart by, and what a recovery acts on."""

from __future__ import annotations

from collections.abc import Iterator

import torch

#: How torch's allocator for the CPU begins its complaint; it has no type of its own (c10/core/impl/alloc_cpu.cpp).
CPU_ALLOCATOR = "DefaultCPUAllocator: can't allocate memory"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator failed: torch.OutOfMemoryError, MemoryError, torch's CPU allocator, or one as a cause.

    Backends' failures are wrapped, so the chain of `__cause__` is followed. What a library says in words of its own
    (CUBLAS_STATUS_ALLOC_FAILED and the like) is no allocator's error and may have left a broken handle behind.
    """
    return any(
        isinstance(link, torch.OutOfMemoryError | MemoryError)
        or (isinstance(link, RuntimeError) and CPU_ALLOCATOR in str(link))
        for link in chain_of(error, with_context=False)
    )


def chain_of(error: BaseException, *, with_context: bool) -> Iterator[BaseException]:
    """An error and its causes, outermost first; with all that was being handled if asked for."""
    waiting, seen = [error], set()
    while waiting:
        link = waiting.pop(0)
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        waiting += [link.__cause__, link.__context__] if with_context else [link.__cause__]
