"""Uninitialised memory made visible: `torch.empty` and its relatives hand a backend NaN, not leftovers.

Fresh memory is often zero, so code that reads an element it never wrote passes a test by luck. With NaN it fails. Only
calls made by code of the named packages are affected: torch's own layers and other libraries may rely on leftovers
being harmless, and filling for them would cost time. Memory that compiled code allocates by itself is out of reach
here; `conformance` leaves freed blocks full of NaN for it to find.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor

#: (owner, name) of everything in torch's public interface that returns memory without writing it.
ALLOCATORS = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch, "empty_permuted"),
    (Tensor, "new_empty"),
    (Tensor, "new_empty_strided"),
)

#: Whose calls are poisoned where nobody says otherwise.
PACKAGES = ("workbench",)


def is_frame_of(frame: FrameType, packages: tuple[str, ...]) -> bool:
    """Whether a calling frame belongs to a module of one of the packages."""
    name = frame.f_globals.get("__name__") or ""
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _caller() -> FrameType:
    """The frame that asked for memory: not one of this file, which a block inside a block would see."""
    frame = sys._getframe(2)
    while frame.f_globals is globals():
        frame = frame.f_back
    return frame


def poisoned(allocate: Callable[..., Tensor], packages: tuple[str, ...] = PACKAGES) -> Callable[..., Tensor]:
    """`allocate`, its result filled with NaN when code of `packages` calls it and its dtype has NaN."""

    @functools.wraps(allocate)
    def allocate_poisoned(*args: Any, **kwargs: Any) -> Tensor:
        # Under torch.compile the frame check cannot be traced; compiled code gets the plain allocation.
        if torch.compiler.is_compiling() or not is_frame_of(_caller(), packages):
            return allocate(*args, **kwargs)
        memory = allocate(*args, **kwargs)
        if memory.is_meta or not (memory.is_floating_point() or memory.is_complex()):
            return memory
        with torch.no_grad():  # a leaf that requires grad refuses writes in place otherwise
            return memory.fill_(float("nan"))

    return allocate_poisoned


@contextmanager
def poisoned_memory(packages: tuple[str, ...] = PACKAGES) -> Iterator[None]:
    """Every allocator poisoned for code of `packages`, until the end of the block. Not for several threads at once."""
    kept = [(owner, name, getattr(owner, name), name in vars(owner)) for owner, name in ALLOCATORS]
    try:
        for owner, name, allocate, _ in kept:
            setattr(owner, name, poisoned(allocate, packages))
        yield
    finally:
        for owner, name, allocate, is_own in kept:
            if is_own:
                setattr(owner, name, allocate)
            else:  # inherited, as torch.Tensor's: the wrapper goes and what was below shows again
                delattr(owner, name)
